"""KV events as vLLM's consumers read them: msgpack arrays with a tag, in batches.

A batch is ``[seconds since 1970, events, data-parallel rank]``. A block's hash is the last eight bytes of
its digest as an unsigned integer, which all consumers take; digests are made of salt and tokens alone, so
equal blocks have equal hashes on all replicas of one version and block size.
"""

from __future__ import annotations

import msgspec

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""In place of a sequence number, with an empty payload: nothing more is kept."""
MEDIUM = "GPU"
"""Consumers' word for the tier that the engine computes from, on whatever device."""


class _Event(msgspec.Struct, array_like=True, tag=True):
    """Its class's name comes first."""


class BlockStored(_Event):
    """Blocks that follow each other, the first one after ``parent_block_hash`` (None: at the start of a
    text). ``token_ids``: of all of them. ``lora_name``: the adapter that they were computed with.
    ``extra_keys``: per block what its hash is made of besides; for the first of a text the adapter's name
    and digest, and the salt."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(_Event):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(_Event):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Event]
    data_parallel_rank: int = 0


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Batch).decode


def block_hash(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


def sequence(number: int) -> bytes:
    return number.to_bytes(8, "big")
