"""Drafters whose guesses are rows of the target's own forward: Jacobi and Lookahead."""
