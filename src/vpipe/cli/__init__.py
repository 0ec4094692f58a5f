"""The command line: one file per command, each loaded only when it is used. The only room that prints.

Words: docs/glossary.md.
"""
