"""Layers on their way from rank to rank: what is sent ahead, what travels, what its new holder has already.

Words: docs/glossary.md.
"""
