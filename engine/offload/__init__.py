"""The prefix cache outlives memory: what a block's bytes are, and whose they are."""
