"""Rounding of a whole model to 4 bits: the order of layers, and the text that runs through them."""
