"""The APIs, a folder each: its requests become those that ``server.request.chat`` describes. Those of its
files that have a ``router`` are part of the application."""
