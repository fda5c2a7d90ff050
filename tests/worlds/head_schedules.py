"""Schedules that heads of all methods go through alike: what comes between drafts changes none of them.

``make`` makes a world of one head, under the settings that it is given; ``prompt`` draws a text of its
vocabulary by seed and length.
"""

from __future__ import annotations

from collections.abc import Callable

from worlds.engine_harness import Setup
from worlds.head_runs import HeadWorld

Make = Callable[..., HeadWorld]
Draw = Callable[..., list[int]]


def rows_are_caught_up_after_a_rest(make: Make, prompt: Draw) -> None:
    """Drafts at some lengths alone, of which the last come long after those before."""
    world = make(rests=lambda name, known: name == "r" and known % 9 > 2)
    resting, other = world.ask("r", prompt(1), max_tokens=30), world.ask("other", prompt(2))
    world.finished(resting, other)
    lengths = world.lengths["r"]
    assert max(later - first for first, later in zip(lengths, lengths[1:], strict=False)) > 5
    again = world.ask("again", [*world.text(resting), 1, 2])
    world.finished(again)
    assert world.num_cached("again") == (len(world.text(resting)) - 1) // 4 * 4


def what_rested_is_run_when_it_leaves(make: Make, prompt: Draw) -> None:
    """Its rows are found by the next turn, though nothing was drafted for it."""
    world = make(rests=lambda name, _: name == "r")
    resting = world.ask("r", prompt(1))
    world.run(resting)
    assert world.num_drafts["r"] == 0
    assert world.num_idle_rows["r"] > 20
    again = world.ask("again", [*world.text(resting), 1, 2])
    world.finished(again)
    assert world.num_cached("again") == (len(world.text(resting)) - 1) // 4 * 4


def a_long_text_is_run_before_it_drafts(make: Make, prompt: Draw) -> None:
    """Its states are not all kept: rows are run while its prompt is read, and drafts read them."""
    world = make(setup=Setup(max_model_len=700, num_blocks=512, prefill_chunk=64))
    world.finished(world.ask("r", prompt(4, 600), max_tokens=20, num_tokens=4))
    assert world.num_idle_rows["r"] > 500
    assert world.num_drafts["r"] > 1


def preempted_requests_draft_all_the_same(make: Make, prompt: Draw, width: int) -> None:
    """Requests that share too few blocks."""
    world = make(setup=Setup(num_blocks=20, prefill_chunk=16))
    requests = [world.ask(f"r{at}", prompt(20 + at, 20), width=width) for at in range(4)]
    world.finished(*requests)
    assert sum(stats.num_preemptions for stats in world.stats) > 0


def no_more_is_drafted_than_was_asked(make: Make, prompt: Draw, most: int) -> None:
    """A pass has more rows than tokens are asked for."""
    world = make()
    world.finished(world.ask("r", prompt(1), num_tokens=most, max_tokens=24))
    assert world.num_drafts["r"] > 3
    assert world.most_nodes <= most
