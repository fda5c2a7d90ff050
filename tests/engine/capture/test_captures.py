"""Recorded forwards: results have the model's bits, whatever requests make up the rows."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
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
from engine.capture import captures, recording
from engine.capture.captures import Captures
from engine.capture.recorder import KernelCall, Recorder, TensorCall
from engine.capture.recording import Recording
from engine.capture.sample import Sample, Shape
from engine.model.fusing import fuse
from engine.model.linear import pack_linears
from engine.model.quantization import complete_packed, quantize_model
from engine.model.runner import ModelRunner
from engine.weights.rounding.int8 import is_exact
from worlds.threads import threads
from worlds.tiny_models import (
    ARCHITECTURES,
    chunk,
    make_runner,
    random_ids,
    scattered_table,
    tiny_model,
    tree,
)

SIZE = 16
LAYERS = (NORMED, 0, 1, 2)


@pytest.fixture(autouse=True)
def recorded_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the second forward comes, and used when two shapes were compared."""
    monkeypatch.setattr(captures, "_OFTEN", 2)
    monkeypatch.setattr(captures, "_ENOUGH", 2)


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


def only(runner: ModelRunner) -> Any:
    """Returns the capture of the only kind of forwards."""
    (capture,) = runner._replays._captures.values()
    return capture


def known(runner: ModelRunner) -> set[tuple[int, int]]:
    """Rows of the shapes that were compared, and those of them with logits."""
    return {(*shape,) for each in runner._replays._captures.values() for shape in each.known}


def is_replay(output: ForwardOutput) -> bool:
    """Others took longer than the next of their kind will."""
    return not output.took_longer


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
    assert len(known(recording)) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2", "qwen3_moe", "phi3", "deepseek_v3"])
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
    assert len(known(recording)) > 1


@pytest.mark.skipif(not is_exact(), reason="this CPU has no VNNI")
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2", "qwen3_moe", "gpt_oss"])
def test_so_have_those_of_models_in_8_bits(name: str) -> None:
    model = tiny_model(name, torch.bfloat16)
    quantize_model(model)
    fuse(model)
    same_when_recorded(model, LAYERS)


# Normalisation by torch, angles by length, a softplus by torch.
_WITH_OTHERS = {"gpt2", "phi3_longrope", "gemma3", "kimi_linear"}


@pytest.mark.parametrize("name", sorted({*ARCHITECTURES} - _WITH_OTHERS))
def test_nothing_stands_between_a_models_kernels(name: str) -> None:
    """Neither of its own nor of torch."""
    is_one_sequence(tiny_model(name), tiny_model(name))


@pytest.mark.parametrize("name", ["gemma2", "llama", "qwen3_moe"])
def test_nothing_stands_between_a_quantized_models_kernels(name: str) -> None:
    models = tiny_model(name), tiny_model(name)
    for each in models:
        quantize_model(each)
        complete_packed(each)
    is_one_sequence(*models)


def is_one_sequence(model: PreTrainedModel, same: PreTrainedModel) -> None:
    recording, plain = runner_of(model), runner_of(same, is_open=False)
    for each in (recording, plain):
        pack_linears(each.model, 256, exact=True)
        fuse(each.model, 256)
    for num_rows in (18, 18, 2, 7, 9, 18):
        batch = rows_of(3, num_rows)
        got, expected = (each.forward(batch).logits for each in (recording, plain))
        assert torch.equal(got, expected)
    assert only(recording).recording.has_kernels_alone


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_that_are_chosen_or_joined_are_kernels_and_the_same(dim: int) -> None:
    """They are as many as there are."""
    table = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    memory, columns = torch.tensor([5, 0, 3, 1, 1, 4, 2, 0, 5]), torch.tensor([7, 0, 3])

    def forward(shape: Shape) -> ForwardOutput:
        numbers = memory[: shape.num_rows]
        chosen = torch.nn.functional.embedding(numbers, table)
        joined = torch.cat([chosen, table.index_select(0, numbers)], dim)
        return ForwardOutput(joined[None][:, numbers % 2].index_select(-1, columns), (joined[1:],))

    def sample(shape: Shape) -> Sample:
        recorder = Recorder()
        with recorder.watch():
            output = forward(shape)
        return Sample(recorder, output)

    # Two parts that are joined are two kernels; which one of two a row is, torch finds out.
    kinds = [type(each) for each in sample(Shape(3, 1)).calls]
    assert kinds == [KernelCall] * 4 + [TensorCall] + [KernelCall] * 2
    recording = Recording(sample)
    for num_rows in (9, 2, 5):
        memory.copy_(memory.roll(num_rows))
        found = recording.replay(Shape(num_rows, 1), cast(Any, None), 1)
        expected = forward(Shape(num_rows, 1))
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.hidden[0], expected.hidden[0])


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


# --- any number of rows ---


def warmed(runner: ModelRunner) -> ModelRunner:
    """Has a recording that serves up to forty rows, two of them with logits."""
    for batch in (rows_of(3, 40), rows_of(3, 1, 20), rows_of(3, 40, num_logits=2)):
        runner.forward(batch)
    assert {(1, 1), (40, 2)} & known(runner)
    return runner


def test_a_recording_serves_all_numbers_of_rows_between_those_that_were_known() -> None:
    """At once, without padding; what it has written to the store is what the model writes."""
    runner, plain = warmed(steady_runner()), steady_runner(is_open=False)
    plain.forward(rows_of(3, 40))
    for num_rows, num_logits in ((2, 2), (39, 1), (7, 2), (1, 1), (33, 2), (7, 1), (40, 1)):
        batch = rows_of(5, num_rows, 20, num_logits)
        got, expected = (each.forward(batch) for each in (runner, plain))
        assert is_replay(got)
        assert torch.equal(got.logits, expected.logits)
        assert all(map(torch.equal, runner.store._stacks, plain.store._stacks))


def test_more_rows_than_ever_are_checked_before_they_are_served() -> None:
    runner, plain = warmed(steady_runner()), steady_runner(is_open=False)
    plain.forward(rows_of(3, 40))
    checked = []
    check = only(runner).recording.check

    def noted(shape: Shape, sample: Sample) -> None:
        checked.append((*shape,))
        check(shape, sample)

    only(runner).recording.check = noted
    for num_rows, num_logits in ((60, 1), (60, 1), (50, 40), (9, 3), (60, 60), (59, 58)):
        batch = rows_of(5, num_rows, 20, num_logits)
        got, expected = (each.forward(batch) for each in (runner, plain))
        assert is_replay(got)
        assert torch.equal(got.logits, expected.logits)
    assert checked == [(60, 2), (50, 40), (60, 60)]


class Branching(nn.Module):
    """Does something else where ``is_other`` says so of a number of rows."""

    def __init__(self, inner: nn.Module, is_other: Callable[[int], bool]) -> None:
        super().__init__()
        self.inner, self._is_other = inner, is_other

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(hidden)
        return output + output if self._is_other(hidden.shape[-2]) else output * 3.0


class InSixteens(Branching):
    """Adds rows of zeros up to the next sixteen on the way."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        num_rows = hidden.shape[-2]
        padded = torch.nn.functional.pad(hidden, (0, 0, 0, -num_rows % 16))
        output: torch.Tensor = self.inner(padded * 2.0)
        return output[..., :num_rows, :]


class Failing(Branching):
    """Cannot run so many rows."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._is_other(hidden.shape[-2]):
            raise RuntimeError("so many rows are too many")
        output: torch.Tensor = self.inner(hidden)
        return output


@pytest.mark.parametrize(
    ("kind", "is_other", "reason"),
    [
        (Failing, lambda count: count == 4, "so many rows are too many"),
        (Branching, lambda count: count > 20, "other calls are made"),
        (Branching, lambda count: count % 2 == 1, "other calls are made"),
        (Branching, lambda count: count < 3, "other calls are made"),
        (InSixteens, bool, "does not grow by equal steps"),
    ],
    ids=["failing", "many", "odd", "few", "sixteens"],
)
def test_a_model_that_does_something_else_for_other_numbers_of_rows_runs_as_it_is(
    kind: type[Branching],
    is_other: Callable[[int], bool],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp = kind(model.model.layers[0].mlp, is_other)
    recording, plain = runner_of(model), runner_of(model, is_open=False)
    caplog.set_level(logging.INFO)
    for num_rows in (18, 18, 2, 18, 40, 7, 60):
        got, expected = (each.forward(rows_of(3, num_rows)).logits for each in (recording, plain))
        assert torch.equal(got, expected)
    assert reason in caplog.text


# --- hidden states ---


def test_one_recording_serves_those_who_read_hidden_states_and_those_who_do_not() -> None:
    runner, plain = steady_runner(), steady_runner(is_open=False)
    runner.prepare(LAYERS)
    warmed(runner)
    plain.forward(rows_of(3, 40))
    for layers in ((), LAYERS, (1,), ()):
        batch = rows_of(3, 8, 20, num_logits=2)
        batch.hidden_layers = layers
        got, expected = (each.forward(batch) for each in (runner, plain))
        assert is_replay(got)
        assert len(got.hidden) == len(layers)
        assert all(map(torch.equal, got.hidden, expected.hidden))
    only(runner)


def test_steps_that_want_other_hidden_states_have_a_recording_of_their_own() -> None:
    runner = warmed(steady_runner())
    batch = rows_of(3, 8, 20, num_logits=2)
    batch.hidden_layers = LAYERS
    found = runner.forward(batch)
    assert [len(each) for each in found.hidden] == [8] * len(LAYERS)
    assert not is_replay(found)
    assert is_replay(runner.forward(rows_of(3, 8, 20, num_logits=2)))


def test_hidden_states_of_a_replay_keep_their_place_until_the_next() -> None:
    """Nothing is copied that nobody keeps."""
    runner = runner_of(tiny_model("llama"))
    places = []
    for seed in range(5):
        batch = rows_of(seed, 8)
        batch.hidden_layers = LAYERS
        places.append([each.data_ptr() for each in runner.forward(batch).hidden])
    assert places[-1] == places[-2]
    assert len({*places[-1]}) == len(LAYERS)


# --- what is not recorded ---


class Peeking(nn.Module):
    """Looks at what a tensor holds."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.inner(hidden) if hidden.max().item() > 0 else -self.inner(hidden)


class Elsewhere(Peeking):
    """Computes on the way what no recording sees."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.memory = torch.zeros(100_000)

    def forward(self, hidden: torch.Tensor) -> Any:
        output = self.inner(hidden)
        found = self.memory[: output.numel()].view(output.shape)
        found.numpy()[:] = 2.0 * output.numpy()
        return found + output


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Peeking, "reads what tensors hold"), (Elsewhere, "computes something else")],
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
    assert not known(recording)


def test_neither_are_forwards_of_many_rows_nor_what_a_backend_cannot_capture() -> None:
    """Inputs of more rows than there is room for lie elsewhere."""
    runner = runner_of(tiny_model("llama"))
    runner._replays._captures.default_factory = partial(captures._Capture, 64)
    for num_rows in (60, 65, 60, 65, 65):
        runner.forward(rows_of(num_rows, num_rows))
    assert known(runner) == {(60, 60)}
    assert is_replay(runner.forward(rows_of(9, 60)))
    gathering = make_runner(tiny_model("llama"), False, block_size=SIZE, attention="sdpa")
    assert not isinstance(gathering._replays, Captures)


def test_forwards_are_recorded_when_they_have_come_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "_OFTEN", 4)
    runner = runner_of(tiny_model("llama"))
    found = []
    for num_rows in (8, 3, 8, 5, 8):
        found.append(is_replay(runner.forward(rows_of(7, num_rows))))
        found.append(only(runner).recording is not None)
    assert found == [False, False] * 3 + [False, True] * 2
    assert is_replay(runner.forward(rows_of(7, 5)))


# --- memory ---


def test_results_hold_until_the_next_forward_and_nothing_of_them_is_copied() -> None:
    runner = runner_of(tiny_model("llama"))
    expected = [runner.forward(rows_of(seed, 8)).logits.clone() for seed in range(5)]
    found = [runner.forward(rows_of(seed, 8)).logits for seed in (0, 3)]
    assert torch.equal(found[1], expected[3])
    assert found[0].data_ptr() == found[1].data_ptr()


def test_forwards_that_would_take_too_much_memory_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = runner_of(tiny_model("llama"))
    for _ in range(3):
        runner.forward(rows_of(1, 8))
    most = only(runner).recording.num_bytes(Shape(20, 20))
    monkeypatch.setattr(captures, "_MOST_BYTES", most)
    for num_rows, num_forwards in ((21, 3), (20, 3)):
        for _ in range(num_forwards):
            found = runner.forward(rows_of(2, num_rows))
    assert known(runner) == {(8, 8), (20, 20)}
    assert is_replay(found)
    assert only(runner).recording.num_bytes(Shape(3, 1)) == most


def test_arguments_of_few_shapes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, plain = warmed(steady_runner()), steady_runner(is_open=False)
    plain.forward(rows_of(3, 40))
    monkeypatch.setattr(recording, "_MOST_KEPT", 3)
    for num_rows in (*range(2, 12), 3, 11):
        batch = rows_of(5, num_rows, 20, num_logits=2)
        assert torch.equal(*(each.forward(batch).logits for each in (runner, plain)))
    assert len(only(runner).recording._forwards) == 3


def test_memory_within_a_recording_is_used_again() -> None:
    sizes = []
    for num_layers in (2, 12):
        runner = runner_of(tiny_model("llama", num_hidden_layers=num_layers))
        for seed in range(3):
            runner.forward(rows_of(seed, 8))
        sizes.append(only(runner).recording.num_bytes(Shape(8, 8)))
    assert sizes[0] == sizes[1] > 0


def test_a_recording_holds_what_its_kernels_point_to() -> None:
    """A layer that asks for other options meanwhile takes nothing from it."""
    runner = runner_of(tiny_model("llama"))
    for seed in range(3):
        runner.forward(rows_of(seed, 8))
    assert known(runner) == {(8, 8)}
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
    """Short forwards, whose number of threads takes some replays to choose."""
    runner = runner_of(tiny_model("llama"))
    times = accumulate(count())
    runner._replays._clock = lambda: 1e-6 * next(times)
    forward, seen = runner.forward, []

    def counted(batch: InputBatch) -> ForwardOutput:
        seen.append(forward(batch))
        assert len(seen) < 100
        return seen[-1]

    with threads(2), pytest.MonkeyPatch.context() as patches:
        patches.setattr(runner, "forward", counted)
        for shape in ((4, 20), (90, 0)):
            assert runner.time_step(*shape) > 0
            assert is_replay(seen[-1])
    assert known(runner) == {(4, 4), (90, 64)}


def test_results_that_are_no_numbers_are_the_same_results() -> None:
    nan = ForwardOutput(torch.full((2, 3), torch.nan))
    assert captures._same_bits(nan.logits, nan.with_own_logits().logits)
    assert not captures._same_bits(torch.zeros(2), -torch.zeros(2))


def tried(alone: float, team: float, num_rows: int, base: int) -> ModelRunner:
    """A runner that has tried its only shape in one thread and in a team, which took so many seconds."""
    runner = runner_of(tiny_model("llama"))
    times = iter([0.0, team, 0.0, alone] * captures._TRIALS)
    runner._replays._clock = lambda: next(times)
    for _ in range(2 + 2 * captures._TRIALS):
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
    assert only(runner).threads[6].chosen == chosen


@pytest.mark.parametrize(("alone", "rows", "others"), [(2e-3, 8, 5), (1e-3, 5, 8)])
def test_what_was_chosen_for_fewer_or_more_rows_is_not_timed_again(
    alone: float, rows: int, others: int
) -> None:
    with threads(2):
        capture = only(tried(alone, 1e-3, 6, 0))
    assert capture.threads_of(rows).chosen == capture.threads[6].chosen
    assert capture.threads_of(others).chosen is None


def test_rows_of_long_texts_have_a_team_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "_WORTH_A_TEAM", 4 * 20 * 4 * 32)
    with threads(2):
        runner = tried(1e-3, 1e-3, 4, 2)
        assert only(runner).threads[4].chosen == 1
        seen: list[int] = []
        recorded = only(runner).recording
        replay = recorded.replay

        def watched(shape: Shape, plan: Any, num_threads: int) -> ForwardOutput:
            seen.append(num_threads)
            return replay(shape, plan, num_threads)

        monkeypatch.setattr(recorded, "replay", watched)
        for base in (2, 30):
            batch = rows_of(7, 4, base)
            with torch.inference_mode():
                expected = runner._run(*runner._plan(batch), hidden_layers=())
            assert torch.equal(runner.forward(batch).logits, expected.logits)
    assert seen == [1, 2]
