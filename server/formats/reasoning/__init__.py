"""Ways of writing reasoning, one file each: what has a ``FORMAT`` here is known by its name."""
