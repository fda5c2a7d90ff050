"""Schedules that heads of all methods go through alike: what lies between drafts changes no draft."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import engine.kernels
from worlds.engine_harness import Setup
from worlds.head_runs import HeadWorld, prompt_of

Make = Callable[..., HeadWorld]
both_widths = pytest.mark.parametrize("width", [1, 3])


class HeadSchedules:
    """Tests of a module's heads. Its fixture ``make`` makes a world of any one head, under the settings
    that it is given, and ``make_few`` of one of those that differ in how rows are kept."""

    vocab_size: int
    fewest_drafts: int
    """For a request: heads that draft more tokens at a time draft less often."""

    def prompt(self, seed: int, count: int = 22) -> list[int]:
        return prompt_of(seed, count, self.vocab_size)

    @both_widths
    @pytest.mark.parametrize(("backend", "temperature"), [("sdpa", 0.7), ("paged", 0.0)])
    def test_drafts_are_the_readings_first_and_later_ones(
        self, make: Make, backend: str, width: int, temperature: float
    ) -> None:
        """In chunks of 5, with parts of drafts accepted between."""
        world = make(backend=backend)
        world.finished(world.ask("r", self.prompt(1), width=width, temperature=temperature))
        assert world.num_drafts["r"] >= self.fewest_drafts
        assert world.num_checked["r"] > 5 * self.fewest_drafts - 5

    @both_widths
    def test_requests_of_a_batch_draft_as_if_alone_one_of_them_after_a_prefix_hit(
        self, make: Make, width: int
    ) -> None:
        world = make()
        first = world.ask("first", self.prompt(1), width=width)
        world.finished(first)
        text = world.text(first)
        follow_up = world.ask("follow-up", [*text, *self.prompt(2, 3)], width=width)
        others = [
            world.ask(f"r{at}", self.prompt(10 + at, 9 + 6 * at), width=width) for at in range(3)
        ]
        world.finished(follow_up, *others)
        assert world.num_cached("follow-up") == (len(text) - 1) // 4 * 4
        assert world.num_together > 1
        drafts = [world.num_drafts[each.request_id] for each in (follow_up, *others)]
        assert min(drafts) >= self.fewest_drafts - 1

    def test_a_prefix_hit_drafts_as_often_as_a_miss(self, make_few: Make) -> None:
        world = make_few()
        miss, hit = world.ask("miss", self.prompt(1)), world.ask("hit", self.prompt(1))
        world.finished(miss).finished(hit)
        assert (world.num_cached("miss"), world.num_cached("hit")) == (0, 20)
        assert world.text(miss) == world.text(hit)
        assert world.num_drafts["hit"] == world.num_drafts["miss"]

    def test_after_a_rest_rows_are_caught_up_with_the_states_that_came_meanwhile(
        self, make_few: Make
    ) -> None:
        """Drafts at some lengths alone, of which the last come long after those before."""
        world = make_few(rests=lambda name, known: name == "r" and known % 9 > 2)
        resting = world.ask("r", self.prompt(1), max_tokens=30)
        world.finished(resting, world.ask("other", self.prompt(2)))
        lengths = world.lengths["r"]
        assert max(later - first for first, later in zip(lengths, lengths[1:], strict=False)) > 5
        again = world.ask("again", [*world.text(resting), 1, 2])
        world.finished(again)
        assert world.num_cached("again") == (len(world.text(resting)) - 1) // 4 * 4

    def test_what_rested_to_its_end_is_run_when_it_leaves_its_blocks(self, make_few: Make) -> None:
        """Its rows are found by the next turn, though nothing was drafted for it."""
        world = make_few(rests=lambda name, _: name == "r")
        resting = world.ask("r", self.prompt(1))
        world.run(resting)
        assert world.num_drafts["r"] == 0
        assert world.num_idle_rows["r"] > 20
        again = world.ask("again", [*world.text(resting), 1, 2])
        world.finished(again)
        assert world.num_cached("again") == (len(world.text(resting)) - 1) // 4 * 4

    def test_a_text_of_more_rows_than_wait_is_run_before_it_drafts(self, make_few: Make) -> None:
        """Its states are not all kept: rows are run while its prompt is read, and drafts read them."""
        world = make_few(setup=Setup(max_model_len=700, num_blocks=512, prefill_chunk=64))
        world.finished(world.ask("r", self.prompt(4, 600), max_tokens=20, num_tokens=4))
        assert world.num_idle_rows["r"] > 500
        assert world.num_drafts["r"] > 1

    @both_widths
    def test_preempted_requests_draft_as_if_they_had_not_been(
        self, make_few: Make, width: int
    ) -> None:
        """Requests that share too few blocks."""
        world = make_few(setup=Setup(num_blocks=20, prefill_chunk=16))
        world.finished(
            *(world.ask(f"r{at}", self.prompt(20 + at, 20), width=width) for at in range(4))
        )
        assert sum(stats.num_preemptions for stats in world.stats) > 0

    def test_nothing_that_a_draft_was_made_of_outlives_its_step(self, make_few: Make) -> None:
        """It is a part of what the whole batch has made."""
        world = make_few(rests=lambda name, known: name == "rests" and known > 26)
        world.submit(
            *(world.ask(name, self.prompt(1), max_tokens=20) for name in ("rests", "other"))
        )
        while world.core.has_work:
            world.step()
            made = {name for name, each in world.drafts.items() if each.said}
            assert world.model._drafted.keys() <= made
        assert world.num_drafts["rests"] < world.num_drafts["other"]

    @pytest.mark.parametrize("most", [1, 2, 3])
    def test_fewer_tokens_than_a_pass_drafts(self, make_few: Make, most: int) -> None:
        """A pass has more rows than tokens are asked for; those of a block see each other."""
        world = make_few()
        world.finished(world.ask("r", self.prompt(1), num_tokens=most, max_tokens=24))
        assert world.num_drafts["r"] > 3
        assert world.most_nodes <= most

    @both_widths
    def test_chains_run_ahead_of_what_the_host_reads_are_the_same(
        self, make_few: Make, width: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As on a GPU: later rows and corrections are for tokens that only the device knows."""
        monkeypatch.setattr(engine.kernels, "HOSTS", frozenset())
        world = make_few()
        assert world.model.runs_ahead
        world.finished(world.ask("r", self.prompt(1), width=width))
        assert world.num_drafts["r"] >= self.fewest_drafts
