"""Drafters that copy earlier text: the request's own, its tenant's, a prediction."""
