"""``python -m bench.peers``: other servers and this one, side by side on one machine."""
