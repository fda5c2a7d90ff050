"""From the engine's events to JSON and server-sent events."""
