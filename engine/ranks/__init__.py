"""Several processes that compute one model's forward together, a part of every layer each."""
