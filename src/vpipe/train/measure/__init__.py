"""What layers cost and whether a plan keeps its word: a few steps of the real thing, timed on every rank.

Words: docs/glossary.md.
"""
