"""One request's blocks, and what becomes of the slots in them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockTable:
    """Slots of a request, in logical order::

        [0, num_committed_tokens)           final; full blocks here are published and may be shared
        [.., num_committed_blocks * size)   committed blocks still to be filled, private
        [.., len(block_ids) * size)         draft blocks, private, never published

    ``block_ids`` are ints of 32 bits, as kernels read them: a step that copies the table copies memory.
    ``digest`` names the last full committed block (at first the tenant's root); None: this request
    publishes nothing.
    """

    digest: bytes | None
    block_ids: array[int] = field(default_factory=lambda: array("i"))
    num_committed_blocks: int = 0
    num_committed_tokens: int = 0
    cache_salt: str = ""

    @property
    def num_draft_blocks(self) -> int:
        return len(self.block_ids) - self.num_committed_blocks
