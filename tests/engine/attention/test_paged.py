"""Attention that reads the block store in place: every row against a plain sum over what it may see, and
the same bits in any company."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.backend import AttentionNeeds, AttentionOptions, KVShape, choose_backend
from engine.batch import InputBuffers, RequestRows, build_batch
from kvpool.store import KVStore
from worlds.attended import PLAIN, TOLERANCE, World, chains
from worlds.lanes import examples
from worlds.threads import threads
from worlds.tiny_models import path_to

CPU = torch.device("cpu")
TREE = (-1, -1, 0, 1, 1, 3, 2, 5, 5, 7, 9, -1, 11, 11, 12, 14, 15, 16, 17, 18, 19, 20)


@st.composite
def parts(draw: Any) -> list[tuple[int, int, int, tuple[int, ...]]]:
    found = []
    for text in range(draw(st.integers(1, 4))):
        base = draw(st.one_of(st.integers(0, 40), st.integers(240, 270), st.integers(500, 620)))
        num_nodes = draw(st.sampled_from([0, 0, 1, 5, 20]))
        parents = draw(
            st.one_of(
                st.just(chains(num_nodes)),
                st.tuples(*(st.integers(-1, node - 1) for node in range(num_nodes))),
            )
        )
        found.append((text, base, draw(st.sampled_from([1, 1, 2, 19])), parents))
    return found


@settings(deadline=None, max_examples=examples(25))
@given(
    asked=parts(),
    shape=st.sampled_from(
        [(4, 2, 64, 64), (3, 3, 16, 48), (10, 2, 128, 80), (70, 1, 32, 16), (4, 2, 24, 12)]
    ),
    dtype=st.sampled_from(list(TOLERANCE)),
    kv_dtype=st.sampled_from([None, None, torch.float8_e4m3fn]),
    window=st.sampled_from([None, None, 1, 7, 100, 300]),
    softcap=st.sampled_from([None, None, 3.0]),
    has_sinks=st.booleans(),
    size=st.sampled_from([16, 32, 4, 5, 24]),
)
def test_every_row_gets_what_a_plain_sum_over_its_text_gives(
    asked: list[tuple[int, int, int, tuple[int, ...]]],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    size: int,
) -> None:
    world = World(*shape, dtype, size, kv_dtype)
    sinks = torch.linspace(-1, 2, shape[0]).to(dtype) if has_sinks else None
    options = AttentionOptions(0.2, window, softcap, sinks)
    for got, part in zip(world.step(asked, options), asked, strict=True):
        torch.testing.assert_close(
            got.double(),
            world.expected(part, options),
            atol=TOLERANCE[dtype],
            rtol=TOLERANCE[dtype],
        )


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "dims", "size"),
    [
        *((dtype, None, (32, 64), 16) for dtype in TOLERANCE),
        (torch.bfloat16, torch.float8_e4m3fn, (32, 64), 16),
        (torch.float32, None, (24, 20), 5),
    ],
)
@pytest.mark.parametrize("window", [None, 40])
def test_a_row_has_its_bits_alone_in_chunks_in_trees_beside_others_and_in_any_number_of_threads(
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    dims: tuple[int, int],
    size: int,
    window: int | None,
) -> None:
    world = World(6, 2, *dims, dtype, size, kv_dtype)
    options = replace(PLAIN, window=window)
    (whole,) = world.step([(0, 0, 700, ())], options)
    for base in (0, 5, 31, 255, 256, 300, 511, 690):
        with threads(2):
            (single,) = world.step([(0, base, 1, ())], options)
        assert torch.equal(single[0], whole[base])
        beside = world.step([(1, 3, 30, ()), (0, base, 9, ()), (2, 600, 1, TREE)], options)[1]
        assert torch.equal(beside, whole[base : base + 9])
        (drafted,) = world.step([(0, base, 2, chains(6))], options)
        assert torch.equal(drafted, whole[base : base + 8])


@pytest.mark.parametrize("base", [0, 7, 250, 255, 508])
def test_a_node_of_a_tree_has_the_bits_of_its_text(base: int) -> None:
    """Each path is written out as a text of its own."""
    world = World(4, 2, 32, 32, torch.bfloat16)
    (got,) = world.step([(0, base, 3, TREE)])
    rows = world.rows(0, base + 3 + len(TREE))

    class Path(World):
        def rows(self, number: int, length: int) -> list[torch.Tensor]:
            del number
            return [each[taken[:length]] for each in rows]

    for node in range(len(TREE)):
        taken = [*range(base + 3), *(base + 3 + each for each in path_to(node, TREE))]
        (alone,) = Path(4, 2, 32, 32, torch.bfloat16).step([(0, len(taken) - 1, 1, ())])
        assert torch.equal(got[3 + node], alone[0])


def test_blocks_of_every_size_give_the_same_bits() -> None:
    """Keys that lie together are read in place, others slot by slot."""
    asked = [(0, 300, 3, TREE), (1, 41, 2, chains(4))]
    outputs = [
        torch.cat(World(4, 2, 24, 32, torch.bfloat16, size).step(asked)) for size in (16, 48, 7, 24)
    ]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("stored", [1, 4, 9])
def test_nodes_that_steps_before_have_stored_are_seen(stored: int) -> None:
    world = World(4, 2, 32, 32, torch.float32)
    (whole,) = world.step([(0, 37, 0, TREE)])
    (rest,) = world.step([(0, 37, 0, TREE)], stored=stored)
    assert torch.equal(rest, whole[stored:])


def test_long_texts_of_few_requests_are_divided_among_threads_without_a_trace() -> None:
    world = World(2, 1, 64, 64, torch.float32)
    asked = [(0, 1000, 1, ())]
    with threads(1):
        (one,) = world.step(asked)
    for count in (2, 3):
        with threads(count):
            (divided,) = world.step(asked)
        assert torch.equal(divided, one)
    torch.testing.assert_close(one.double(), world.expected(asked[0], PLAIN), atol=5e-5, rtol=5e-5)


def test_what_one_request_overflows_does_not_reach_another(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(4, 2, 16, 16, torch.float32)
    (alone,) = world.step([(0, 20, 5, ())])
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
    first, second = world.step([(1, 20, 5, TREE), (0, 20, 5, ())])
    assert torch.equal(second, alone)
    assert not first.isfinite().all()


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_new_rows_are_stored_as_every_backend_stores_them(kv_dtype: torch.dtype) -> None:
    """Finite, and no key so large that a sum of products is not."""
    stores = []
    for name in ("paged", "sdpa"):
        store = KVStore([(2, 16, 16)], 4, 16, kv_dtype, CPU)
        needs = AttentionNeeds("fast", CPU, torch.bfloat16, 16, [KVShape(4, 2, 16, 16)], kv_dtype)
        backend = choose_backend(name, needs)(store, needs)
        batch = build_batch([RequestRows([0] * 6, 6, 0, (), [2], 6)], 16)
        row = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf, 3e38, -3e38]).bfloat16()
        rows = row[:, None, None].expand(6, 2, 16)
        plan = backend.plan(batch, InputBuffers(CPU, 16).fill(batch))
        plan.attend(0, torch.zeros(6, 4, 16).bfloat16(), rows, rows, PLAIN)
        stores.append(store)
    assert torch.equal(stores[0].key[0].float(), stores[1].key[0].float())
    assert torch.equal(stores[0].value[0].float(), stores[1].value[0].float())
    assert stores[0].key[0].float().isfinite().all()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dtype": torch.float64}, "knows no torch.float64"),
        ({"kv_dtype": torch.float8_e5m2}, "knows no torch.float8_e5m2"),
        ({"dtype": torch.float8_e4m3fn}, "knows no torch.float8_e4m3fn"),
    ],
)
def test_types_that_it_does_not_know_are_refused(changed: dict[str, Any], reason: str) -> None:
    needs = replace(World(4, 2, 16, 16, torch.float32).needs, **changed)
    with pytest.raises(ValueError, match=reason):
        choose_backend("paged", needs)
    with pytest.raises(ValueError, match=f"{reason}.*sdpa: it is for determinism fast"):
        choose_backend(None, needs)
