"""Models as lists of layers; ``model.build`` makes one by name."""
