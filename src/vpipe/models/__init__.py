"""Models as lists of layers; ``model.build`` makes one by name.

Words: docs/glossary.md.
"""
