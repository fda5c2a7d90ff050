"""Which drafts stand, by matching or by rejection."""
