"""Attention over the block KV store."""
