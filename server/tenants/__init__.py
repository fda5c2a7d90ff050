"""Tenants: API keys, and the terms on which each is served. What the limits come to is
counted in the engine (``engine.schedule.limits``), which sees all requests."""
