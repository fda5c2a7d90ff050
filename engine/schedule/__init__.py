"""Requests, and which of them run in a step."""
