"""How much to draft, and what became of it."""
