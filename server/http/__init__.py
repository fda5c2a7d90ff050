"""Sockets, what clients may do with them, and how they end."""
