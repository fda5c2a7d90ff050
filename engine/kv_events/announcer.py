"""Makes events of what the prefix cache tells, a batch for each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.kv_events.wire import (
    MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    block_hash,
)
from engine.request.salts import Salt, salt_of


class Announcer:
    """The pool's ``CacheListener``. ``send`` receives each step's changes, in order. With ``salted``,
    blocks of requests with a cache salt are announced, too, along with their salts; otherwise they are
    omitted."""

    def __init__(self, block_size: int, salted: bool, send: Callable[[list[Event]], None]) -> None:
        self._block_size = block_size
        self._salted = salted
        self._send = send
        # What an engine before this one has told of is gone, and nobody takes it back.
        self._events: list[Event] = [AllBlocksCleared()]
        self._last: bytes | None = None
        # Who was never told of a block is not told of its end either.
        self._announced: set[bytes] = set()

    def stored(
        self, digest: bytes, parent: bytes | None, token_ids: Sequence[int], cache_salt: str
    ) -> None:
        salt = salt_of(cache_salt)
        if salt.cache_salt and not self._salted:
            return
        self._announced.add(digest)
        newest = self._events[-1] if self._events else None
        if isinstance(newest, BlockStored) and parent is not None and parent == self._last:
            newest.block_hashes.append(block_hash(digest))
            newest.token_ids.extend(token_ids)
            if newest.extra_keys is not None:
                newest.extra_keys.append(None)
        else:
            event = BlockStored(
                [block_hash(digest)],
                None if parent is None else block_hash(parent),
                list(token_ids),
                self._block_size,
                medium=MEDIUM,
                lora_name=salt.adapter or None,
                extra_keys=[_further_keys(salt)] if cache_salt and parent is None else None,
            )
            self._events.append(event)
        self._last = digest

    def removed(self, digest: bytes) -> None:
        if digest not in self._announced:
            return
        self._announced.remove(digest)
        newest = self._events[-1] if self._events else None
        if isinstance(newest, BlockRemoved):
            newest.block_hashes.append(block_hash(digest))
        else:
            self._events.append(BlockRemoved([block_hash(digest)], MEDIUM))

    def cleared(self) -> None:
        if self._announced:
            self._announced.clear()
            self._events.append(AllBlocksCleared())

    def flush(self) -> None:
        """The step is over."""
        if self._events:
            events, self._events = self._events, []
            self._send(events)


def _further_keys(salt: Salt) -> list[str]:
    """Returns what a text's first hash is made of besides tokens."""
    return [key for key in (salt.adapter, salt.digest, salt.cache_salt) if key]
