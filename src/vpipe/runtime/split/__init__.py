"""A backward in two parts: input gradients now, weight gradients later, read off autograd's own graph.

Words: docs/glossary.md.
"""
