"""Models as lists of layers; ``catalog.build`` makes one by name."""
