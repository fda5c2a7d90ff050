"""Weights rounded to 4 bits by what their layers read: the arithmetic, the order of layers, the text."""
