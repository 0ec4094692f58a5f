"""From a config to a trained model: data, optimizer, learning rate, checkpoints, metrics, and the loop around the
pipeline.

Words: docs/glossary.md.
"""
