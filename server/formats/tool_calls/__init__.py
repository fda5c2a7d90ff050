"""Ways of writing tool calls, one file each: what has a ``FORMAT`` here is known by its name."""
