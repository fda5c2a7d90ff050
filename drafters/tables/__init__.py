"""Drafters that count or remember what follows what, and the static trees they fill."""
