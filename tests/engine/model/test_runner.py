"""The runner: what is in the store after a step, after a move, and after timing."""

from __future__ import annotations

import pytest
import torch

from engine.batch import RequestRows, build_batch, slot_of
from engine.model.runner import ModelRunner
from worlds.tiny_models import (
    BLOCK_SIZE,
    chunk,
    make_runner,
    own_logits,
    path_to,
    random_ids,
    reference_model,
    run_chunks,
    run_together,
    scattered_table,
    tiny_model,
    tree,
)

MODES = pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
# Local layers, global layers, soft caps; and a model whose values are narrower than its keys.
MODELS = pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3"])
CLOSE = {"rtol": 0.0, "atol": 1e-5}
PARENTS = (-1, -1, 0, 1, 1, 3, 2, 5)
NODES = (5, 9, 13, 17, 21, 25, 29, 33)
ACCEPTED = path_to(7, PARENTS)  # nodes 1, 3, 5, 7: not one lies where it is committed


def slots(table: list[int], positions: range) -> list[int]:
    return [slot_of(table, position, BLOCK_SIZE) for position in positions]


def stored(runner: ModelRunner, table: list[int], count: int) -> list[torch.Tensor]:
    """Keys and values of the first tokens, layer after layer."""
    lying = torch.tensor(slots(table, range(count)))
    return [plane[lying] for plane in [*runner.store.key, *runner.store.value]]


@MODES
@MODELS
def test_compacting_an_accepted_path_leaves_what_a_fresh_prefill_would(
    name: str, exact: bool
) -> None:
    text = random_ids(4, 18)
    runner = make_runner(reference_model(name), exact)
    table = scattered_table(0, 12)
    other = scattered_table(1, 12, first=24)
    run_chunks(runner, text, (9, 8), table)
    run_chunks(runner, text, (6,), other)
    run_together(runner, [tree(text, 1, NODES, PARENTS, table), chunk(text, 6, 3, other)])
    anchor = len(text) - 1
    before = stored(runner, other, 9)
    runner.move(
        [slot_of(table, anchor + 1 + node, BLOCK_SIZE) for node in ACCEPTED],
        [slot_of(table, anchor + 1 + depth, BLOCK_SIZE) for depth in range(len(ACCEPTED))],
    )
    assert all(map(torch.equal, stored(runner, other, 9), before))

    written = text + [NODES[node] for node in ACCEPTED]
    fresh = make_runner(reference_model(name), exact)
    run_chunks(fresh, written, (len(written),), other)
    for moved, expected in zip(
        stored(runner, table, len(written)), stored(fresh, other, len(written)), strict=True
    ):
        torch.testing.assert_close(moved, expected, **CLOSE)

    # Decoding goes on over the moved rows, and over what rejected nodes left behind them.
    going_on = [*written, 40, 41, 42]
    got = [
        run_together(runner, [chunk(going_on, base, 1, table)])[0]
        for base in range(len(written), len(going_on))
    ]
    expected = own_logits(reference_model(name), going_on)[len(written) :]
    torch.testing.assert_close(torch.cat(got), expected, rtol=0.0, atol=2e-4)


def test_moving_nothing_is_allowed() -> None:
    runner = make_runner(reference_model("llama"), exact=False)
    runner.move([], [])
    assert not any(plane.any() for plane in runner.store.key)


@MODES
def test_a_step_without_logits_still_writes_keys_and_values(exact: bool) -> None:
    runner = make_runner(reference_model("llama"), exact)
    text = random_ids(5, 12)
    table = scattered_table(0, 3)
    silent = RequestRows(text[:11], 11, 0, (), table, 0)
    assert runner.forward(build_batch([silent], BLOCK_SIZE)).logits.shape == (0, 97)
    (last,) = run_together(runner, [chunk(text, 11, 1, table)])
    expected = own_logits(reference_model("llama"), text)[-1:]
    torch.testing.assert_close(last, expected, rtol=0.0, atol=2e-4)


@MODES
def test_timing_leaves_no_trace_that_matters(exact: bool) -> None:
    """It scribbles over the first blocks; whoever gets them next writes before reading."""
    text = random_ids(6, 30)
    table = list(range(8))
    clean = make_runner(reference_model("mistral"), exact)
    expected = run_chunks(clean, text, (11, 1, 18), table)
    runner = make_runner(reference_model("mistral"), exact)
    for size in ((1, 0, 1), (40, 0, 1), (8, 60, 1), (100, 7, 1), (8, 80, 4), (4, 40, 4)):
        assert runner.time_step(*size) > 0
    assert torch.equal(run_chunks(runner, text, (11, 1, 18), table), expected)


@MODES
def test_a_token_without_finite_numbers_harms_only_the_request_that_has_it(exact: bool) -> None:
    """Checkpoints hold unused vocabulary rows with anything in them; a client may send such an id. Its
    neighbours, and whoever gets its blocks later, must not notice."""
    poisoned = 96
    model = tiny_model("llama")
    text = [token_id % poisoned for token_id in random_ids(7, 20)]
    expected = own_logits(model, text)
    with torch.no_grad():
        model.get_input_embeddings().weight[poisoned] = float("nan")
    runner = make_runner(model, exact)
    bad = [3, poisoned, 4, 5, poisoned, 6, 7, 8]
    bad_table, table = [0, 1], [2, 3, 4, 5, 6]
    first, theirs = run_together(runner, [chunk(text, 0, 9, table), chunk(bad, 0, 8, bad_table)])
    assert theirs[[1, 4]].isnan().all()
    beside, _ = run_together(runner, [chunk(text, 9, 6, table), chunk(bad, 7, 1, bad_table)])
    # Then in the blocks that the other one had.
    run_chunks(runner, text, (15,), [0, 1, 7, 8, 9])
    after = run_together(runner, [chunk(text, 15, 5, [0, 1, 7, 8, 9])])[0]
    torch.testing.assert_close(torch.cat([first, beside, after]), expected, rtol=0.0, atol=2e-4)


def test_steps_are_measured_with_rows_that_reach_other_experts() -> None:
    """Rows of one token, which used to be measured, have the same experts each: a step of eight rows cost
    hardly more than of one, and drafts were granted for nothing."""
    runner = make_runner(tiny_model("qwen3_moe"), exact=False)
    runner._replays._close("hooks are to be called")  # type: ignore[attr-defined]
    chosen: list[torch.Tensor] = []
    routers = [each for name, each in runner.model.named_modules() if name.endswith("mlp.gate")]
    routers[0].register_forward_hook(lambda _module, _rows, routed: chosen.append(routed[2]))
    runner.time_step(16, 0, 2)
    experts = chosen[0].sort(1).values
    for request in experts.split(8):
        assert len(request.unique(dim=0)) > 1
    assert not torch.equal(*experts.split(8))
