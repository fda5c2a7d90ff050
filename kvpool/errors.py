"""Errors of the block pool."""


class BlockPoolError(RuntimeError):
    """The pool was used against its contract: a bug of the caller. Nothing was changed."""
