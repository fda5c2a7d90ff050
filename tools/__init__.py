"""Commands beside serving: replay and the stand template."""
