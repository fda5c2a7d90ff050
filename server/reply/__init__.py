"""Turns the engine's events into JSON and server-sent events."""
