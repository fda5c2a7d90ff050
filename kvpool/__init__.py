"""Where keys and values live: the bookkeeping of blocks (plain Python) and their tensors."""
