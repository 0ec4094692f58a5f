"""Checkpoints: one file per layer, written beside training, read by any number of stages, exported from.

Words: docs/glossary.md.
"""
