"""Computes what drafting would have gained on existing texts: replays a log through drafters."""
