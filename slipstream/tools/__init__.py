"""Commands beside serving: quantise, replay, fit a template of drafts, simulate fleets."""
