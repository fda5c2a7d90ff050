"""Models by their names on a hub: which files are meant, fetched into huggingface's own cache."""
