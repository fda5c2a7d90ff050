"""Layers that keep a state instead of keys and values: how they are found, and how their rows run."""
