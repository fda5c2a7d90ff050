"""``slipstream pull`` and ``slipstream models``: models of the hub, those here and those to recommend."""
