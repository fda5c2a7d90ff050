"""Checkpoints with 8-bit weights, and what that changes."""
