"""From one command to many ranks, and back to none: starting processes, showing what they say, ending them all.

Words: docs/glossary.md.
"""
