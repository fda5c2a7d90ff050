"""Requests and who runs in a step."""
