"""Verification: which drafts stand, by matching or by rejection."""
