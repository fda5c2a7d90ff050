"""Loading a target, its linear layers, its forward, and the check of both at start."""
