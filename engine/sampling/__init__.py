"""From logits to tokens: edits, truncation, noise, log-probabilities."""
