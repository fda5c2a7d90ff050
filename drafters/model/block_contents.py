"""Records which text's rows are in each block of a draft model's own store.

The store is addressed by the target's block ids, which change hands: blocks are shared through the
prefix cache, freed, reused, handed back after preemption, and most are filled for requests that never
used this drafter. So the record holds per block what was written there, down to the token and with a
digest of everything before it, and a request that gets the block compares. Only equal text is valid;
rows of accepted drafts are found to be the text's.

Texts are named as the engine's prefix cache names them, so that a block's rows can be kept elsewhere
under that name, and restored into another block.

Some methods have no row for the first token of a text. Its slot is not written, and counts as if it
were.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b


def _digest(before: bytes, token_ids: Sequence[int]) -> bytes:
    data = before + array("q", token_ids).tobytes()
    return blake2b(data, digest_size=32, person=b"kv-block").digest()


class TextDigests:
    """A request's growing text, named block by block: ``digests[i]`` stands for its first i blocks
    and the tenant, ``first_token_id`` is its first token."""

    def __init__(self, cache_salt: str, block_size: int) -> None:
        self._block_size = block_size
        salt = cache_salt.encode("utf-8", "surrogatepass")
        self.digests = [blake2b(salt, digest_size=32, person=b"kv-root").digest()]
        self.first_token_id = -1

    @property
    def root(self) -> bytes:
        return self.digests[0]

    def update(self, token_ids: Sequence[int]) -> None:
        """Takes in what was appended; earlier tokens do not change."""
        self.first_token_id = token_ids[0] if token_ids else -1
        size = self._block_size
        for start in range((len(self.digests) - 1) * size, len(token_ids) - size + 1, size):
            self.digests.append(_digest(self.digests[-1], token_ids[start : start + size]))


@dataclass(slots=True)
class _Block:
    """Rows from the block's start on; ``before`` names everything before it."""

    before: bytes
    token_ids: list[int] = field(default_factory=list)


class BlockContents:
    """At most one record per block of the pool. ``first_row``: the first token of a text that has a row,
    0 or 1."""

    def __init__(self, block_size: int, first_row: int = 0) -> None:
        self._size = block_size
        self._first_row = first_row
        self._blocks: dict[int, _Block] = {}
        self._digests: dict[int, bytes] = {}
        """The digests of full blocks: of a block's text and everything before it."""
        self._ends: dict[int, bytes] = {}
        """The same of blocks behind whose last token the target's state is kept."""

    def num_valid(
        self, block_table: Sequence[int], text: TextDigests, token_ids: Sequence[int], most: int
    ) -> int:
        """Returns how many of the first ``most`` tokens have their rows in these blocks without a gap."""
        return max(self._num_equal(block_table, text, token_ids, most), min(self._first_row, most))

    def _num_equal(
        self, block_table: Sequence[int], text: TextDigests, token_ids: Sequence[int], most: int
    ) -> int:
        num_full = most // self._size
        held = list(map(self._digests.get, block_table[:num_full]))
        wanted = text.digests[1 : num_full + 1]
        if held != wanted:
            pairs = zip(held, wanted, strict=False)
            num_full = next((i for i, (have, want) in enumerate(pairs) if have != want), len(held))
        start = num_full * self._size
        block = self._blocks.get(block_table[num_full]) if num_full < len(block_table) else None
        if block is None or block.before != text.digests[num_full]:
            return start
        num_equal = 0
        for have, want in zip(block.token_ids, token_ids[start:most], strict=False):
            if have != want:
                break
            num_equal += 1
        return start + num_equal

    def forget(self, block_table: Sequence[int], first: int, count: int) -> None:
        """Rows at positions ``first .. first + count - 1`` are about to be overwritten."""
        if count < 1:
            return
        for index in range(first // self._size, (first + count - 1) // self._size + 1):
            block_id = block_table[index]
            block = self._blocks.get(block_id)
            kept = max(0, first - index * self._size)
            if block is not None and len(block.token_ids) > kept:
                del block.token_ids[kept:]
                self._digests.pop(block_id, None)

    def write(
        self, block_table: Sequence[int], text: TextDigests, first: int, token_ids: Sequence[int]
    ) -> None:
        """Rows from position ``first`` on hold these tokens, and saw the valid rows before them."""
        if first and first == self._first_row and token_ids:
            first, token_ids = 0, [text.first_token_id, *token_ids]
        for position, token_id in enumerate(token_ids, first):
            index, offset = divmod(position, self._size)
            block_id = block_table[index]
            if offset == 0:
                before = text.root if index == 0 else self._digests[block_table[index - 1]]
                self._digests.pop(block_id, None)
                self._blocks[block_id] = _Block(before)
            block = self._blocks[block_id]
            del block.token_ids[offset:]
            assert len(block.token_ids) == offset, "a row was written after a gap"
            block.token_ids.append(token_id)
            if len(block.token_ids) == self._size:
                self._digests[block_id] = _digest(block.before, block.token_ids)
            else:
                self._digests.pop(block_id, None)

    # Blocks that are kept elsewhere

    def holds(self, block_id: int, digest: bytes) -> bool:
        """Whether all rows of the block are there, of the text that ``digest`` names."""
        return self._digests.get(block_id) == digest

    def text_of(self, block_id: int) -> tuple[bytes, list[int]]:
        """Returns what names the text before a full block, and the block's tokens."""
        block = self._blocks[block_id]
        return block.before, block.token_ids

    def put(
        self, block_id: int, digest: bytes, before: bytes, token_ids: Sequence[int], has_end: bool
    ) -> None:
        """Rows of a full block were copied here from elsewhere, and the state behind it if it
        ``has_end``."""
        self._blocks[block_id] = _Block(before, list(token_ids))
        self._digests[block_id] = digest
        if has_end:
            self._ends[block_id] = digest
        else:
            self._ends.pop(block_id, None)

    # The states behind full blocks

    def holds_end(self, block_id: int, digest: bytes) -> bool:
        """Whether the state behind the block is kept, of the text that ``digest`` names."""
        return self._ends.get(block_id) == digest

    def keep_ends(
        self, block_table: Sequence[int], text: TextDigests, first: int, count: int
    ) -> None:
        """The target's states of the tokens at positions ``first .. first + count - 1`` are kept as far
        as these are the last ones of their blocks."""
        for index in range(first // self._size, (first + count) // self._size):
            self._ends[block_table[index]] = text.digests[index + 1]

    def has_end(self, block_table: Sequence[int], text: TextDigests, position: int) -> bool:
        """Whether the state before ``position``, the first one of a block, is kept."""
        index, offset = divmod(position, self._size)
        kept = self._ends.get(block_table[index - 1]) if index and not offset else None
        return kept is not None and kept == text.digests[index]
