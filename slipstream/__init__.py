"""The small Python API: speculative decoding of one text, without a server."""
