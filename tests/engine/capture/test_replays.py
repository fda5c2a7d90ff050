"""Graphs on a CPU, over a maker that repeats and compares: what a device would repeat is what is wanted,
for every architecture; what it cannot is seen at start and served without."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from engine.attention.backend import AttentionBackend, AttentionNeeds, build_attention
from engine.batch import (
    NO_SLOT,
    NORMED,
    Bucket,
    Choices,
    ForwardOutput,
    InputBatch,
    RequestRows,
    build_batch,
    pad_batch,
)
from engine.capture.replays import DeviceGraphs, GraphSizes, find_bucket, graph_sizes, make_buckets
from engine.config import EngineConfig
from engine.kernels.triton.choice_ops import choose_rows
from engine.model.decoder import kept_states
from engine.model.loader import attach_attention, state_shapes
from engine.model.runner import ModelRunner
from engine.states.plan import PlainStates
from engine.states.triton import TritonStates
from kvpool.state_store import StateStore
from kvpool.store import KVStore
from worlds.device_world import no_host
from worlds.graph_maker import ReplayingMaker
from worlds.interpreted import ON_CPU, patching_once
from worlds.lanes import examples
from worlds.static_attention import StaticAttention
from worlds.tiny_models import (
    BLOCK_SIZE,
    STATELESS,
    chunk,
    random_ids,
    reference_model,
    run_chunks,
    run_together,
    scattered_table,
    tiny_model,
    tree,
)

SIZES = GraphSizes(24, 6, 64, 8)
PARENTS = (-1, -1, 0, 1, 1, 3)
NODES = (5, 9, 13, 17, 21, 25)
LAYERS = (NORMED, 0, 1, 2)


def graph_runner(
    name: str,
    maker: ReplayingMaker | None,
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
    sizes: GraphSizes = SIZES,
    hidden_layers: tuple[int, ...] = (),
    chooses: bool = False,
) -> ModelRunner:
    """Over ``StaticAttention``, or the ``backend`` of that name; without a maker nothing is captured."""
    is_shared = dtype == torch.float32
    model = copy.deepcopy(reference_model(name)) if is_shared else tiny_model(name, dtype)
    needs = AttentionNeeds.of(model, attach_attention(model), "fast", BLOCK_SIZE)
    store = KVStore(num_blocks=97, device="cpu", **needs.store_sizes())
    attention: AttentionBackend = StaticAttention(store, needs)
    if backend is not None:
        attention = build_attention(needs, store, backend)
    states = None
    if shapes := state_shapes(model):
        stored = StateStore(shapes, 97, 2, torch.device("cpu"))
        states = PlainStates(stored) if maker is None else TritonStates(stored)
    runner = ModelRunner(model, attention, states=states)
    if maker is not None:
        runner._replays = DeviceGraphs(runner._planned, runner.attention, maker, sizes, states)
        runner.prepare(hidden_layers, chooses)
    return runner


def write(runner: ModelRunner) -> list[torch.Tensor]:
    """Logits of prompts, single rows, chains and trees of several requests."""
    first, second = random_ids(1, 30), random_ids(2, 21)
    one, two = scattered_table(0, 12), scattered_table(1, 12, first=24)
    logits = [run_chunks(runner, first, (25, 1, 3), one), run_chunks(runner, second, (21,), two)]
    logits += run_together(runner, [tree(first, 1, NODES, PARENTS, one)])
    logits += run_together(
        runner, [tree(first, 1, NODES[:2], (-1, 0), one), chunk(second, 20, 1, two)]
    )
    logits += run_together(runner, [chunk(second, 20, 1, two), chunk(first, 29, 1, one)])
    return logits


@pytest.mark.parametrize("name", STATELESS)
def test_replays_write_what_the_model_writes(name: str) -> None:
    maker = ReplayingMaker()
    runner = graph_runner(name, maker)
    assert len(maker.graphs) > 0
    written = write(runner)
    # 25 rows fit no bucket; all other steps do.
    assert maker.num_replays == 6
    for got, expected in zip(written, write(graph_runner(name, None)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@ON_CPU
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "qwen3_5_text"])
def test_replays_over_the_attention_of_gpus_write_the_same(name: str) -> None:
    """Triton's programs, under their interpreter; launches have to be alike as well."""
    maker = ReplayingMaker()
    with patching_once():
        sizes = SIZES._replace(most_rows=8, most_requests=2)
        written = write(graph_runner(name, maker, backend="triton", sizes=sizes))
    assert maker.num_replays == 5
    for got, expected in zip(written, write(graph_runner(name, None)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", STATELESS)
def test_a_forward_is_traced_without_looking_into_a_tensor(name: str) -> None:
    """Under fake tensors, which hold nothing: branches on what they hold, and reads of it, raise."""
    runner = graph_runner(name, None, torch.bfloat16)  # experts' fake products know no other type
    rows = [tree(random_ids(1, 9), 2, NODES, PARENTS, scattered_table(0, 12))]
    batch = build_batch(rows, BLOCK_SIZE)
    inputs, plan = runner._plan(batch)

    def forward(*columns: torch.Tensor) -> torch.Tensor:
        return runner._run(type(inputs)(*columns), plan, LAYERS).logits

    with torch.inference_mode(False), torch.no_grad():
        own = [column.clone() for column in inputs]
        traced = make_fx(forward, tracing_mode="fake", _allow_non_fake_inputs=True)(*own)
        torch.testing.assert_close(traced(*own), forward(*own))


@settings(max_examples=examples(2))
@given(st.sampled_from(STATELESS))
def test_a_forward_is_compiled_as_one_graph(name: str) -> None:
    """Without a break, which is what Python would have to do in between, hidden states included. In the
    fuzz lane every architecture."""
    runner = graph_runner(name, None)
    rows = [tree(random_ids(1, 9), 2, NODES, PARENTS, scattered_table(0, 12))]
    inputs, plan = runner._plan(build_batch(rows, BLOCK_SIZE))

    def forward(*columns: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = runner._run(type(inputs)(*columns), plan, ())
        return output.logits, *(kept[layer] for layer in LAYERS)

    torch.compiler.reset()
    # The hooks are registered by the host, around what the device is told.
    with torch.inference_mode(False), torch.no_grad(), kept_states(runner.model, LAYERS) as kept:
        own = [column.clone() for column in inputs]
        compiled = torch.compile(forward, fullgraph=True, backend="eager")
        for got, expected in zip(compiled(*own), forward(*own), strict=True):
            assert torch.equal(got, expected)


def test_padding_stores_nothing_among_the_texts() -> None:
    maker = ReplayingMaker()
    runner = graph_runner("llama", maker)
    table = scattered_table(0, 12)
    run_chunks(runner, random_ids(1, 20), (20,), table)
    kept = [plane.clone() for plane in [*runner.store.key, *runner.store.value]]
    runner.forward(build_batch([chunk(random_ids(2, 1), 0, 1, range(90, 92))], BLOCK_SIZE))
    slot, last = 90 * BLOCK_SIZE, runner.store.num_slots - 1
    for plane, before in zip([*runner.store.key, *runner.store.value], kept, strict=True):
        assert not torch.equal(plane[slot], before[slot])
        before[[slot, last]] = plane[[slot, last]]
        assert torch.equal(plane, before)


def test_results_of_a_replay_outlive_the_next() -> None:
    runner = graph_runner("llama", ReplayingMaker())
    table = scattered_table(0, 12)
    text = random_ids(1, 12)
    run_chunks(runner, text, (10,), table)
    first = runner.forward(build_batch([chunk(text, 10, 1, table)], BLOCK_SIZE))
    logits = first.logits.clone()
    runner.forward(build_batch([chunk(text, 11, 1, table)], BLOCK_SIZE))
    assert torch.equal(first.logits, logits)
    assert first.logits.shape[0] == 1


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_hidden_states_leave_a_graph_for_those_who_want_them(name: str) -> None:
    """A graph holds the states for all drafters, and serves steps that want some or none of them."""
    maker = ReplayingMaker()
    graphed, plain = (graph_runner(name, each, hidden_layers=LAYERS) for each in (maker, None))
    text, table = random_ids(1, 20), scattered_table(0, 12)
    found = []
    for base, layers in ((0, ()), (6, LAYERS), (11, (1,)), (16, LAYERS[::-1])):
        batch = build_batch([chunk(text, base, 3, table)], BLOCK_SIZE, layers)
        output, expected = (runner.forward(batch).hidden for runner in (graphed, plain))
        assert len(output) == len(layers)
        for got, wanted in zip(output, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        found += [{layer: each.data_ptr() for layer, each in zip(layers, output, strict=True)}]
    # They lie where the graph wrote them.
    assert found[3] == found[1]
    assert found[2] == {1: found[1][1]}
    assert maker.num_replays == 4


def test_states_that_were_not_captured_come_from_the_model() -> None:
    maker = ReplayingMaker()
    runner = graph_runner("llama", maker, hidden_layers=(1,))
    batch = build_batch([chunk(random_ids(1, 3), 0, 3, [0])], BLOCK_SIZE, (NORMED, 1))
    assert [each.shape for each in runner.forward(batch).hidden] == [(3, 64)] * 2
    assert maker.num_replays == 0


def prepared(
    planned: Callable[[InputBatch], Callable[[], ForwardOutput]],
    maker: ReplayingMaker,
    clock: Callable[[], float] = lambda: 0.0,
) -> DeviceGraphs:
    attention = graph_runner("llama", None).attention
    graphs = DeviceGraphs(planned, attention, maker, SIZES, clock=clock)
    graphs.prepare()
    return graphs


def empty_forward(batch: InputBatch) -> Callable[[], ForwardOutput]:
    return lambda: ForwardOutput(torch.zeros(batch.num_rows, 3))


def test_what_waits_for_the_device_runs_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    def planned(batch: InputBatch) -> Callable[[], ForwardOutput]:
        value = torch.zeros(batch.num_rows, 3)
        return lambda: ForwardOutput(value + float(value.sum()))

    with caplog.at_level(logging.WARNING):
        graphs = prepared(planned, ReplayingMaker())
    assert "steps run without graphs" in caplog.text
    batch = batch_of([1])
    assert graphs.pad(batch) is batch


def test_capturing_ends_when_time_or_memory_does() -> None:
    seconds = iter(range(0, 10_000, 25))
    maker = ReplayingMaker()
    prepared(empty_forward, maker, lambda: float(next(seconds)))
    assert len(maker.graphs) == 2  # begun after 25 and 50 seconds, and none after 75
    maker = ReplayingMaker(num_allowed=3)
    graphs = prepared(empty_forward, maker)
    assert len(maker.graphs) == 3
    large = batch_of([9])
    assert graphs.pad(batch_of([1])).bucket == Bucket(1, 1)
    assert graphs.pad(large) is large


def test_graphs_that_cannot_be_had_are_refused_with_the_reason() -> None:
    attention = graph_runner("llama", None, backend="sdpa").attention
    assert graph_sizes(EngineConfig(), attention, 64) is None
    assert graph_sizes(EngineConfig(cuda_graph_rows=0), attention, 64) is None
    asked = EngineConfig(cuda_graph_rows=8)
    with pytest.raises(ValueError, match=r"cuda_graph_rows=8: .*CUDA devices only"):
        graph_sizes(asked, attention, 64)
    assert graph_sizes(asked, attention, 64, strict=False) is None


# --- buckets ---


def batch_of(rows: list[int]) -> InputBatch:
    requests = [
        RequestRows([7] * count, count, 3, (), range(12 * index, 12 * index + 12), num_logits=count)
        for index, count in enumerate(rows)
    ]
    return build_batch(requests, BLOCK_SIZE)


@given(st.integers(1, 300), st.integers(1, 80), st.lists(st.integers(1, 6), max_size=40))
def test_a_batch_goes_into_the_smallest_bucket_that_has_room(
    most_rows: int, most_requests: int, rows: list[int]
) -> None:
    rows = rows[:most_requests]
    buckets = make_buckets(most_rows, most_requests)
    assert list(buckets) == sorted(set(buckets))
    found = find_bucket(buckets, batch_of(rows))
    fit = [each for each in buckets if sum(rows) <= each[0] and len(rows) <= each[1]]
    assert found == (fit[0] if fit else None)
    # Only what is too large for all goes without.
    assert (found is None) == (sum(rows) > most_rows)


def test_a_few_requests_do_not_pay_for_many() -> None:
    buckets = make_buckets(64, 64)
    for rows, bucket in (([6] * 3, (24, 4)), ([2] * 9, (24, 16)), ([1] * 20, (24, 24))):
        assert find_bucket(buckets, batch_of(rows)) == bucket
    assert find_bucket(buckets, batch_of([40])) == (48, 1)
    assert make_buckets(0, 64) == ()


@given(st.lists(st.integers(1, 6), max_size=10), st.integers(0, 20))
def test_padding_leaves_the_batch_as_it_is_and_is_stored_nowhere(
    rows: list[int], further: int
) -> None:
    batch = batch_of(rows)
    own = [batch.token_ids, batch.positions, batch.slot_mapping, batch.logits_indices]
    before = copy.deepcopy(own)
    bucket = Bucket(batch.num_rows + further, len(rows))
    padded = pad_batch(batch, bucket)
    assert own == before
    columns = [padded.token_ids, padded.positions, padded.slot_mapping, padded.logits_indices]
    assert {len(column) for column in columns} == {bucket.num_rows}
    assert all(column[: len(mine)] == mine for column, mine in zip(columns, own, strict=True))
    assert set(padded.slot_mapping[batch.num_rows :]) <= {NO_SLOT}
    assert padded.requests is batch.requests
    assert padded.bucket == bucket


# --- choices ---


@ON_CPU
def test_tokens_are_chosen_within_a_graph() -> None:
    """Rows that ask for a token get one, from the logits that the graph leaves; padding asks for none."""
    maker = ReplayingMaker()
    with no_host(), patching_once():
        sizes = SIZES._replace(most_rows=8, most_requests=2)
        runner = graph_runner("llama", maker, sizes=sizes, chooses=True)
        found = []
        for base, temperatures in ((0, [0.0, 0.9, -1.0]), (3, [1.4]), (4, None), (5, [0.0] * 9)):
            count = 1 if temperatures is None else len(temperatures)
            rows = chunk(random_ids(1, 20), base, count, scattered_table(0, 12))
            batch = build_batch([rows], BLOCK_SIZE)
            asked = Choices.of_none(count)
            if temperatures is not None:
                keys, positions = [*range(5, 5 + count)], [*range(base, base + count)]
                batch.choices = asked = Choices(keys, positions, temperatures)
            output = runner.forward(batch)
            assert output.tokens is not None
            column = torch.tensor(asked.temperatures, dtype=torch.float64)
            noise = torch.tensor(asked.keys), torch.tensor(asked.positions)
            expected = choose_rows(output.logits, *noise, column)
            assert torch.equal(output.tokens, expected)
            found.append((output.tokens, expected))
    assert maker.num_replays == 3  # nine rows fit no graph
    assert all(torch.equal(*each) for each in found)  # and later forwards leave them alone


@ON_CPU
def test_who_asks_for_no_tokens_has_no_launch_for_them() -> None:
    with no_host():
        maker = ReplayingMaker()
        runner = graph_runner("llama", maker)
        rows = chunk(random_ids(1, 20), 0, 3, scattered_table(0, 12))
        assert runner.forward(build_batch([rows], BLOCK_SIZE)).tokens is None
    assert not {"score", "choose"} & {call[0] for graph in maker.graphs for call in graph._calls}
