"""Blocks as bytes: the same from any block to any other, and named alike by cache and drafts."""

from __future__ import annotations

import pytest
import torch

from drafters.model.block_contents import BlockContents, TextDigests
from engine.drafting.states import BlockEnds, Stretch
from engine.offload.rows import BlockRows, Part
from kvpool.prefix_cache import block_digest, root_digest
from kvpool.store import KVStore

SIZE, NUM_BLOCKS = 4, 6
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


@pytest.mark.parametrize("salt", ["", "tenant", "\ud800"])
def test_drafts_name_texts_as_the_prefix_cache_does(salt: str) -> None:
    """Else no row of a draft would be found to belong to a block that is kept."""
    text = TextDigests(salt, SIZE)
    text.update(TEXT)
    digests = [root_digest(salt)]
    for start in range(0, len(TEXT), SIZE):
        digests.append(block_digest(digests[-1], TEXT[start : start + SIZE]))
    assert text.digests == digests
    contents = BlockContents(SIZE)
    contents.write([2, 0, 5], text, 0, TEXT)
    assert all(contents.holds(*each) for each in zip((2, 0, 5), digests[1:], strict=True))
    assert not contents.holds(2, digests[2])


def store_of(shapes: list[tuple[int, int, int]], dtype: torch.dtype, seed: int) -> KVStore:
    """A store full of random rows."""
    store = KVStore(shapes, NUM_BLOCKS, SIZE, dtype, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for layer, (heads, key, value) in enumerate(shapes):
        rows = [
            torch.randn(store.num_slots, heads, dim, generator=generator) for dim in (key, value)
        ]
        store.write(layer, torch.arange(store.num_slots), *rows)
    return store


def rows_in(store: KVStore, block_id: int) -> list[list[float]]:
    slots = torch.arange(block_id * SIZE, (block_id + 1) * SIZE)
    layers = range(len(store.key))
    return [part.flatten().tolist() for layer in layers for part in store.gather(layer, slots)]


class World:
    """A target in bf16 and two drafts in other types, one of which keeps states; the text lies in blocks
    1, 3 and 5."""

    table = (1, 3, 5)

    def __init__(self, seed: int) -> None:
        self.store = store_of([(2, 6, 3), (1, 5, 5)], torch.bfloat16, seed)
        self.ends = BlockEnds(NUM_BLOCKS, SIZE, torch.zeros(7))
        self.states = torch.randn(len(TEXT), 7, generator=torch.Generator().manual_seed(seed))
        self.text = TextDigests("", SIZE)
        self.text.update(TEXT)
        self.parts = [
            Part(
                "head",
                store_of([(1, 3, 3)], torch.float32, seed + 1),
                BlockContents(SIZE),
                self.ends,
            ),
            Part(
                "small", store_of([(3, 2, 2)], torch.float16, seed + 2), BlockContents(SIZE), None
            ),
        ]
        self.rows = BlockRows(self.store, self.parts)

    def fill(self, name: str, ends: bool = True) -> None:
        """A draft has run the text's rows."""
        part = next(part for part in self.parts if part.name == name)
        part.contents.write(self.table, self.text, 0, TEXT)
        if ends and part.ends is not None:
            part.ends.keep([Stretch(0, len(TEXT), self.table)], self.states)
            part.contents.keep_ends(self.table, self.text, 0, len(TEXT))


@pytest.mark.parametrize("filled", [(), ("head",), ("small",), ("head", "small")])
@pytest.mark.parametrize("ends", [True, False])
def test_a_block_goes_into_another_block_of_another_engine(
    filled: tuple[str, ...], ends: bool
) -> None:
    one, other = World(1), World(10)
    for name in filled:
        one.fill(name, ends)
    for index, block_id in enumerate(one.table):
        digest, new_id = one.text.digests[index + 1], (4, 0, 2)[index]
        marks = one.rows.marks(block_id, digest)
        content = one.rows.read(block_id, digest, marks)
        assert len(content) <= one.rows.num_bytes == other.rows.num_bytes
        other.rows.write(new_id, digest, marks, content)
        assert rows_in(other.store, new_id) == rows_in(one.store, block_id)
        for mine, its in zip(one.parts, other.parts, strict=True):
            is_there = mine.name in filled
            assert its.contents.holds(new_id, digest) == is_there
            assert (rows_in(its.store, new_id) == rows_in(mine.store, block_id)) == is_there
        has_end = "head" in filled and ends
        assert other.parts[0].contents.holds_end(new_id, digest) == has_end
        kept = other.ends.before((index + 1) * SIZE, (4, 0, 2))
        assert kept is not None
        assert torch.equal(kept, one.states[(index + 1) * SIZE - 1]) == has_end
    for part in other.parts:
        num_valid = part.contents.num_valid((4, 0, 2), one.text, TEXT, len(TEXT))
        assert num_valid == (len(TEXT) if part.name in filled else 0)


def test_rows_of_another_text_are_not_taken_for_the_blocks() -> None:
    world = World(1)
    world.fill("head")
    world.fill("small")
    other = TextDigests("", SIZE)
    other.update([7, *TEXT[1:]])
    assert [world.rows.marks(block_id, other.digests[1]) for block_id in range(NUM_BLOCKS)] == [
        0
    ] * NUM_BLOCKS
    world.parts[0].contents.forget(world.table, SIZE + 1, 1)
    assert world.rows.marks(3, world.text.digests[2]) == 4
    assert world.rows.marks(1, world.text.digests[1]) == 7
