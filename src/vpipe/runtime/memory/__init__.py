"""What is saved between forward and backward: kept, recomputed or swapped, and how many bytes that is.

Words: docs/glossary.md.
"""
