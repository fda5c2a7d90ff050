"""Errors of the block pool, apart from it: mypyc compiles nothing that inherits from ``RuntimeError``."""


class BlockPoolError(RuntimeError):
    """The pool was used against its contract: a bug of the caller. Nothing was changed."""
