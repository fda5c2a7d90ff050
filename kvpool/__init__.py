"""Keys and values: the bookkeeping of blocks (plain Python) and their tensors."""
