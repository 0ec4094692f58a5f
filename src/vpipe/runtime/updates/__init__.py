"""From gradients to the next weights: versions, ties, replicas, norms and the update itself.

Words: docs/glossary.md.
"""
