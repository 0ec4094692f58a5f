"""The schedules themselves: one file per family, each a pure function of numbers that writes a program.

Words: docs/glossary.md.
"""
