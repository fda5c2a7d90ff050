"""A block as bytes: the target's rows, those of draft models and heads, and the states behind it.

::

    target's rows | text | part by part, as far as its mark is set: rows | state behind the block

Each piece begins at a multiple of 64 bytes. The text, what names all before the block and its tokens,
is there where a part is: records of drafts' rows are of texts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
import torch

from drafters.base import Drafter
from drafters.model.block_contents import BlockContents
from drafters.model.model_drafter import ModelDrafter
from engine.drafting.draft_model import LevelModel
from engine.drafting.head_model import HeadModel
from engine.drafting.states import BlockEnds
from kvpool.prefix_cache import DIGEST_SIZE
from kvpool.state_store import StateStore
from kvpool.store import KVStore
from kvpool.tier import Bytes

_ALIGNMENT = 64
_ID = np.dtype(np.int64)
_ROWS, _END = 1, 2
"""The bits of a part's mark."""
_BITS = 2


class Part(NamedTuple):
    """A draft's rows under the target's block ids, by the name of its drafter. ``ends``: what keeps the
    states behind blocks; None: it has none."""

    name: str
    store: KVStore
    contents: BlockContents
    ends: BlockEnds | None

    @property
    def num_bytes(self) -> int:
        """The size of a block in bytes, with the state after it."""
        state = 0 if self.ends is None else _aligned(self.ends.num_bytes)
        return _aligned(self.store.block_bytes) + state


def parts_of(drafters: Mapping[str, Drafter], hidden_size: int, dtype: torch.dtype) -> list[Part]:
    """Returns the rows that drafters keep. ``hidden_size``, ``dtype``: of the target's states."""
    parts = []
    for name, drafter in drafters.items():
        kept = drafter.kept_rows if isinstance(drafter, ModelDrafter) else None
        if kept is None:
            continue
        model, contents = cast(LevelModel, kept[0]), kept[1]
        ends = model.block_ends(hidden_size, dtype) if isinstance(model, HeadModel) else None
        parts.append(Part(name, model.store, contents, ends))
    return parts


@dataclass(slots=True)
class BlockRows:
    """``kvpool.tier.BlockBytes`` over the stores of an engine."""

    store: KVStore
    parts: list[Part]
    num_bytes: int = field(init=False)
    _text_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self._text_bytes = DIGEST_SIZE + self.store.block_size * _ID.itemsize
        own = _aligned(self.store.block_bytes)
        drafts = sum(part.num_bytes for part in self.parts)
        self.num_bytes = own + (_aligned(self._text_bytes) + drafts if self.parts else 0)

    def marks(self, block_id: int, digest: bytes) -> int:
        """A bit for the rows of each part, and one for the state behind them."""
        marks = 0
        for index, part in enumerate(self.parts):
            if part.contents.holds(block_id, digest):
                marks |= _ROWS << _BITS * index
                if part.ends is not None and part.contents.holds_end(block_id, digest):
                    marks |= _END << _BITS * index
        return marks

    @torch.inference_mode()
    def read(self, block_id: int, digest: bytes, marks: int) -> Bytes:
        del digest
        content = np.empty(self._size(marks), dtype=np.uint8)
        pieces = _Pieces(content)
        self.store.read_block(block_id, pieces.next(self.store.block_bytes))
        marked = list(self._marked(marks))
        if marked:
            before, token_ids = marked[0][0].contents.text_of(block_id)
            text = before + np.array(token_ids, dtype=_ID).tobytes()
            pieces.next(len(text)).copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        for part, ends in marked:
            part.store.read_block(block_id, pieces.next(part.store.block_bytes))
            if ends is not None:
                piece = pieces.next(ends.num_bytes)
                piece.view(ends.dtype).copy_(ends.state(block_id))
        return content

    @torch.inference_mode()
    def write(self, block_id: int, digest: bytes, marks: int, content: Bytes) -> None:
        pieces = _Pieces(content)
        self.store.write_block(block_id, pieces.next(self.store.block_bytes))
        marked = list(self._marked(marks))
        if not marked:
            return
        text = pieces.next(self._text_bytes).numpy().tobytes()
        before, token_ids = text[:DIGEST_SIZE], array("q", text[DIGEST_SIZE:]).tolist()
        for part, ends in marked:
            part.store.write_block(block_id, pieces.next(part.store.block_bytes))
            if ends is not None:
                ends.state(block_id).copy_(pieces.next(ends.num_bytes).view(ends.dtype))
            part.contents.put(block_id, digest, before, token_ids, ends is not None)

    def _marked(self, marks: int) -> Iterator[tuple[Part, BlockEnds | None]]:
        """Yields the parts that have their rows there, with what keeps the state behind them if that is
        there, too."""
        for index, part in enumerate(self.parts):
            mark = marks >> _BITS * index
            if mark & _ROWS:
                yield part, part.ends if mark & _END else None

    def _size(self, marks: int) -> int:
        sizes = [self.store.block_bytes]
        for part, ends in self._marked(marks):
            sizes += [part.store.block_bytes, *([] if ends is None else [ends.num_bytes])]
        if len(sizes) > 1:
            sizes.append(self._text_bytes)
        return sum(map(_aligned, sizes))


@dataclass(slots=True)
class StateBytes:
    """``kvpool.tier.BlockBytes`` of states: a slot's, operation by operation."""

    store: StateStore
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = sum(_aligned(state[0].nbytes) for state in self.store.states)

    def marks(self, block_id: int, digest: bytes) -> int:
        del block_id, digest
        return 0

    @torch.inference_mode()
    def read(self, block_id: int, digest: bytes, marks: int) -> Bytes:
        del digest, marks
        content = np.empty(self.num_bytes, dtype=np.uint8)
        for state, piece in self._pieces(block_id, content):
            piece.copy_(state)
        return content

    @torch.inference_mode()
    def write(self, block_id: int, digest: bytes, marks: int, content: Bytes) -> None:
        del digest, marks
        for state, piece in self._pieces(block_id, content):
            state.copy_(piece)

    def _pieces(self, slot: int, content: Bytes) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields an operation's state and its bytes, as floats of the same shape."""
        pieces = _Pieces(content)
        for states in self.store.states:
            state = states[slot]
            yield state, pieces.next(state.nbytes).view(state.dtype).view(state.shape)


class _Pieces:
    """A block's bytes, taken piece by piece."""

    def __init__(self, content: Bytes) -> None:
        self._content = torch.from_numpy(content)
        self._at = 0

    def next(self, size: int) -> torch.Tensor:
        start, self._at = self._at, self._at + _aligned(size)
        return self._content[start : start + size]


def layout_of(parts: Sequence[Part]) -> str:
    """Returns what the bytes of blocks owe to drafts, in words."""
    ends = {part.name: part.ends for part in parts}
    states = [None if end is None else (end.num_bytes, str(end.dtype)) for end in ends.values()]
    return f"{[(part.name, part.store.layout) for part in parts]} {states}"


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
