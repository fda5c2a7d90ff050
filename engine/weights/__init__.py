"""Weights as files have them: what there is, what it means, and how it comes into a model."""
