"""What model drafters need from the engine: draft models, heads, candidates."""
