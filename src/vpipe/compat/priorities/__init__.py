"""Which of several ready actions goes first on a device that they share.

Words: docs/glossary.md.
"""
