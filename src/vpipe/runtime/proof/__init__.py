"""A step beside one plain process: the plain loop, what is watched, and what the first difference means.

Words: docs/glossary.md.
"""
