"""Copies and the target's own top tokens, grown into one tree: the core of ``auto``, compiled."""
