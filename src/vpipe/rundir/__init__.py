"""The run directory: file names, locking, records of a run and how it ended. No torch.

Words: docs/glossary.md.
"""
