"""A run's paper: what lies in its directory, who may write there, and how it ended. No torch.

Words: docs/glossary.md.
"""
