"""What a run shows and writes down: its facts before, its lines and events meanwhile, its figures afterwards.

Words: docs/glossary.md.
"""
