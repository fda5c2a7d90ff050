"""Checkpoints whose linear weights come in few bits: a file for each format that is read."""
