"""How values travel between ranks: one interface, several carriers.

Words: docs/glossary.md.
"""
