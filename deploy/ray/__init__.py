"""Replicas of the server under Ray Serve: ``serve run deploy/ray/serve.yaml``."""
