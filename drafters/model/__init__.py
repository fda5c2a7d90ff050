"""Drafters that run a model or trained heads; the engine brings those through ``protocol``."""
