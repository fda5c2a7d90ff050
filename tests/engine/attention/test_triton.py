"""Attention by Triton's programs: how work is divided and launched, what is read, and who is served.
Without a GPU they run under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from engine.attention import work
from engine.attention.backend import KVShape, choose_backend
from engine.attention.triton import TritonAttention
from engine.attention.work import Room, Work
from engine.batch import Bucket, InputBuffers, InputTensors, RequestRows, build_batch
from engine.request.info import Determinism
from worlds.attended import PLAIN, chains, world_of
from worlds.interpreted import DEVICE, counting_loads, patching_once

TREE = (-1, -1, 0, 1, 1, 3, 2)
CHUNK = 32


@pytest.fixture(autouse=True, scope="module")
def short_chunks() -> Iterator[None]:
    """So that texts of a toy's size have several."""
    with pytest.MonkeyPatch.context() as patch, patching_once():
        patch.setattr(TritonAttention, "chunk", CHUNK)
        yield


world = partial(world_of, "triton")


def programs(backend: TritonAttention, count: int) -> None:
    """As on a device that so many keep busy."""
    backend.cut = replace(backend.cut, num_programs=count)


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
        launches.add(plan.told[False].launch)
        outputs.append(plan.attend(0, *rows, replace(PLAIN, window=50)).cpu())
    assert len(launches) >= 3
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])


@pytest.mark.parametrize("determinism", ["exact", "fast"])
def test_rows_with_longer_chunks_have_the_same_bits_in_any_company(
    determinism: Determinism, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 32 keys up to 64, of 64 up to 128 and then of 128: of a prompt in one go, of its rows one
    by one, and of rows in draft trees beside strangers."""
    monkeypatch.setattr(TritonAttention, "most_chunks", 2)
    monkeypatch.setattr(TritonAttention, "longest_chunk", 128)
    mine = world(2, 1, 16, 16, determinism=determinism)
    whole = mine.step([(0, 50, 95, ())])[0]
    told = torch.cat([mine.expected((0, 50, 95, ()), PLAIN)])
    assert torch.allclose(whole.double(), told.double(), atol=1e-4)
    for base in (50, 63, 64, 90, 126, 127, 128, 140):
        alone = mine.step([(0, base, 1, ())])[0]
        drafted = mine.step([(1, 90, 2, TREE), (0, base, 1, chains(4)), (2, 5, 3, chains(2))])[1]
        branched = mine.step([(0, base, 1, (-1, -1, 0, 0, 2))])[0]
        assert torch.equal(alone[0], whole[base - 50])
        assert torch.equal(drafted, whole[base - 50 : base - 45])
        # The first node's branch is the text's own, by its first child.
        assert torch.equal(branched[0], alone[0])
        assert torch.equal(branched[1], drafted[1])


# --- launches of fixed sizes ---


@pytest.mark.parametrize("sees_block", [False, True])
@pytest.mark.parametrize("determinism", ["exact", "fast"])
def test_steps_planned_into_a_room_differ_in_nothing_but_what_the_buffer_holds(
    determinism: Determinism, sees_block: bool
) -> None:
    """Padded with rows of slot -1, which are stored nowhere and get zeros. The first plan's launches are
    run again for later steps, which are only planned, as a graph's are."""
    mine, options = (
        world(4, 2, 16, 16, determinism=determinism),
        replace(PLAIN, sees_block=sees_block),
    )
    asked = [
        [(0, 70, 1, TREE), (1, 90, 1, ())],
        [(3, 9, 2, chains(3))],
        [(0, 33, 1, TREE[:3]), (1, 5, 4, ()), (2, 40, 1, ())],
        [(0, 60, 13, ())],
    ]
    bucket, launches, captured = Bucket(14, 3), [], None
    padded = bucket.num_rows
    slots = torch.empty(padded, dtype=torch.long, device=DEVICE)
    store, batch, rows = mine.lay(asked[0])
    backend: Any = mine.over(store)
    programs(backend, 16)
    backend.reserve(bucket, 128, 8)
    addresses = backend.addresses
    for number, parts_ in enumerate(asked):
        first_keys = [5 * number, 0, 39][: len(parts_)]
        store, batch, rows = mine.lay(parts_, first_keys=first_keys)
        for plane, held in zip((backend.store.key[0], backend.store.value[0]),
                               (store.key[0], store.value[0]), strict=True):  # fmt: skip
            plane.copy_(held)
        before = backend.store.key[0].clone()
        slots.copy_(torch.tensor(batch.slot_mapping + [-1] * (padded - batch.num_rows)))
        inputs = InputTensors(*[slots] * 4, *[slots[:0]] * 5)
        plan = backend.plan(replace(batch, bucket=bucket), inputs)
        captured = captured or plan
        filled = [
            torch.cat([each, each.new_full((padded - len(each), *each.shape[1:]), torch.nan)])
            for each in rows
        ]
        output = captured.attend(0, *filled, options)
        told = plan.told[sees_block]
        launches.append((told.launch, told.ints.data_ptr(), backend.addresses))
        expected = torch.cat(mine.step(parts_, options, first_keys=first_keys))
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
    addresses, kept = backend.addresses, len(backend._ints[False].reserved)
    inputs = InputBuffers(DEVICE, 64).fill(batch)
    table = list(range(8)) * kept
    longer = build_batch([RequestRows([0] * 4, 4, 0, (), table, 4)], 16)
    far = [replace(each, base=16 * kept) for each in longer.requests]
    larger = backend.plan(build_batch(far, 16), InputBuffers(DEVICE, 64).fill(longer))
    assert larger.told[False].ints.data_ptr() not in addresses
    again = backend.plan(replace(batch, bucket=bucket), inputs)
    assert again.told[False].ints.data_ptr() == addresses[0]
    assert backend.addresses == addresses


# --- what is read ---


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter counts")
@pytest.mark.parametrize("parents", [(), chains(4)])
def test_a_step_reads_a_request_s_keys_and_values_once(parents: tuple[int, ...]) -> None:
    mine = world(4, 2, 16, 24, dtype=torch.bfloat16, determinism="fast")
    asked = [(0, 70, 1, parents), (1, 33, 1, parents)]
    store, batch, rows = mine.lay(asked)
    backend: Any = mine.over(store)
    plan = backend.plan(batch, InputBuffers(DEVICE, 64).fill(batch))
    with counting_loads(backend.store.planes[0]) as counted:
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
