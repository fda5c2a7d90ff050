"""The terminal client: complete, chat and bench against any server."""
