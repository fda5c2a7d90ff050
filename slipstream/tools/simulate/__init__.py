"""Simulates fleets larger than the machines at hand, by events.

A replica is the engine's own scheduler, block pool, drafting and gamma policies; only the model is
missing. Its step times come from a profile that was measured on a server (``live``).
"""
