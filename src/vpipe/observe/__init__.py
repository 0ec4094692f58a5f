"""See the pipeline: what a run wrote down, where its time went, and pages that show it.

Words: docs/glossary.md.
"""
