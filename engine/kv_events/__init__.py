"""Tells routers of requests what a replica's prefix cache holds (extra ``kv-events``)."""
