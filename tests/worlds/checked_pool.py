"""A block pool that checks its integrity after every operation, and short ways to drive it."""

from collections.abc import Callable, Sequence

from kvpool.block_pool import BlockPool

SIZE = 4
TOKENS = list(range(100, 140))


class CheckedPool(BlockPool):
    """Checks its integrity after every operation that changes it, refused ones included."""

    def _checked(self, operation: Callable[[], object]) -> object:
        try:
            return operation()
        finally:
            self.check_integrity()

    def open(
        self,
        request_id: str,
        token_ids: Sequence[int],
        cache_salt: str,
        max_cached_tokens: int,
        is_new: bool = True,
        num_usable: Callable[[Sequence[int]], int] | None = None,
    ) -> int:
        opened = super().open
        result = self._checked(
            lambda: opened(request_id, token_ids, cache_salt, max_cached_tokens, is_new, num_usable)
        )
        assert isinstance(result, int)
        return result

    def allocate(self, request_id: str, num_tokens: int) -> bool:
        allocate = super().allocate
        return bool(self._checked(lambda: allocate(request_id, num_tokens)))

    def allocate_draft(self, request_id: str, num_tokens: int) -> int:
        allocate_draft = super().allocate_draft
        result = self._checked(lambda: allocate_draft(request_id, num_tokens))
        assert isinstance(result, int)
        return result

    def promote(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        promote = super().promote
        self._checked(lambda: promote(request_id, token_ids, num_computed_tokens))

    def free_draft(self, request_id: str) -> None:
        free_draft = super().free_draft
        self._checked(lambda: free_draft(request_id))

    def free(self, request_id: str) -> None:
        free = super().free
        self._checked(lambda: free(request_id))

    def forget_blocks(self) -> None:
        self._checked(super().forget_blocks)


def run(
    pool: BlockPool,
    request_id: str,
    token_ids: Sequence[int],
    cache_salt: str = "",
    cap: int = 10**9,
    usable: int | None = None,
) -> int:
    """Open a request and commit all its tokens; returns how many came from the cache. ``usable``: of so
    many it can make use."""
    asked = None if usable is None else (lambda _: usable)
    num_cached = pool.open(request_id, token_ids, cache_salt, cap, num_usable=asked)
    assert pool.allocate(request_id, len(token_ids))
    pool.promote(request_id, token_ids, len(token_ids))
    return num_cached


def counts(free: int, draft: int, committed: int, cached: int) -> dict[str, int]:
    return {"free": free, "draft": draft, "committed": committed, "cached": cached}
