"""Speculation: how much to draft, and what became of it."""
