"""Checkpoints with quantized linear weights: one file for each format."""
