"""A reader of KV events: an index of blocks, by the contract of vLLM's consumers and none of our
types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.kv_events.wire import Batch, Event, encode
from kvpool.block_pool import BlockPool


@dataclass
class KvIndex:
    """``tokens``: of each block that a pod has announced and not taken back, by its hash."""

    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    parents: dict[int, int | None] = field(default_factory=dict)
    salts: dict[int, str] = field(default_factory=dict)
    last_number: int | None = None

    def read(self, frames: Sequence[bytes]) -> None:
        """A message as it comes from a socket."""
        topic, number, payload = frames
        assert len(topic.split(b"@")) == 3
        assert len(number) == 8
        self.last_number = int.from_bytes(number, "big")
        self.apply(payload)

    def apply(self, payload: bytes) -> None:
        seconds, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(seconds, float)
        assert rank == 0
        for tag, *fields in events:
            getattr(self, f"_{tag}")(*fields)

    def _BlockStored(  # noqa: N802
        self,
        hashes: list[int],
        parent: int | None,
        token_ids: list[int],
        block_size: int,
        lora_id: None = None,
        medium: str | None = None,
        lora_name: None = None,
        extra_keys: list[list[str] | None] | None = None,
    ) -> None:
        assert hashes
        assert lora_id is None
        assert lora_name is None
        assert medium == "GPU"
        assert len(token_ids) == block_size * len(hashes)
        assert extra_keys is None or len(extra_keys) == len(hashes)
        for number, each in enumerate(hashes):
            assert 0 <= each < 2**64
            assert each not in self.tokens, "announced twice"
            self.tokens[each] = tuple(token_ids[number * block_size : (number + 1) * block_size])
            self.parents[each] = parent
            if extra_keys is not None and (own := extra_keys[number]) is not None:
                (self.salts[each],) = own
            parent = each

    def _BlockRemoved(self, hashes: list[int], medium: str | None = None) -> None:  # noqa: N802
        assert medium == "GPU"
        for each in hashes:
            del self.tokens[each]

    def _AllBlocksCleared(self) -> None:  # noqa: N802
        self.tokens.clear()


class Wire:
    """A publisher that writes straight into an index."""

    def __init__(self) -> None:
        self.index = KvIndex()
        self.payloads: list[bytes] = []
        self.num_sent = self.num_dropped = 0

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def send(self, events: list[Event]) -> None:
        self.num_sent += len(events)
        self.payloads.append(encode(Batch(1.5, events)))
        self.index.apply(self.payloads[-1])


def cached_hashes(pool: BlockPool) -> set[int]:
    """Returns the blocks of the pool's prefix cache, as consumers name them."""
    return {int.from_bytes(digest[-8:], "big") for digest in pool._cache._block_of}


class Tee:
    """Tells several listeners."""

    def __init__(self, *listeners: Any) -> None:
        self._listeners: Iterable[Any] = listeners

    def stored(self, *told: Any) -> None:
        for each in self._listeners:
            each.stored(*told)

    def removed(self, *told: Any) -> None:
        for each in self._listeners:
            each.removed(*told)

    def cleared(self) -> None:
        for each in self._listeners:
            each.cleared()
