"""Attention by Triton's programs: every row against a plain sum over what it may see and against
torch's own kernels, and the same bits in any company. Without a GPU they run under Triton's
interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import work
from engine.attention.backend import (
    AttentionNeeds,
    AttentionOptions,
    KVShape,
    choose_backend,
)
from engine.attention.triton import TritonAttention
from engine.attention.work import Room, Work
from engine.batch import Bucket, InputBuffers, InputTensors, RequestRows, build_batch
from engine.config import Determinism
from kvpool.store import KVStore
from worlds.attended import PLAIN, TOLERANCE, Part, World, chains, parts
from worlds.interpreted import DEVICE, counting_loads, patching_once
from worlds.lanes import examples
from worlds.tiny_models import path_to

TREE = (-1, -1, 0, 1, 1, 3, 2)
CHUNK = 32
SHAPES = [*[(4, 2, 16, 16), (5, 1, 40, 20), (2, 1, 16, 24)] * 3, (3, 3, 16, 24), (70, 1, 16, 8)]
"""Heads, key heads, dimensions of keys and values. More programs run for the last two, so that they are
drawn less often."""


@pytest.fixture(autouse=True, scope="module")
def short_chunks() -> Iterator[None]:
    """So that texts of a toy's size have several."""
    with pytest.MonkeyPatch.context() as patch, patching_once():
        patch.setattr(TritonAttention, "chunk", CHUNK)
        yield


def world(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    determinism: Determinism = "exact",
    size: int = 16,
    kv_dtype: torch.dtype | None = None,
    backend: str = "triton",
) -> World:
    heads, kv_heads, key_dim, value_dim = shape
    return World(
        heads, kv_heads, key_dim, value_dim, dtype, size, kv_dtype, backend, determinism, DEVICE
    )


def programs(backend: TritonAttention, count: int) -> None:
    """As on a device that so many keep busy."""
    backend.cut = replace(backend.cut, num_programs=count)


@settings(deadline=None, max_examples=examples(25, fuzzed=2500))
@given(
    asked=parts(),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(list(TOLERANCE)),
    kv_dtype=st.sampled_from([None, None, torch.float8_e4m3fn]),
    window=st.sampled_from([None, None, 1, 7, 40]),
    softcap=st.sampled_from([None, None, 3.0]),
    has_sinks=st.booleans(),
    size=st.sampled_from([16, 5]),
    determinism=st.sampled_from(["exact", "fast", "fast"]),
)
def test_every_row_gets_what_a_plain_sum_over_its_text_gives(
    asked: list[Part],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    size: int,
    determinism: Determinism,
) -> None:
    made: dict[str, Any] = {"dtype": dtype, "size": size, "kv_dtype": kv_dtype}
    mine = world(*shape, **made, determinism=determinism)
    sinks = torch.linspace(-1, 2, shape[0]).to(DEVICE, dtype) if has_sinks else None
    options = AttentionOptions(0.2, window, softcap, sinks)
    reference = world(*shape, **made, determinism="fast", backend="sdpa").step(asked, options)
    plain = options if sinks is None else replace(options, sinks=sinks.cpu())
    for got, part, theirs in zip(mine.step(asked, options), asked, reference, strict=True):
        close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
        torch.testing.assert_close(got.double(), mine.expected(part, plain), **close)
        close = {name: 2 * most for name, most in close.items()}
        torch.testing.assert_close(got, theirs, **close)


@pytest.mark.parametrize("stored", [1, 4])
@pytest.mark.parametrize("determinism", ["exact", "fast"])
def test_nodes_that_steps_before_have_stored_are_seen(
    stored: int, determinism: Determinism
) -> None:
    mine = world(4, 2, 16, 16, determinism=determinism)
    (whole,) = mine.step([(0, 37, 0, TREE)])
    (rest,) = mine.step([(0, 37, 0, TREE)], stored=stored)
    assert torch.equal(rest, whole[stored:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 40])
def test_a_row_has_its_bits_alone_in_chunks_in_trees_and_beside_others(
    dtype: torch.dtype, window: int | None
) -> None:
    mine = world(3, 1, 16, 24, dtype=dtype)
    options = replace(PLAIN, window=window)
    (whole,) = mine.step([(0, 0, 80, ())], options)
    for base in (31, 64):
        (single,) = mine.step([(0, base, 1, ())], options)
        assert torch.equal(single[0], whole[base])
        beside = mine.step([(1, 3, 12, ()), (0, base, 4, ()), (2, 70, 1, TREE)], options)[1]
        assert torch.equal(beside, whole[base : base + 4])
        (drafted,) = mine.step([(0, base, 2, chains(6))], options)
        assert torch.equal(drafted, whole[base : base + 8])


@pytest.mark.parametrize("base", [7, 28, 62])
def test_a_node_of_a_tree_has_the_bits_of_its_text(base: int) -> None:
    """Each path is written out as a text of its own. Chunks before the tree are its branches' together,
    from the second base on, where there is memory for their sums; it may hang over the end of a chunk."""
    mine = world(2, 1, 16, 16)
    (got,) = mine.step([(0, base, 3, TREE)])
    rows = mine.rows(0, base + 3 + len(TREE))

    class Path(World):
        def rows(self, number: int, length: int) -> list[torch.Tensor]:
            del number
            return [each[taken[:length]] for each in rows]

    for node in range(len(TREE)):
        taken = [*range(base + 3), *(base + 3 + each for each in path_to(node, TREE))]
        path = Path(2, 1, 16, 16, torch.float32, backend="triton", device=DEVICE)
        (alone,) = path.step([(0, len(taken) - 1, 1, ())])
        assert torch.equal(got[3 + node], alone[0])


@pytest.mark.parametrize("determinism", ["exact", "fast"])
def test_how_work_is_divided_leaves_no_trace(determinism: Determinism) -> None:
    """Several programs for a text's chunks, one, and what there is memory for."""
    mine = world(2, 1, 16, 16, determinism=determinism)
    asked = [(0, 70, 1, TREE), (1, 90, 2, ()), (2, 5, 3, chains(2))]
    outputs, launches = [], set()
    for count, most in ((1, 0), (4, 4096), (64, 4096), (64, 20)):
        store, batch, rows = mine.lay(asked)
        backend: Any = mine.over(store)
        backend.cut = replace(backend.cut, num_programs=count, max_partials=most)
        plan = backend.plan(batch, InputBuffers(DEVICE, 64).fill(batch))
        launches.add(plan.launch)
        outputs.append(plan.attend(0, *rows, replace(PLAIN, window=50)).cpu())
    assert len(launches) >= 3
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of what overflows
def test_what_one_request_overflows_does_not_reach_another(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = world(4, 2, 16, 16)
    (alone,) = mine.step([(0, 20, 5, ())])
    plain = World.rows

    def spoiled(self: World, number: int, length: int) -> list[torch.Tensor]:
        rows = plain(self, number, length)
        if number:
            for each in rows:
                each[-5:, :, ::3] = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38])[
                    :, None, None
                ]
        return rows

    monkeypatch.setattr(World, "rows", spoiled)
    first, second = mine.step([(1, 20, 5, TREE), (0, 20, 5, ())])
    assert torch.equal(second, alone)
    assert not first.isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, None),
        (torch.float16, None),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float32, torch.float8_e4m3fn),
    ],
)
def test_new_rows_are_stored_as_every_backend_stores_them(
    dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    """Finite, no key so large that a sum of products is not, and rounded as torch rounds."""
    edges = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 1e30, 0.0, -0.0])
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-12, 10, (504,), generator=generator)
    row = torch.cat([edges, torch.randn(504, generator=generator) * 2.0**exponents])
    halves = torch.arange(256) / 512  # ties among the smallest numbers of 8 bits
    row = torch.cat([row, halves, -halves]).to(DEVICE, dtype)
    rows = row.view(4, 1, 256)
    stores = []
    for name in ("triton", "sdpa"):
        shape = KVShape(1, 1, 256, 256)
        needs = AttentionNeeds("fast", DEVICE, dtype, 4, [shape], kv_dtype)
        store = KVStore(num_blocks=4, device=DEVICE, **needs.store_sizes())
        backend = choose_backend(name, needs)(store, needs)
        batch = build_batch([RequestRows([0] * 4, 4, 0, (), [2], 4)], 4)
        plan = backend.plan(batch, InputBuffers(DEVICE, 16).fill(batch))
        plan.attend(0, torch.zeros_like(rows), rows, rows, PLAIN)
        stores.append(store)
    assert torch.equal(stores[0].key[0].float(), stores[1].key[0].float())
    assert torch.equal(stores[0].value[0].float(), stores[1].value[0].float())
    assert stores[0].key[0].float().isfinite().all()


# --- launches of fixed sizes ---


@pytest.mark.parametrize("determinism", ["exact", "fast"])
def test_steps_planned_into_a_room_differ_in_nothing_but_what_the_buffer_holds(
    determinism: Determinism,
) -> None:
    """Padded with rows of slot -1, which are stored nowhere and get zeros."""
    mine = world(4, 2, 16, 16, determinism=determinism)
    asked = [
        [(0, 70, 1, TREE), (1, 90, 1, ())],
        [(3, 9, 2, chains(3))],
        [(0, 33, 1, TREE[:3]), (1, 5, 4, ()), (2, 40, 1, ())],
    ]
    bucket, launches = Bucket(14, 3), []
    padded = bucket.num_rows
    store, batch, rows = mine.lay(asked[0])
    backend: Any = mine.over(store)
    programs(backend, 16)
    backend.reserve(bucket, 128, 8)
    addresses = backend.addresses
    for parts_ in asked:
        store, batch, rows = mine.lay(parts_)
        for plane, held in zip((backend.store.key[0], backend.store.value[0]),
                               (store.key[0], store.value[0]), strict=True):  # fmt: skip
            plane.copy_(held)
        before = backend.store.key[0].clone()
        slots = torch.tensor(batch.slot_mapping + [-1] * (padded - batch.num_rows)).to(DEVICE)
        inputs = InputTensors(slots, slots, slots, slots)
        plan = backend.plan(replace(batch, bucket=bucket), inputs)
        launches.append((plan.launch, plan.ints.data_ptr(), backend.addresses))
        filled = [
            torch.cat([each, each.new_full((padded - len(each), *each.shape[1:]), torch.nan)])
            for each in rows
        ]
        output = plan.attend(0, *filled, PLAIN)
        expected = torch.cat(mine.step(parts_))
        assert torch.equal(output[: batch.num_rows].cpu(), expected)
        assert not output[batch.num_rows :].any()
        written = (backend.store.key[0] != before).any(dim=(1, 2)).nonzero().flatten().tolist()
        assert written == sorted(batch.slot_mapping)
    assert len(set(launches)) == 1
    assert backend.addresses == addresses


def test_a_step_that_does_not_fit_into_its_room_is_refused() -> None:
    mine = world(4, 2, 16, 16)
    store, batch, _ = mine.lay([(0, 70, 1, TREE), (1, 90, 30, ())])
    backend: Any = mine.over(store)
    room = Room.for_steps(backend.cut, 38, num_requests=2, num_keys=128, num_nodes=8)
    assert Work(batch.requests, backend.cut, room).num_items == room.num_items
    for less in (replace(room, num_items=2), replace(room, num_ints=9)):
        with pytest.raises(ValueError, match="does not fit into the room"):
            Work(batch.requests, backend.cut, less)


def test_a_larger_step_leaves_what_was_reserved_where_it_is() -> None:
    mine = world(4, 2, 16, 16)
    store, batch, _ = mine.lay([(0, 70, 1, TREE), (1, 90, 30, ())])
    backend: Any = mine.over(store)
    bucket = Bucket(batch.num_rows, 2)
    backend.reserve(bucket, 128, 8)
    addresses, kept = backend.addresses, len(backend._ints._pieces[0].tensor)
    inputs = InputBuffers(DEVICE, 64).fill(batch)
    table = list(range(8)) * kept
    longer = build_batch([RequestRows([0] * 4, 4, 0, (), table, 4)], 16)
    far = [replace(each, base=16 * kept) for each in longer.requests]
    larger = backend.plan(build_batch(far, 16), InputBuffers(DEVICE, 64).fill(longer))
    assert larger.ints.data_ptr() not in addresses
    again = backend.plan(replace(batch, bucket=bucket), inputs)
    assert again.ints.data_ptr() == addresses[0]
    assert backend.addresses == addresses


# --- what is read ---


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter counts")
@pytest.mark.parametrize("parents", [(), chains(4), TREE])
def test_a_step_reads_a_request_s_keys_and_values_once(parents: tuple[int, ...]) -> None:
    mine = world(4, 2, 16, 24, dtype=torch.bfloat16, determinism="fast")
    asked = [(0, 70, 1, parents), (1, 33, 1, parents)]
    store, batch, rows = mine.lay(asked)
    backend: Any = mine.over(store)
    plan = backend.plan(batch, InputBuffers(DEVICE, 64).fill(batch))
    with counting_loads(backend.planes[0]) as counted:
        plan.attend(0, *rows, PLAIN)
    num_keys = sum(request.end for request in batch.requests)
    assert counted == [num_keys * 2 * (16 + 24) * 2]


# --- who it serves ---


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"shapes": [KVShape(2, 1, 320, 16)]}, "at most 256 dimensions, not 320"),
        ({"shapes": [KVShape(200, 1, 16, 16)]}, "at most 128 heads share a key head, not 200"),
        ({"dtype": torch.float64}, "knows no torch.float64"),
        ({"kv_dtype": torch.float8_e5m2}, "knows no torch.float8_e5m2"),
        ({"device": torch.device("meta")}, "it runs on cpu, cuda, not on meta"),
    ],
)
def test_what_it_does_not_serve_is_refused_with_the_reason(
    changed: dict[str, Any], reason: str
) -> None:
    needs = replace(world(4, 2, 16, 16).needs, **changed)
    with pytest.raises(ValueError, match=reason):
        choose_backend("triton", needs)


def test_on_a_cpu_it_is_for_those_who_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = replace(world(4, 2, 16, 16).needs, device=torch.device("cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_backend("triton", needs).name == "triton"
    assert choose_backend(None, needs).name == "paged"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="interpreter alone: set TRITON_INTERPRET=1"):
        choose_backend("triton", needs)


def test_without_triton_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kernels.triton.find_spec", lambda _: None)
    with pytest.raises(ValueError, match="it needs triton, which is not installed"):
        choose_backend("triton", world(4, 2, 16, 16).needs)


def test_records_have_the_sizes_that_the_programs_read() -> None:
    from engine.kernels.triton import ragged_attention as read

    assert [each.value for each in (read.ITEM_INTS, read.ROW_INTS, read.JOIN_INTS)] == [
        work.ITEM_INTS,
        work.ROW_INTS,
        work.JOIN_INTS,
    ]
