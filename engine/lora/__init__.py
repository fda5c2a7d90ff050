"""Adapters of low rank (LoRA), each for the requests that ask for it: read, loaded and let go."""
