"""A request's KV blocks through one step, as ``BlockPool`` keeps them."""

from __future__ import annotations

from typing import NamedTuple

from docs.pictures.svg import Drawing
from kvpool.block_pool import BlockPool

BLOCK_SIZE = 4
NUM_BLOCKS = 6
NUM_TOKENS = 7
GAMMA = 6
NUM_ACCEPTED = 2


class Stage(NamedTuple):
    """``committed`` and ``written``: tokens that are final, and all that lie in slots."""

    call: str
    note: str
    table: list[int]
    committed: int
    written: int
    counts: dict[str, int]


def stages() -> list[Stage]:
    """Runs the calls of a step on a real pool."""
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    tokens = list(range(NUM_TOKENS))
    pool.open("r", tokens, "", 0)
    found = []

    def note(call: str, text: str, committed: int, written: int) -> None:
        table = list(pool.block_table("r"))
        found.append(Stage(call, text, table, committed, written, pool.counts()))

    pool.allocate("r", NUM_TOKENS)
    pool.promote("r", tokens, NUM_TOKENS - 1)
    note("allocate", f"{NUM_TOKENS - 1} tokens and the anchor", NUM_TOKENS - 1, NUM_TOKENS)
    pool.allocate_draft("r", NUM_TOKENS + GAMMA)
    note("allocate_draft", f"slots for {GAMMA} drafts", NUM_TOKENS - 1, NUM_TOKENS + GAMMA)
    tokens += range(100, 100 + NUM_ACCEPTED)
    pool.promote("r", tokens, len(tokens))
    note("promote", f"{NUM_ACCEPTED} accepted", len(tokens), NUM_TOKENS + GAMMA)
    pool.free_draft("r")
    note("free_draft", "the rest goes back", len(tokens), len(tokens))
    pool.check_integrity()
    return found


def draw() -> str:
    picture = Drawing(760, 330, "A request's KV blocks through a step")
    left, cell, gap, height = 200, 26, 10, 34
    for index, stage in enumerate(stages()):
        y = 30 + index * 66
        picture.text(20, y + 15, stage.call, bold=True, mono=True)
        picture.text(20, y + 33, stage.note, "faint", size=12)
        for place, block in enumerate(stage.table):
            x = left + place * (BLOCK_SIZE * cell + gap)
            for slot in range(BLOCK_SIZE):
                token = place * BLOCK_SIZE + slot
                fill = "plain"
                if token < stage.committed:
                    fill = "good"
                elif token < NUM_TOKENS:
                    fill = "own"
                elif token < stage.written:
                    fill = "draft"
                picture.box(x + slot * cell, y, cell, height, fill)
            picture.text(x, y + height + 14, f"block {block}", "faint", size=11)
        counts = stage.counts
        told = f"draft {counts['draft']}, free {counts['free']}"
        picture.text(740, y + 15, f"committed {counts['committed']}", "faint", "end", size=12)
        picture.text(740, y + 31, told, "faint", "end", size=12)
    legend = [("good", "committed"), ("own", "anchor"), ("draft", "draft"), ("plain", "empty slot")]
    for index, (fill, label) in enumerate(legend):
        x = 200 + index * 110
        picture.box(x, 298, 16, 16, fill)
        picture.text(x + 22, 311, label, "faint", size=12)
    return picture.render()
