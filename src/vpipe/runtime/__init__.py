"""Executes programs: stages, transports, weight versions, and the one loop that runs them all.

Words: docs/glossary.md.
"""
