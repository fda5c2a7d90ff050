"""The engine's side of drafters with a model: draft models, heads, candidates."""
