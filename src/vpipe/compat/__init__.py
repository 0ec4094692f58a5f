"""What exists only for the files and words of VPipe and OurGPipe, and for PipeDream's profiles.

Nothing else imports this package: ``registry.FORM_REGISTRY`` names what the rest of vpipe may ask for, and loads it
when it is asked for. The models and data sets of both systems are in ``models`` and ``data``.

Words: docs/glossary.md.
"""
