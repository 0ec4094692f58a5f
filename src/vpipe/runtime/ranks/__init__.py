"""Ranks as processes: how they meet, stay in touch, and learn why another one has ended.

Words: docs/glossary.md.
"""
