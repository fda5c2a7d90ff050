"""The prefix cache maps runs of tokens to the blocks that hold their keys and values.

A full block is named by a chained digest: of its own tokens and of the digest of the block before it,
down to a root made from the tenant's ``cache_salt``. Equal digests mean equal salt and equal tokens
from the first on, so a hit needs no comparison and tenants never share. Called by the block pool only,
which owns reference counts and decides what is final enough to be published.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

DIGEST_SIZE = 32
"""Bytes. Cryptographic and wide, because a collision would show one request another one's text."""


def root_digest(cache_salt: str) -> bytes:
    """The parent of a tenant's first blocks."""
    # Salts come from outside: a lone surrogate is odd, but has to be hashed like the rest.
    data = cache_salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=DIGEST_SIZE, person=b"kv-root").digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The digest of the block that holds ``token_ids`` and follows the one named ``parent``.

    The distinct ``person`` keeps a cache_salt from being made to look like a block."""
    data = parent + array("q", token_ids).tobytes()
    return hashlib.blake2b(data, digest_size=DIGEST_SIZE, person=b"kv-block").digest()


class PrefixCache:
    """Published blocks by digest, and those among them that no request uses, oldest first.

    Every operation is O(1). A published block is either held (some request refers to it) or idle
    (kept for its content, may be evicted).
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Published blocks, held and idle."""
        return len(self._block_of)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def lookup(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def is_published(self, block_id: int) -> bool:
        return block_id in self._digest_of

    def publish(self, digest: bytes, block_id: int) -> bool:
        """Name a held block. False, and nothing done, if another block has the name already."""
        if digest in self._block_of:
            return False
        self._block_of[digest] = block_id
        self._digest_of[block_id] = digest
        return True

    def rename(self, digest: bytes, block_id: int) -> int:
        """Give a name that is in use to a held block. Returns the block that had it, which is published
        no more, nor idle."""
        old = self._block_of[digest]
        del self._digest_of[old]
        self._idle.pop(old, None)
        self._block_of[digest] = block_id
        self._digest_of[block_id] = digest
        return old

    def hold(self, block_id: int) -> None:
        """An idle block is used again."""
        del self._idle[block_id]

    def release(self, block_id: int) -> None:
        """A held block has lost its last user: it becomes the youngest idle one."""
        self._idle[block_id] = None

    def evict(self) -> tuple[int, bytes]:
        """Forget the oldest idle block; the block and its digest. Raises KeyError if there is none."""
        block_id, _ = self._idle.popitem(last=False)
        digest = self._digest_of.pop(block_id)
        del self._block_of[digest]
        return block_id, digest

    def clear(self) -> list[int]:
        """Forget everything; returns the blocks that were idle, oldest first."""
        idle = list(self._idle)
        self._block_of.clear()
        self._digest_of.clear()
        self._idle.clear()
        return idle

    def idle_blocks(self) -> Iterator[int]:
        """Oldest first: in the order of eviction."""
        return iter(self._idle)

    def idle_digests(self) -> Iterator[bytes]:
        """Yields the digests of the same blocks."""
        return (self._digest_of[block_id] for block_id in self._idle)

    def check_integrity(self) -> None:
        """Raises AssertionError unless the maps mirror each other and idle blocks are named."""
        mirrored = {block_id: digest for digest, block_id in self._block_of.items()}
        if len(mirrored) != len(self._block_of) or mirrored != self._digest_of:
            raise AssertionError("prefix cache: the two maps disagree")
        if not self._idle.keys() <= mirrored.keys():
            raise AssertionError("prefix cache: an idle block has no digest")
