"""The models of a server: what answers for each, and when its engine is loaded and ended."""
