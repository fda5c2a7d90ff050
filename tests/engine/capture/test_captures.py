"""Recorded forwards: results have the model's bits, whatever requests make up the rows."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, count
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel

from engine.attention import paged
from engine.batch import NORMED, ForwardOutput, InputBatch, RequestRows, build_batch
from engine.capture import captures
from engine.capture.captures import Captures
from engine.capture.recording import CapturedForward, KernelCall, Recorder, _Kernels
from engine.model.fusing import fuse
from engine.model.linear import pack_linears
from engine.model.quantization import quantize_model
from engine.model.runner import ModelRunner
from engine.weights.rounding.int8 import is_exact
from worlds.threads import threads
from worlds.tiny_models import chunk, make_runner, random_ids, scattered_table, tiny_model, tree

SIZE = 16
LAYERS = (NORMED, 0, 1, 2)


@pytest.fixture(autouse=True)
def recorded_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a shape comes for the second time."""
    monkeypatch.setattr(captures, "_OFTEN", 2.0)


def runner_of(model: PreTrainedModel, is_open: bool = True) -> ModelRunner:
    runner = make_runner(model, exact=True, block_size=SIZE)
    if not is_open:
        runner._replays._close("the test compares with it")
    return runner


def steady_runner(is_open: bool = True) -> ModelRunner:
    """Returns the runner of a model whose rows have the same bits in any company, which padding is."""
    runner = runner_of(tiny_model("llama"), is_open)
    assert pack_linears(runner.model, 256, exact=True) == set()
    return runner


def trusted(runner: ModelRunner) -> int:
    return sum(each.is_trusted for each in runner._replays._captures.values())


def recorded(runner: ModelRunner) -> list[int]:
    """Numbers of rows, those used last at the end."""
    every = runner._replays._captures.items()
    return [shape.num_rows for shape, each in every if each.graph is not None]


def only(runner: ModelRunner) -> Any:
    """Returns the capture of the only shape."""
    (capture,) = runner._replays._captures.values()
    return capture


def tables(index: int) -> list[int]:
    return scattered_table(5, 12, first=12 * index, among=12)


def rows_of(seed: int, num_rows: int, base: int = 0, num_logits: int | None = None) -> InputBatch:
    """So many rows of a text from ``base`` on, of which a first step has written the rest;
    ``num_logits``: of the last ones, None: of all."""
    rows = chunk(random_ids(seed, 100), base, num_rows, tables(0))
    return build_batch([replace(rows, num_logits=num_logits or num_rows)], SIZE)


def texts(seed: int, lengths: Sequence[int]) -> list[RequestRows]:
    """Each text's prompt, in blocks of its own."""
    return [
        chunk(random_ids(seed + index, length), 0, length, tables(index))
        for index, length in enumerate(lengths)
    ]


def steps(seed: int) -> list[list[RequestRows]]:
    """Prompts; then six rows a step, made up anew each time."""
    first, second = random_ids(seed, 60), random_ids(seed + 1, 90)
    rows = random_ids(seed + 2, 5)
    one, two = tables(0), tables(1)
    return [
        texts(seed, [60, 90]),
        [chunk(first, 54, 6, one)],
        [chunk(first, 50, 2, one), chunk(second, 80, 4, two)],
        [tree(second, 1, rows, (-1, -1, 0, 0, 2), two)],
        [tree(first, 1, rows[:2], (-1, -1), one), chunk(second, 87, 3, two)],
        [chunk(second, 84, 6, two)],
        [tree(first, 2, rows[:4], (-1, 0, 0, 1), one)],
    ]


def check_same(
    recording: ModelRunner, plain: ModelRunner, hidden_layers: tuple[int, ...] = ()
) -> None:
    for requests in (*steps(1), *steps(2)):
        got, expected = (
            each.forward(build_batch(requests, SIZE, hidden_layers)) for each in (recording, plain)
        )
        assert torch.equal(got.logits, expected.logits)
        assert len(got.hidden) == len(expected.hidden) == len(hidden_layers)
        assert all(map(torch.equal, got.hidden, expected.hidden))


def same_when_recorded(model: PreTrainedModel, hidden_layers: tuple[int, ...]) -> None:
    recording = runner_of(model)
    check_same(recording, runner_of(model, is_open=False), hidden_layers)
    assert trusted(recording) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2", "qwen3_moe", "phi3"])
@pytest.mark.parametrize("hidden_layers", [(), LAYERS], ids=["", "hidden"])
def test_results_have_the_models_bits(
    name: str, dtype: torch.dtype, hidden_layers: tuple[int, ...]
) -> None:
    same_when_recorded(tiny_model(name, dtype), hidden_layers)


def test_blocks_and_first_keys_are_those_of_the_step_that_is_run_again() -> None:
    """The rows of the model's first layer see their block, those of the second do not."""
    model = tiny_model("llama")
    model.model.layers[0].self_attn.sees_block = True
    recording, plain = runner_of(model), runner_of(model, is_open=False)
    for number, requests in enumerate((*steps(1), *steps(2))):
        asked = [replace(each, first_key=min(each.base, 7 * number)) for each in requests]
        batch = build_batch(asked, SIZE)
        got, expected = (each.forward(batch).logits for each in (recording, plain))
        assert torch.equal(got, expected)
    assert trusted(recording) == 1


@pytest.mark.skipif(not is_exact(), reason="this CPU has no VNNI")
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2", "qwen3_moe", "gpt_oss"])
def test_so_have_those_of_models_in_8_bits(name: str) -> None:
    model = tiny_model(name, torch.bfloat16)
    quantize_model(model)
    fuse(model)
    same_when_recorded(model, LAYERS)


@pytest.mark.skipif(not is_exact(), reason="this CPU has no VNNI")
def test_nothing_stands_between_a_models_kernels() -> None:
    """Between two sequences the interpreter and the end of a team cost what a kernel of few rows does."""
    model = tiny_model("llama", torch.bfloat16, head_dim=32)
    quantize_model(model)
    fuse(model, 64)
    recording = runner_of(model)
    check_same(recording, runner_of(model, is_open=False), LAYERS)
    graphs = [each.graph for each in recording._replays._captures.values() if each.graph]
    assert graphs
    for graph in graphs:
        assert [type(part) for part in graph._parts] == [_Kernels]


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_that_are_chosen_or_joined_are_kernels_and_the_same(dim: int) -> None:
    """As far as they lie together; elsewhere torch does it again."""
    table = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    numbers = torch.tensor([5, 0, 3])

    def forward() -> ForwardOutput:
        chosen = torch.nn.functional.embedding(numbers, table)
        joined = torch.cat([chosen, table.index_select(0, numbers)], dim)
        return ForwardOutput(joined[None][:, numbers % 2].index_select(-1, numbers), (joined[1:],))

    recorder = Recorder()
    with recorder.watch():
        expected = forward()
    assert recorder.reason is None
    graph = CapturedForward(recorder, expected)
    num_kernels = sum(isinstance(each, KernelCall) for each in recorder.calls)
    # Two parts of a row are two kernels; what is joined below each other is one operation of torch's.
    assert num_kernels == (5 if dim == 1 else 3)
    numbers.copy_(torch.tensor([2, 2, 1]))
    found = graph.replay(cast(Any, None), 1)
    for got, wanted in zip(
        (found.logits, *found.hidden), (forward().logits, *forward().hidden), strict=True
    ):
        assert torch.equal(got, wanted)


PAIR = (steady_runner(), steady_runner(is_open=False))


@given(seed=st.integers(0, 50), counts=st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_any_company_writes_and_reads_the_same(seed: int, counts: list[int]) -> None:
    prompts = texts(seed, [40 + 7 * index for index in range(len(counts))])
    parts = [
        chunk(random_ids(seed + index, 40 + 7 * index), 30, count, tables(index))
        for index, count in enumerate(counts)
    ]
    for requests in (prompts, parts, parts):
        got, expected = (each.forward(build_batch(requests, SIZE)).logits for each in PAIR)
        assert torch.equal(got, expected)


# --- padding ---


def padding_runner(
    seconds: float, hidden_layers: tuple[int, ...] = (), num_rows: int = 8
) -> ModelRunner:
    """Has a recording of so many rows, replayed in that part of the time that a replay spares."""
    runner = steady_runner()
    runner.prepare(hidden_layers)
    for base in (0, 20, 20, 20, 20):
        runner.forward(rows_of(3, num_rows if base else 40, base))
    assert recorded(runner) == [num_rows]
    runner._replays._spared = [1.0]
    for each in runner._replays._captures.values():
        each.threads._seconds, each.threads.chosen = {1: [seconds]}, 1
    return runner


def test_a_recording_of_more_rows_serves_until_padding_has_taken_what_recording_does() -> None:
    padding, plain = padding_runner(1.6), steady_runner(is_open=False)
    plain.forward(rows_of(3, 40))
    found, timed = [], []
    for num_rows in (6, 6, 6, 6, 6, 6, 5, 8):
        before = [plane.clone() for plane in padding.store._stacks]
        got, expected = (each.forward(rows_of(3, num_rows, 20)) for each in (padding, plain))
        assert torch.equal(got.logits, expected.logits)
        # What the same text has written before, and nothing of the padding.
        assert all(map(torch.equal, before, padding.store._stacks))
        found.append(sorted(recorded(padding)))
        timed.append(got.num_rows)
    # Two of eight rows lose 0.4 of what a replay spares: the fourth time it is recorded, then compared.
    assert found == [[8]] * 3 + [[6, 8]] * 5
    assert timed == [8, 8, 8, 0, 0, 6, 6, 8]


def prompts(first: int, second: int) -> InputBatch:
    """Returns a step of two requests that ask for their last row's logits."""
    asked = [replace(each, num_logits=1) for each in texts(first, [first, second])]
    return build_batch(asked, SIZE)


def test_prompts_of_about_a_length_share_a_recording() -> None:
    """States of padding are whatever lay in memory: they say nothing of a recording."""
    runner, plain = steady_runner(), steady_runner(is_open=False)
    runner.prepare(LAYERS)
    for each in (runner, plain):
        each.forward(prompts(30, 35))
    timed = []
    for first, second in ((20, 17), (18, 21), (19, 20), (22, 18), (17, 23), (30, 9), (30, 30)):
        batch = prompts(first, second)
        runner._replays._spared = [1.0] * len(runner._replays._spared)
        got, expected = (each.forward(batch) for each in (runner, plain))
        assert torch.equal(got.logits, expected.logits)
        assert len(got.logits) == 2
        assert all(map(torch.equal, runner.store._stacks, plain.store._stacks))
        timed.append(got.num_rows)
    assert recorded(runner) == [40]
    assert timed == [0, 0, 0, 40, 40, 40, 0]


def test_padding_of_prompts_that_takes_longer_than_the_interpreter_is_not_done() -> None:
    runner = steady_runner()
    for lengths in ((30, 35), *[(20, 18)] * 4):
        runner.forward(prompts(*lengths))
    assert recorded(runner) == [40]
    runner._replays._spared = [1e-9]
    assert runner.forward(prompts(20, 18)).num_rows == 0


def test_prompts_share_a_recording_beside_one_of_more_rows_whose_padding_takes_longer() -> None:
    runner = padding_runner(1e9, num_rows=16)
    for num_rows in (10, 11):
        runner.forward(rows_of(3, num_rows, 20, num_logits=1))
    assert recorded(runner) == [16, 12]


@pytest.mark.parametrize(("seconds", "served"), [(7.9, 8), (8.1, 0)])
def test_padding_that_takes_longer_than_the_interpreter_is_not_done(
    seconds: float, served: int
) -> None:
    assert padding_runner(seconds).forward(rows_of(3, 7, 20)).num_rows == served


def test_one_recording_serves_those_who_read_hidden_states_and_those_who_do_not() -> None:
    runner, plain = padding_runner(1.0, LAYERS), steady_runner(is_open=False)
    plain.forward(rows_of(3, 40))
    for layers in ((), LAYERS, (1,), ()):
        batch = rows_of(3, 8, 20)
        batch.hidden_layers = layers
        got, expected = (each.forward(batch) for each in (runner, plain))
        assert got.num_rows == 8, "it was a replay"
        assert len(got.hidden) == len(layers)
        assert all(map(torch.equal, got.hidden, expected.hidden))
    assert recorded(runner) == [8]


def test_steps_that_want_other_hidden_states_are_not_served_by_it() -> None:
    batch = rows_of(3, 7, 20)
    batch.hidden_layers = LAYERS
    found = padding_runner(1.0).forward(batch)
    assert [len(each) for each in found.hidden] == [7] * len(LAYERS)
    assert found.num_rows == 0


def test_a_padded_step_has_its_own_rows_hidden_states() -> None:
    padding, plain = steady_runner(), steady_runner(is_open=False)
    padding._replays._clock = lambda: 0.0
    for num_rows in (40, 8, 8, 8, 7):
        batch = rows_of(3, num_rows, 0 if num_rows == 40 else 20)
        batch.hidden_layers = LAYERS
        got, expected = (each.forward(batch).hidden for each in (padding, plain))
        assert all(map(torch.equal, got, expected))
    assert recorded(padding) == [8]


def test_hidden_states_of_a_replay_keep_their_place_until_the_next() -> None:
    """Nothing is copied that nobody keeps."""
    runner = runner_of(tiny_model("llama"))
    places = []
    for seed in range(5):
        batch = rows_of(seed, 8)
        batch.hidden_layers = LAYERS
        places.append([each.data_ptr() for each in runner.forward(batch).hidden])
    assert trusted(runner) == 1
    assert places[-1] == places[-2]
    assert len({*places[-1]}) == len(LAYERS)


# --- what is not recorded ---


class Peeking(nn.Module):
    """Looks at what a tensor holds."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.inner(hidden) if hidden.max().item() > 0 else -self.inner(hidden)


class Counting(Peeking):
    """Another result at every call."""

    def forward(self, hidden: torch.Tensor) -> Any:
        self.calls += 1
        return self.inner(hidden) * (1.0 + self.calls)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Peeking, "reads what tensors hold"), (Counting, "computes something else")],
)
def test_a_model_that_cannot_be_recorded_runs_as_it_is(
    kind: type[Peeking], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp = kind(model.model.layers[0].mlp)
    recording = runner_of(model)
    caplog.set_level(logging.INFO)
    check_same(recording, runner_of(model, is_open=False))
    assert reason in caplog.text
    assert trusted(recording) == 0


def test_neither_are_forwards_of_many_rows_nor_what_a_backend_cannot_capture() -> None:
    runner = runner_of(tiny_model("llama"))
    for seed in range(4):
        runner.forward(rows_of(seed, captures._MOST_ROWS + 1))
    assert not recorded(runner)
    gathering = make_runner(tiny_model("llama"), False, block_size=SIZE, attention="sdpa")
    assert not isinstance(gathering._replays, Captures)


@pytest.mark.parametrize("num_logits", [8, 1], ids=["", "prompt"])
def test_a_shape_is_recorded_when_it_has_come_often(
    num_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "_OFTEN", 4)
    runner = runner_of(tiny_model("llama"))
    found = []
    for _ in range(5):
        runner.forward(rows_of(7, 8, num_logits=num_logits))
        found.append(recorded(runner))
    assert found == [[], [], [], [8], [8]]


# --- memory ---


def test_results_hold_until_the_next_forward_and_nothing_of_them_is_copied() -> None:
    runner = runner_of(tiny_model("llama"))
    expected = [runner.forward(rows_of(seed, 8)).logits.clone() for seed in range(5)]
    assert trusted(runner) == 1
    found = [runner.forward(rows_of(seed, 8)).logits for seed in (0, 3)]
    assert torch.equal(found[1], expected[3])
    assert found[0].data_ptr() == found[1].data_ptr()


def test_the_least_used_recordings_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(tiny_model("llama"))

    def run(*counts: int) -> list[int]:
        for num_rows in counts:
            for seed in range(3):
                runner.forward(rows_of(seed, num_rows))
        return recorded(runner)

    assert run(3) == [3]
    # A row takes the same memory in each: room for eleven, and a little more.
    monkeypatch.setattr(captures, "_MOST_BYTES", 23 * only(runner).graph.num_bytes // 6)
    assert run(4, 3, 5, 6) == [5, 6]
    runner.forward(rows_of(9, 3))
    assert recorded(runner) == [5, 6], "it has to come as often as at first"
    assert run(3) == [6, 3]


def test_memory_within_a_recording_is_used_again() -> None:
    sizes = []
    for num_layers in (2, 12):
        runner = runner_of(tiny_model("llama", num_hidden_layers=num_layers))
        for seed in range(3):
            runner.forward(rows_of(seed, 8))
        sizes.append(only(runner).graph.num_bytes)
    assert sizes[0] == sizes[1] > 0


def test_a_recording_holds_what_its_kernels_point_to() -> None:
    """A layer that asks for other options meanwhile takes nothing from it."""
    runner = runner_of(tiny_model("llama"))
    for seed in range(3):
        runner.forward(rows_of(seed, 8))
    assert trusted(runner) == 1
    backend: Any = runner.attention
    held = [weakref.ref(each) for each in backend._layers.values()]
    backend._layers.clear()
    gc.collect()
    assert all(each() is not None for each in held)
    runner._replays._close("nothing points to them any more")
    gc.collect()
    assert all(each() is None for each in held)


# --- time ---


def test_timing_waits_until_a_shape_is_settled() -> None:
    runner = runner_of(tiny_model("llama"))
    assert runner.time_step(4, 20) > 0
    assert trusted(runner) == 1
    runner.time_step(captures._MOST_ROWS + 1, 0)
    assert trusted(runner) == 1


def test_timing_settles_where_a_shape_is_padded() -> None:
    """Short forwards, whose number of threads takes some replays to choose."""
    runner = runner_of(tiny_model("llama"))
    times = accumulate(count())
    runner._replays._clock = lambda: 1e-6 * next(times)
    forward, seen = runner.forward, []

    def counted(batch: InputBatch) -> ForwardOutput:
        seen.append(batch)
        assert len(seen) < 100
        return forward(batch)

    with threads(2), pytest.MonkeyPatch.context() as patches:
        patches.setattr(runner, "forward", counted)
        runner.time_step(90, 0)
    assert recorded(runner) == [96]


def test_results_that_are_no_numbers_are_the_same_results() -> None:
    nan = ForwardOutput(torch.full((2, 3), torch.nan))
    assert captures._same_bits(nan.logits, nan.with_own_logits().logits)
    assert not captures._same_bits(torch.zeros(2), -torch.zeros(2))


def tried(alone: float, team: float, num_rows: int, base: int) -> ModelRunner:
    """A runner that has tried its only shape in one thread and in a team, which took so many seconds."""
    runner = runner_of(tiny_model("llama"))
    compared = [0.0, 0.0, 0.0]
    times = iter(compared + [0.0, team, 0.0, alone] * captures._TRIALS)
    runner._replays._clock = lambda: next(times)
    for _ in range(3 + 2 * captures._TRIALS):
        runner.forward(rows_of(7, num_rows, base))
    return runner


@pytest.mark.parametrize(
    ("alone", "team", "chosen"), [(1.1e-3, 1.0e-3, 1), (2.0e-3, 1.0e-3, 2), (0.1, 7e-3, 2)]
)
def test_a_short_forward_leaves_cores_to_others_unless_a_team_is_much_faster(
    alone: float, team: float, chosen: int
) -> None:
    with threads(2):
        runner = tried(alone, team, 6, 0)
        expected = runner_of(tiny_model("llama"), is_open=False).forward(rows_of(7, 6))
        assert torch.equal(runner.forward(rows_of(7, 6)).logits, expected.logits)
    assert only(runner).threads.chosen == chosen


def test_rows_of_long_texts_have_a_team_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "_WORTH_A_TEAM", 4 * 20 * 4 * 32)
    with threads(2):
        runner = tried(1e-3, 1e-3, 4, 2)
        assert only(runner).threads.chosen == 1
        seen: list[int] = []
        graph = only(runner).graph
        replay = graph.replay

        def watched(plan: Any, num_threads: int) -> ForwardOutput:
            seen.append(num_threads)
            return replay(plan, num_threads)

        monkeypatch.setattr(graph, "replay", watched)
        for base in (2, 30):
            batch = rows_of(7, 4, base)
            with torch.inference_mode():
                expected = runner._run(*runner._plan(batch), hidden_layers=())
            assert torch.equal(runner.forward(batch).logits, expected.logits)
    assert seen == [1, 2]
