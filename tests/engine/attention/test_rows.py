"""Every backend gives a row a plain sum over the keys that it may see and, where determinism is exact,
the same bits in any company. Without a GPU Triton's programs are interpreted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.backend import AttentionNeeds, AttentionOptions, KVShape, choose_backend
from engine.attention.triton import TritonAttention
from engine.batch import InputBuffers, RequestRows, build_batch
from kvpool.store import KVStore
from worlds.attended import PLAIN, TOLERANCE, World, chains, parts, world_of
from worlds.interpreted import patching_once
from worlds.lanes import examples
from worlds.threads import threads
from worlds.tiny_models import path_to

TREE = (-1, -1, 0, 1, 1, 3, 2)
LARGE_TREE = (*TREE, 5, 5, 7, 9, -1, 11, 11, 12, 14, 15, 16, 17, 18, 19, 20)
FLOAT8 = torch.float8_e4m3fn


class Scale(NamedTuple):
    """Sizes that show a backend's seams: ``bases`` of texts that begin and end about its chunks."""

    shapes: list[tuple[int, int, int, int]]
    windows: list[int | None]
    sizes: list[int]
    bases: list[tuple[int, int]]
    dtypes: list[torch.dtype]


SHORT = [(0, 10), (28, 34), (60, 72)]
SCALES = {
    "paged": Scale(
        [(4, 2, 64, 64), (3, 3, 16, 48), (10, 2, 128, 80), (70, 1, 32, 16), (4, 2, 24, 12)],
        [None, None, 1, 7, 100, 300],
        [16, 32, 4, 5, 24],
        [(0, 40), (240, 270), (500, 620)],
        list(TOLERANCE),
    ),
    # More programs run for the last two shapes, so that they are drawn less often.
    "triton": Scale(
        [*[(4, 2, 16, 16), (5, 1, 40, 20), (2, 1, 16, 24)] * 3, (3, 3, 16, 24), (70, 1, 16, 8)],
        [None, None, 1, 7, 40],
        [16, 5],
        SHORT,
        list(TOLERANCE),
    ),
    "sdpa": Scale(
        [(4, 2, 8, 4), (5, 1, 40, 20), (3, 3, 16, 24)],
        [None, None, 1, 7, 40],
        [16, 5],
        SHORT,
        [*TOLERANCE, torch.float64],
    ),
}


@pytest.fixture(autouse=True, scope="module")
def short_chunks() -> Iterator[None]:
    """So that texts of a toy's size have several."""
    with pytest.MonkeyPatch.context() as patch, patching_once():
        patch.setattr(TritonAttention, "chunk", 32)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("backend", SCALES)
@settings(deadline=None, max_examples=examples(25, fuzzed=2500))
@given(data=st.data())
def test_every_row_gets_what_a_plain_sum_over_its_text_gives(backend: str, data: Any) -> None:
    scale = SCALES[backend]
    shape, dtype = (data.draw(st.sampled_from(each)) for each in (scale.shapes, scale.dtypes))
    mine = world_of(
        backend,
        *shape,
        dtype=dtype,
        size=data.draw(st.sampled_from(scale.sizes)),
        kv_dtype=data.draw(st.sampled_from([None, None, FLOAT8])),
        determinism=data.draw(st.sampled_from(["exact", "fast"])),
    )
    sinks = torch.linspace(-1, 2, shape[0]).to(mine.needs.device, dtype)
    options = AttentionOptions(
        0.2,
        data.draw(st.sampled_from(scale.windows)),
        data.draw(st.sampled_from([None, None, 3.0])),
        sinks if data.draw(st.booleans()) else None,
        sees_block=data.draw(st.booleans()),
    )
    asked, most = data.draw(parts(scale.bases)), TOLERANCE.get(dtype, 5e-5)
    first_keys = [
        data.draw(st.one_of(st.just(0), st.integers(0, min(base, 2)), st.integers(0, base)))
        for _, base, _, _ in asked
    ]
    if backend == "sdpa":
        most *= 2  # scaled queries and weights are rounded to their type
    got_rows = mine.step(asked, options, first_keys=first_keys)
    for got, part, first_key in zip(got_rows, asked, first_keys, strict=True):
        expected = mine.expected(part, options, first_key)
        torch.testing.assert_close(got.double(), expected, atol=most, rtol=most)


@pytest.mark.parametrize("first_key", [0, 35])
@pytest.mark.parametrize("stored", [1, 4])
@pytest.mark.parametrize("backend", SCALES)
def test_nodes_that_steps_before_have_stored_are_seen(
    backend: str, stored: int, first_key: int
) -> None:
    mine, options, part = (
        world_of(backend, 4, 2, 16, 16),
        replace(PLAIN, window=6),
        (0, 37, 0, TREE),
    )
    (whole,) = mine.step([part], options, first_keys=[first_key])
    expected = mine.expected(part, options, first_key)
    torch.testing.assert_close(whole.double(), expected, atol=5e-5, rtol=5e-5)
    (rest,) = mine.step([part], options, stored=stored, first_keys=[first_key])
    if backend == "sdpa":
        torch.testing.assert_close(rest, whole[stored:])
    else:
        assert torch.equal(rest, whole[stored:])


@pytest.mark.parametrize("sees_block", [False, True])
@pytest.mark.parametrize("backend", ["paged", "triton"])
def test_requests_of_every_kind_get_what_the_reference_gives_them(
    backend: str, sees_block: bool
) -> None:
    """Blocks and prompts of several tiles and chunks, trees, and first keys of some of them."""
    bases = (300, 700) if backend == "paged" else (40, 100)
    shape = (70, 1, 16, 16) if backend == "paged" else (4, 1, 16, 16)
    asked = [
        (0, bases[0], 16, ()),
        (1, bases[1], 1, TREE),
        (2, 1, bases[0], ()),
        (3, bases[0], 5, LARGE_TREE),
        (4, 0, 1, ()),
        (5, bases[1], 0, TREE),
    ]
    first_keys = [0, bases[0], 1, bases[0] - 9, 0, 1]
    for window in (None, 30):
        options = replace(PLAIN, window=window, sees_block=sees_block)
        got, expected = (
            world_of(name, *shape).step(asked, options, first_keys=first_keys)
            for name in (backend, "sdpa")
        )
        for rows, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(rows, wanted, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("backend", SCALES)
def test_a_row_at_the_first_key_sees_itself_alone(backend: str) -> None:
    mine = world_of(backend, 2, 1, 16, 16)
    for base in (0, 1, 16, 65):
        (got, _) = mine.step([(0, base, 3, ()), (1, 7, 2, TREE)], first_keys=[base, 0])
        torch.testing.assert_close(got[0], mine.rows(0, base + 1)[2][base].expand(2, -1))


@pytest.mark.parametrize("backend", SCALES)
def test_what_lies_before_the_first_key_leaves_no_trace(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, asked, first_keys = (
        world_of(backend, 4, 2, 16, 16),
        [(0, 40, 3, TREE), (1, 1, 9, ())],
        [33, 1],
    )
    before = mine.step(asked, first_keys=first_keys)
    plain = World.rows

    def others(self: World, number: int, length: int) -> list[torch.Tensor]:
        rows = plain(self, number, length)
        for each in rows[1:]:
            each[: first_keys[number]] = -900.0
        return rows

    monkeypatch.setattr(World, "rows", others)
    assert all(map(torch.equal, mine.step(asked, first_keys=first_keys), before))


@pytest.mark.parametrize("sees_block", [False, True])
@pytest.mark.parametrize(("backend", "first_key"), [("paged", 1), ("paged", 300), ("triton", 33)])
def test_rows_with_a_first_key_and_blocks_have_their_bits_in_any_company(
    backend: str, first_key: int, sees_block: bool
) -> None:
    base = 600 if backend == "paged" else 70
    mine = world_of(backend, 6, 2, 16, 32, dtype=torch.bfloat16)
    options, part = replace(PLAIN, window=400, sees_block=sees_block), (0, base, 16, ())
    with threads(2):
        (alone,) = mine.step([part], options, first_keys=[first_key])
    others = [(1, 3, 30, ()), part, (2, base, 1, TREE)]
    beside = mine.step(others, options, first_keys=[2, first_key, 0])[1]
    assert torch.equal(beside, alone)
    (single,) = mine.step([(0, base + 15, 1, ())], options, first_keys=[first_key])
    # The last row of a block sees what it sees alone.
    assert torch.equal(single[0], alone[15])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "dtype", "kv_dtype", "dims", "size"),
    [
        *(("paged", dtype, None, (32, 64), 16) for dtype in TOLERANCE),
        ("paged", torch.bfloat16, FLOAT8, (32, 64), 16),
        ("paged", torch.float32, None, (24, 20), 5),
        *(("triton", dtype, None, (16, 24), 16) for dtype in (torch.float32, torch.bfloat16)),
    ],
)
@pytest.mark.parametrize("window", [None, 40])
def test_a_row_has_its_bits_alone_in_chunks_in_trees_beside_others_and_in_any_number_of_threads(
    backend: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    dims: tuple[int, int],
    size: int,
    window: int | None,
) -> None:
    mine = world_of(backend, 6, 2, *dims, dtype=dtype, size=size, kv_dtype=kv_dtype)
    options = replace(PLAIN, window=window)
    is_long = backend == "paged"
    (whole,) = mine.step([(0, 0, 700 if is_long else 80, ())], options)
    for base in (0, 5, 31, 255, 256, 300, 511, 690) if is_long else (31, 64):
        with threads(2):
            (single,) = mine.step([(0, base, 1, ())], options)
        assert torch.equal(single[0], whole[base])
        far = (2, 600, 1, LARGE_TREE) if is_long else (2, 70, 1, TREE)
        beside = mine.step([(1, 3, 30, ()), (0, base, 9, ()), far], options)[1]
        assert torch.equal(beside, whole[base : base + 9])
        (drafted,) = mine.step([(0, base, 2, chains(6))], options)
        assert torch.equal(drafted, whole[base : base + 8])


@pytest.mark.parametrize(
    ("backend", "base"),
    [*(("paged", base) for base in (0, 7, 250, 255, 508)), *(("triton", b) for b in (7, 28, 62))],
)
def test_a_node_of_a_tree_has_the_bits_of_its_text(
    backend: str, base: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each path is written out as a text of its own. On Triton, chunks before the tree are its branches'
    together, from the second base on; it may hang over the end of a chunk."""
    tree = LARGE_TREE if backend == "paged" else TREE
    mine = world_of(backend, 4, 2, 16, 32, dtype=torch.bfloat16)
    (got,) = mine.step([(0, base, 3, tree)])
    rows, taken = mine.rows(0, base + 3 + len(tree)), list[int]()
    monkeypatch.setattr(World, "rows", lambda *told: [each[taken[: told[2]]] for each in rows])
    for node in range(len(tree)):
        taken[:] = [*range(base + 3), *(base + 3 + each for each in path_to(node, tree))]
        (alone,) = mine.step([(0, len(taken) - 1, 1, ())])
        assert torch.equal(got[3 + node], alone[0])


@pytest.mark.parametrize("backend", ["paged", "triton"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of what overflows
def test_what_one_request_overflows_does_not_reach_another(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = world_of(backend, 4, 2, 16, 16)
    (alone,) = mine.step([(0, 20, 5, ())])
    plain = World.rows

    def spoiled(self: World, number: int, length: int) -> list[torch.Tensor]:
        rows = plain(self, number, length)
        odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38])
        for each in rows if number else ():
            each[-5:, :, ::3] = odd[:, None, None]
        return rows

    monkeypatch.setattr(World, "rows", spoiled)
    first, second = mine.step([(1, 20, 5, TREE), (0, 20, 5, ())])
    assert torch.equal(second, alone)
    assert not first.isfinite().all()


@pytest.mark.parametrize("backend", ["paged", "triton"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [*((dtype, None) for dtype in TOLERANCE), (torch.bfloat16, FLOAT8), (torch.float32, FLOAT8)],
)
def test_new_rows_are_stored_as_torch_s_operations_store_them(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, backend: str
) -> None:
    """Finite, no key so large that a sum of products is not, and rounded as torch rounds."""
    edges = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 1e30, 0.0, -0.0])
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-12, 10, (504,), generator=generator)
    row = torch.cat([edges, torch.randn(504, generator=generator) * 2.0**exponents])
    halves = torch.arange(256) / 512  # ties among the smallest numbers of 8 bits
    device = world_of(backend, 1, 1, 16, 16).needs.device
    rows = torch.cat([row, halves, -halves]).to(device, dtype).view(4, 1, 256)
    planes = []
    for name in (backend, "sdpa"):
        needs = AttentionNeeds("fast", device, dtype, 4, [KVShape(1, 1, 256, 256)], kv_dtype)
        store = KVStore(num_blocks=4, device=device, **needs.store_sizes())
        batch = build_batch([RequestRows([0] * 4, 4, 0, (), [2], 4)], 4)
        inputs = InputBuffers(device, 16).fill(batch)
        plan = choose_backend(name, needs)(store, needs).plan(batch, inputs)
        plan.attend(0, torch.zeros_like(rows), rows, rows, PLAIN)
        planes.append((store.key[0].float(), store.value[0].float()))
    assert all(torch.equal(*pair) for pair in zip(*planes, strict=True))
    assert planes[0][0].isfinite().all()
