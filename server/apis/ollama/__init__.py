"""Ollama's ``/api``."""
