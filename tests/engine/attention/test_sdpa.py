"""The reference: every row against a plain sum over what it may see, whatever shares its call."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from engine.attention import sdpa
from engine.attention.backend import attending, slipstream_attention
from engine.batch import InputBuffers, RequestRows
from worlds.attended import PLAIN, Part, World, chains, world_of
from worlds.tiny_models import CPU

TREE = (-1, -1, 0, 1, 1, 3, 2, 5, 5, 7, 9)


world = partial(world_of, "sdpa")


def test_long_prompts_go_through_in_pieces_that_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = [(0, 20, 50, ()), (1, 3, 40, TREE), (2, 70, 1, chains(2))]
    whole = torch.cat(world(4, 2, 16, 16).step(asked))
    monkeypatch.setattr(sdpa, "_MOST_SCORES", 4 * 70 * 9)
    torch.testing.assert_close(torch.cat(world(4, 2, 16, 16).step(asked)), whole)


def test_rows_of_padding_get_numbers_and_reach_nobody() -> None:
    """A request in another's call, whose rows and keys are fewer; rows past all requests' get zeros."""
    mine = world(4, 2, 16, 16)
    store, batch, rows = mine.lay([(0, 32, 1, ()), (1, 60, 1, ())])
    plan = mine.over(store).plan(batch, InputBuffers(CPU, 8).fill(batch))
    assert len(plan.calls) == 1
    padded = [torch.cat([each, each[:1]]) for each in rows]
    plan.slot_mapping = torch.cat([plan.slot_mapping, torch.tensor([store.num_slots - 1])])
    output = plan.attend(0, *padded, PLAIN)
    expected = mine.expected((0, 32, 1, ()), PLAIN)[0]
    torch.testing.assert_close(output[0].double(), expected, atol=5e-5, rtol=5e-5)
    assert not output[2].any()


@pytest.mark.parametrize("sinks", [None, torch.zeros(4)], ids=["plain", "sinks"])
def test_products_that_overflow_with_masked_keys_do_no_harm(
    sinks: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float16 a neighbour's large keys give infinite scores, and infinity less infinity is NaN."""
    mine, options = world(4, 2, 16, 16, dtype=torch.float16), replace(PLAIN, sinks=sinks)
    (alone,) = mine.step([(0, 40, 2, ())], options)
    plain = World.rows

    def large(self: World, number: int, length: int) -> list[torch.Tensor]:
        query, key, value = plain(self, number, length)
        return [query, 20_000 * key.sign() if number else key, value]

    monkeypatch.setattr(World, "rows", large)
    beside = mine.step([(1, 45, 2, ()), (0, 40, 2, ())], options)[1]
    torch.testing.assert_close(beside, alone)


@pytest.mark.parametrize("sees_block", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 30])
def test_rows_get_a_plain_sum_over_what_they_see(window: int | None, sees_block: bool) -> None:
    mine = world(4, 2, 16, 24, dtype=torch.float64)
    options = replace(PLAIN, window=window, sees_block=sees_block)
    asked: list[Part] = [
        (0, 40, 16, ()),
        (1, 1, 3, ()),
        (2, 44, 7, TREE),
        (3, 0, 9, ()),
        (4, 50, 1, TREE),
    ]
    first_keys = [1, 1, 44, 0, 33]
    got = mine.step(asked, options, first_keys=first_keys)
    for rows, part, first_key in zip(got, asked, first_keys, strict=True):
        expected = mine.expected(part, options, first_key)
        torch.testing.assert_close(rows, expected, atol=5e-6, rtol=5e-6)


def test_depths_and_chains_of_rows() -> None:
    rows = RequestRows([0] * 7, 2, 5, (-1, 0, 0, 2, -1), range(3), 6)
    assert (rows.num_rows, rows.end) == (7, 12)
    assert rows.depths() == [1, 2, 2, 3, 1]
    assert not rows.is_chain()
    assert RequestRows([0] * 5, 2, 5, (-1, 0, 1), range(3), 4).is_chain()
    assert RequestRows([0] * 2, 2, 5, (), range(3), 1).is_chain()
    stored = replace(rows, num_known=0, parents=(-1, 0, 1), num_stored=2)
    assert (stored.num_rows, stored.is_chain()) == (1, False)


def attention_inputs() -> list[torch.Tensor]:
    return [torch.zeros(1, heads, 2, 4) for heads in (4, 2, 2)]


class NotingPlan:
    """Keeps the options of the layer that it answers."""

    def attend(self, *given: Any) -> torch.Tensor:
        query, self.options = given[1], given[-1]
        return torch.zeros_like(query)


@pytest.mark.parametrize("sees_block", [False, True])
def test_a_module_says_whether_its_rows_see_their_block(sees_block: bool) -> None:
    module, plan = torch.nn.Module(), NotingPlan()
    module.layer_idx = 0  # type: ignore[assignment]
    if sees_block:
        module.sees_block = True  # type: ignore[assignment]
    with attending(plan):
        slipstream_attention(module, *attention_inputs(), attention_mask=None)
    assert plan.options == replace(PLAIN, sees_block=sees_block)


def test_a_model_that_runs_without_a_plan_is_told_so() -> None:
    with attending(NotingPlan()), pytest.raises(ZeroDivisionError), attending(NotingPlan()):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="no plan to answer it"):
        slipstream_attention(torch.nn.Module(), *attention_inputs(), attention_mask=None)


@pytest.mark.parametrize("given", [{"attention_mask": torch.zeros(2, 2)}, {"dropout": 0.1}])
def test_masks_and_dropout_of_the_model_s_own_are_refused(given: dict[str, object]) -> None:
    arguments = {"attention_mask": None} | given
    with attending(NotingPlan()), pytest.raises(RuntimeError, match="mask or dropout of their own"):
        slipstream_attention(torch.nn.Module(), *attention_inputs(), **arguments)  # type: ignore[arg-type]
