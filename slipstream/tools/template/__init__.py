"""Shapes of draft trees that fit what a model writes, from texts of its own."""
