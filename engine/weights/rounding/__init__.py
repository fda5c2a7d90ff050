"""Floats rounded to few bits: to 8, and to 4 by what their layers read."""
