"""What goes wrong with blocks."""


class BlockPoolError(RuntimeError):
    """The pool was used against its contract: a bug of the caller. Nothing was changed."""
