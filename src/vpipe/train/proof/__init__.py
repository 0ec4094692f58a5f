"""Whether a pipeline trains as one process does, to the bit: of a config (``vpipe parity``), of a device.

Words: docs/glossary.md.
"""
