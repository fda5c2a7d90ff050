"""Constrained output: grammars, and what each request's grammar allows after any path."""
