"""Attention over the block store: every row against a plain sum over what it may see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.backend import (
    AttentionNeeds,
    AttentionOptions,
    KVShape,
    slipstream_attention,
)
from engine.attention.exact import (
    ExactAttention,
    ExactCalls,
    bmm_calls,
    exact_calls,
)
from engine.attention.sdpa import NUM_ROWS_ALONE, CallShapes, SdpaAttention, SdpaPlan
from engine.batch import InputBatch, InputBuffers, RequestRows, build_batch
from kvpool.store import KVStore
from worlds.lanes import examples
from worlds.tiny_models import path_to, scattered_table

torch.set_num_threads(1)

SIZE, NUM_BLOCKS = 16, 160
KV_HEADS, HEADS, DIM_K, DIM_V = 2, 4, 8, 4
CPU = torch.device("cpu")
PLAIN = AttentionOptions(None, None, None, None)
MASKED = CallShapes(fused=True)
FREE = CallShapes(fused=False)
EVERYTHING = AttentionOptions(0.6, 5, 2.0, torch.tensor([1.5, -0.5, 0.3, 2.0]))
KEYS = 512
TREE = (-1, -1, 0, 1, 1, 3, 2, 5, 5, 7, 9)


@dataclass(eq=False)
class Text:
    """A request's past, drawn at random: the queries, keys and values of its rows so far."""

    query: torch.Tensor  # [num_tokens, HEADS, DIM_K]
    key: torch.Tensor  # [num_tokens, KV_HEADS, DIM_K]
    value: torch.Tensor  # [num_tokens, KV_HEADS, DIM_V]
    request: RequestRows


def draw(
    seed: int,
    base: int,
    num_known: int,
    parents: Sequence[int] = (),
    table: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Text:
    """A request in the middle of its life; its blocks are its own, 10 of them from ``10 * seed``."""
    num_rows = num_known + len(parents)
    generator = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, DIM_K), (KV_HEADS, DIM_K), (KV_HEADS, DIM_V))
    # Times 2, so that weights are uneven.
    rows = [
        (2 * torch.randn(base + num_rows, *shape, generator=generator)).to(dtype)
        for shape in shapes
    ]
    if table is None:
        needed = -(-(base + num_rows) // SIZE)
        table = scattered_table(seed, needed, first=10 * seed, among=max(needed, 10))
    return Text(*rows, RequestRows([0] * num_rows, num_known, base, parents, table, num_rows))


def fill(store: KVStore, text: Text) -> None:
    """Write the past of a request, as earlier steps would have."""
    base = text.request.base
    if base:
        past = RequestRows([0] * base, base, 0, (), text.request.block_table, 0)
        slots = torch.tensor(build_batch([past], SIZE).slot_mapping)
        store.write(0, slots, text.key[:base], text.value[:base])


def rows_of(*requests: RequestRows) -> InputBatch:
    return build_batch(requests, SIZE)


def planned(
    batch: InputBatch, calls: CallShapes, exact: bool, store: KVStore | None = None
) -> SdpaPlan:
    """A step with calls of the given shapes, whatever this machine's probe says."""
    store = store or KVStore(1, NUM_BLOCKS, SIZE, KV_HEADS, DIM_K, DIM_V, torch.float32, CPU)
    needs = AttentionNeeds(
        "exact" if exact else "fast",
        CPU,
        store.dtype,
        SIZE,
        [KVShape(HEADS, KV_HEADS, DIM_K, DIM_V)],
    )
    backend = (ExactAttention if exact else SdpaAttention)(store, needs)
    backend.calls = calls
    return backend.plan(batch, InputBuffers(CPU, 256).fill(batch))


def exact_calls_of(shape: KVShape, dtype: torch.dtype) -> ExactCalls:
    return exact_calls(AttentionNeeds("exact", CPU, dtype, SIZE, [shape]))


def claims_exact(options: AttentionOptions, dtype: torch.dtype) -> bool:
    """Whether the probe does, here; what it does not claim is not asserted. That it does where it ought
    to is: ``test_exact.py``."""
    sinks = options.sinks is not None
    shape = KVShape(HEADS, KV_HEADS, DIM_K, DIM_V, options.softcap, sinks)
    return not exact_calls_of(shape, dtype).failures


def run(
    texts: Sequence[Text],
    exact: bool,
    options: AttentionOptions = PLAIN,
    store: KVStore | None = None,
    calls: CallShapes | None = None,
) -> list[torch.Tensor]:
    """One attention call over all requests' rows; each request's output."""
    dtype = texts[0].key.dtype
    store = store or KVStore(1, NUM_BLOCKS, SIZE, KV_HEADS, DIM_K, DIM_V, dtype, CPU)
    for text in texts:
        fill(store, text)
    shape = KVShape(
        HEADS, KV_HEADS, DIM_K, DIM_V, options.softcap, has_sinks=options.sinks is not None
    )
    calls = calls or (exact_calls_of(shape, dtype).calls if exact else MASKED)
    batch = rows_of(*(text.request for text in texts))
    step = planned(batch, calls, exact, store)
    query, key, value = (
        torch.cat([getattr(text, kind)[text.request.base :] for text in texts])
        for kind in ("query", "key", "value")
    )
    output = step.attend(0, query, key, value, options)
    assert output.shape == (batch.num_rows, HEADS, DIM_V)
    return [output[each.first_row : each.first_row + each.num_rows] for each in batch.requests]


def naive(text: Text, options: AttentionOptions = PLAIN) -> torch.Tensor:
    """The same in float64, one row and head at a time."""
    request = text.request
    outputs = []
    for row in range(len(request.token_ids)):
        seen, positions = visible(request, row)
        if options.window is not None:
            kept = [p > positions[-1] - options.window for p in positions]
            seen = [s for s, keep in zip(seen, kept, strict=True) if keep]
        for head in range(HEADS):
            kv_head = head * KV_HEADS // HEADS
            keys = text.key[seen, kv_head].double()
            scores = keys @ text.query[request.base + row, head].double()
            scores *= options.scaling if options.scaling is not None else DIM_K**-0.5
            if options.softcap is not None:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            weights = scores.exp()
            total = weights.sum()
            if options.sinks is not None:
                total = total + math.exp(options.sinks[head])
            outputs.append((weights / total) @ text.value[seen, kv_head].double())
    return torch.stack(outputs).view(-1, HEADS, DIM_V)


def visible(request: RequestRows, row: int) -> tuple[list[int], list[int]]:
    """Indices of the tokens a row sees, its own last, and their positions."""
    if row < request.num_known:
        past = list(range(request.base + row + 1))
        return past, past
    known = request.base + request.num_known
    path = path_to(row - request.num_known, request.parents)
    past = list(range(known))
    return past + [known + node for node in path], list(range(known + len(path)))


MIXTURE = (
    {"base": 37, "num_known": 1},
    {"base": 0, "num_known": NUM_ROWS_ALONE + 9},
    {"base": 21, "num_known": 1, "parents": TREE},
    {"base": 0, "num_known": 3, "parents": TREE[:4]},
    {"base": 64, "num_known": NUM_ROWS_ALONE + 1 - len(TREE), "parents": TREE},
    {"base": 5, "num_known": 7},
)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize(
    "options",
    [
        PLAIN,
        AttentionOptions(None, 5, None, None),
        AttentionOptions(0.5, None, 2.0, None),
        EVERYTHING,
    ],
    ids=["plain", "window", "softcap", "everything"],
)
@pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])
def test_rows_see_their_past_and_their_ancestors_and_nothing_else(
    together: bool, options: AttentionOptions, exact: bool
) -> None:
    texts = [draw(seed, **kind) for seed, kind in enumerate(MIXTURE)]  # type: ignore[arg-type]
    batches = [texts] if together else [[text] for text in texts]
    got = [output for batch in batches for output in run(batch, exact, options)]
    for text, output in zip(texts, got, strict=True):
        torch.testing.assert_close(output.double(), naive(text, options), rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize(
    "calls",
    [
        bmm_calls(row_multiple=4),
        bmm_calls(tile_rows=4),
        bmm_calls(tile_rows=1),
        bmm_calls(row_multiple=2, key_multiple=128, key_chunk=128),
    ],
)
def test_whatever_calls_the_probe_settles_on_they_are_attention(
    calls: CallShapes, options: AttentionOptions
) -> None:
    over_a_chunk = {"base": 124, "num_known": 2, "parents": TREE, "table": range(140, 150)}
    kinds = (*MIXTURE, {"base": 600, "num_known": 3, "table": range(100, 140)}, over_a_chunk)
    texts = [draw(seed, **kind) for seed, kind in enumerate(kinds)]  # type: ignore[arg-type]
    for text, output in zip(texts, run(texts, True, options, calls=calls), strict=True):
        torch.testing.assert_close(output.double(), naive(text, options), rtol=0, atol=1e-5)


def test_long_chunks_attend_alone_and_others_with_their_like() -> None:
    """Rows 1, 12, 7, 7 next to two chunks, over short pasts: one call for all four costs least."""
    texts = [draw(seed, **kind) for seed, kind in enumerate(MIXTURE)]  # type: ignore[arg-type]
    batch = rows_of(*(text.request for text in texts))
    groups = planned(batch, MASKED, exact=False).groups
    assert [group.num_branches for group in groups] == [1, 1, 4]
    assert [group.num_rows for group in groups] == [41, 33, 1 + 12 + 7 + 7]
    assert [group.rows_per_branch for group in groups] == [41, 33, 12]


def lying(base: int, num_rows: int) -> RequestRows:
    table = range(-(-(base + num_rows) // SIZE))
    return RequestRows([0] * num_rows, 1, base, tuple(range(-1, num_rows - 2)), table, num_rows)


@pytest.mark.parametrize(
    ("calls", "exact"), [(MASKED, False), (FREE, True), (bmm_calls(tile_rows=4), True)]
)
def test_deep_drafts_and_long_pasts_do_not_pad_everybody(calls: CallShapes, exact: bool) -> None:
    """Eight plain requests beside two deep drafts, and beside two long pasts."""
    plain = [lying(400 + 3 * index, 1) for index in range(8)]
    for others in ([lying(380, 13), lying(410, 16)], [lying(2010, 1), lying(2030, 2)]):
        batch = rows_of(*plain[:4], *others, *plain[4:])
        rows = planned(batch, calls, exact)
        assert [group.num_branches for group in rows.groups] == [8, 2]
        assert rows.order is not None
        outputs = [0, 1, 2, 3, *range(4 + others[0].num_logits + others[1].num_logits, 99)]
        assert rows.order.argsort()[:8].tolist() == outputs[:8]


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 32)), min_size=1, max_size=9))
def test_no_other_cuts_of_the_order_cost_less(sizes: list[tuple[int, int]]) -> None:
    batch = rows_of(*(lying(*size) for size in sizes))
    groups = planned(batch, MASKED, exact=False).groups
    padded = sorted((-(-(base + rows) // 128) * 128, rows) for base, rows in sizes)

    def cost(calls: Sequence[Sequence[tuple[int, int]]]) -> float:
        return sum(
            4096 + len(call) * call[-1][0] * (max(rows for _, rows in call) + 0.5) for call in calls
        )

    cheapest = min(
        cost([padded[start:end] for start, end in pairwise((0, *cuts, len(padded)))])
        for count in range(len(padded))
        for cuts in combinations(range(1, len(padded)), count)
    )
    shapes = [(group.num_branches, group.num_keys, group.rows_per_branch) for group in groups]
    assert sum(count for count, _, _ in shapes) == len(sizes)
    total = sum(4096 + count * keys * (rows + 0.5) for count, keys, rows in shapes)
    assert total == pytest.approx(cheapest)


def test_exact_mode_reads_a_tree_in_the_order_of_its_texts_in_one_call() -> None:
    """The known rows and nodes 0, 1 lie as their text does; not so 2-3 under node 0, 4 under 2, 5 under
    the root. Of the context only the chunk is read again that their own keys lie in."""
    text = draw(1, 21, 2, (-1, 0, 0, 2, 2, -1), table=(7, 5))
    calls = bmm_calls(key_multiple=16, key_chunk=16)
    (group,) = planned(rows_of(text.request), calls, exact=True).groups
    assert (group.num_branches, group.rows_per_branch, group.num_keys) == (1, 8, 32)
    assert group.query_rows is None
    paths = group.paths
    assert paths is not None
    # Node 2 is key 24 of its text and lies at 25, node 3 is 25 and lies at 26, and so on.
    moved = zip(paths.rows.tolist(), paths.keys.tolist(), paths.columns.tolist(), strict=True)
    assert list(moved) == [
        (4, 24, 25),
        (5, 24, 25),
        (5, 25, 26),
        (6, 24, 25),
        (6, 25, 27),
        (7, 23, 28),
    ]
    (chunk,) = paths.chunks
    assert (chunk.number, chunk.num_paths) == (1, 3)
    assert chunk.rows.view(3, 2).tolist() == [[4, 5], [6, 6], [7, 7]]
    lying = [[7, 9, 10], [7, 9, 11], [12, 8, 9]]  # keys 23, 24, 25 in block 5
    assert chunk.slots.view(3, 16)[:, 7:10].tolist() == [
        [5 * SIZE + place for place in path] for path in lying
    ]
    limits = group.limits(None, text.query)
    seen = (limits.values == math.inf).sum(-1).flatten() + limits.start
    assert seen.tolist() == [22, 23, 24, 25, 25, 26, 26, 24]


def test_a_long_chunk_that_ends_in_a_tree_goes_through_in_pieces_and_its_tree_whole() -> None:
    text = draw(1, 0, NUM_ROWS_ALONE + 1, TREE, table=range(9))
    groups = planned(rows_of(text.request), bmm_calls(), exact=True).groups
    assert [(group.num_rows, group.paths is None) for group in groups] == [(34, True), (10, False)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize("options", [PLAIN, EVERYTHING], ids=["plain", "everything"])
def test_in_exact_mode_a_row_has_the_same_bits_whatever_shares_its_step(
    options: AttentionOptions, dtype: torch.dtype
) -> None:
    """Alone, beside short and long neighbours (which lengthen everyone's keys), as a draft or a chunk,
    in consecutive or scattered blocks."""
    if not claims_exact(options, dtype):
        return
    base, count = 53, 9
    chain = tuple(range(-1, count - 2))
    text = draw(1, base, count, dtype=dtype)
    as_drafts = draw(1, base, 1, chain, dtype=dtype)
    consecutive = draw(1, base, count, table=range(4), dtype=dtype)
    late = draw(1, base + count - 1, 1, dtype=dtype)
    near = [draw(3, 20, 1, TREE, dtype=dtype), draw(4, 0, 30, dtype=dtype)]
    far = draw(6, KEYS + 90, 2, dtype=dtype, table=range(60, 60 + 39))
    chunk = draw(11, 0, 70, dtype=dtype)
    (expected,) = run([text], True, options)
    for other in ([text, *near], [far, text], [chunk, *near, text], [as_drafts], [consecutive]):
        got = dict(zip(map(id, other), run(other, True, options), strict=True))
        mine = next(each for each in other if each in (text, as_drafts, consecutive))
        assert torch.equal(got[id(mine)], expected)
    (last,) = run([late], True, options)
    assert torch.equal(last, expected[-1:])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize("options", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("base", [3, 200, 380, KEYS - 3])
def test_in_exact_mode_a_draft_row_has_the_bits_of_the_text_it_guesses(
    base: int, options: AttentionOptions, dtype: torch.dtype
) -> None:
    """Keys of other branches lie between a node's ancestors: masked where they lie, they changed 70 % of
    all rows in float32, since a kernel's partial sums then hold other keys."""
    if not claims_exact(options, dtype):
        return
    text = draw(1, base, 2, TREE, table=range(100, 140), dtype=dtype)
    neighbour = draw(2, 30, 1, TREE, dtype=dtype)
    chunk = draw(3, 0, NUM_ROWS_ALONE + 1, TREE, dtype=dtype)
    _, output, _ = run([chunk, text, neighbour], True, options)
    known = base + 2
    for node in range(len(TREE)):
        path = path_to(node, TREE)
        indices = [*range(known), *(known + each for each in path)]
        request = replace(
            text.request,
            token_ids=[0] * (2 + len(path)),
            num_known=2 + len(path),
            parents=(),
            num_logits=2 + len(path),
        )
        rows = (each[indices] for each in (text.query, text.key, text.value))
        (linear,) = run([Text(*rows, request)], True, options)
        assert torch.equal(output[[0, 1, *(2 + each for each in path)]], linear)


def test_blocks_that_lie_together_are_read_in_place_and_give_the_same() -> None:
    for table in (range(3, 8), range(NUM_BLOCKS - 5, NUM_BLOCKS), (9, 3, 40, 7, 1)):
        text = draw(2, 61, 3, TREE, table=table)
        (output,) = run([text], False)
        torch.testing.assert_close(output.double(), naive(text), rtol=0, atol=1e-5)
        (exact,) = run([text], True)
        torch.testing.assert_close(exact.double(), naive(text), rtol=0, atol=1e-5)
    store = KVStore(1, NUM_BLOCKS, SIZE, KV_HEADS, DIM_K, DIM_V, torch.float32, CPU)
    lying = [
        planned(rows_of(draw(2, 61, 3, table=table).request), MASKED, exact=False).groups[0]
        for table in (range(3, 8), (9, 3, 40, 7, 1))
    ]
    assert [group.contiguous_from for group in lying] == [3, None]
    assert store.slice_blocks(0, 3, 5)[1].data_ptr() == store.value[0][3 * SIZE].data_ptr()


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("options", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_one_request_overflows_never_reaches_another(
    poison: float, options: AttentionOptions, exact: bool
) -> None:
    """Block 0 pads everyone's tables, blocks after a request's own are read with them, and blocks come
    back from requests that have gone: all masked, but 0 times NaN is NaN."""
    store = KVStore(1, NUM_BLOCKS, SIZE, KV_HEADS, DIM_K, DIM_V, torch.float32, CPU)
    bad = draw(7, 0, 3 * SIZE, table=(0, 4, 5))
    bad.key[5:40] = poison
    bad.value[5:40] = poison
    bad.key[44, 0] = poison
    run([bad], exact, options, store)
    worse = replace(bad, request=replace(bad.request, block_table=(0, 6, 7)))
    good = [draw(1, 20, 1, TREE, table=(2, 3)), draw(2, 3, 2, table=(4,)), draw(3, 0, 36)]
    for together in (good, [*good, worse], good[:1], good[1:2]):
        outputs = run(together, exact, options, store)
        for text, output in zip(together, outputs, strict=True):
            if text is not worse:
                expected = naive(text, options)
                torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sinks", [None, torch.zeros(HEADS)], ids=["fused", "sinks"])
def test_products_that_overflow_with_masked_keys_do_no_harm(sinks: torch.Tensor | None) -> None:
    """In float16 a neighbour's large keys give infinite scores, and infinity less infinity is NaN."""
    store = KVStore(1, NUM_BLOCKS, SIZE, KV_HEADS, DIM_K, DIM_V, torch.float16, CPU)
    options = AttentionOptions(None, None, None, sinks)
    large = draw(7, 0, SIZE, table=(0,), dtype=torch.float16)
    large.key.copy_(20_000 * large.key.sign())
    run([large], False, options, store)
    texts = [draw(1, 40, 2, dtype=torch.float16), draw(2, 3, 2, dtype=torch.float16)]
    for text, output in zip(texts, run(texts, False, options, store), strict=True):
        torch.testing.assert_close(output.double(), naive(text, options), rtol=0, atol=0.03)


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


def test_a_model_that_does_not_hand_the_step_down_is_told_so() -> None:
    with pytest.raises(RuntimeError, match="does not pass attention keywords"):
        slipstream_attention(torch.nn.Module(), *attention_inputs(), attention_mask=None)


@pytest.mark.parametrize("given", [{"attention_mask": torch.zeros(2, 2)}, {"dropout": 0.1}])
def test_masks_and_dropout_of_the_model_s_own_are_refused(given: dict[str, object]) -> None:
    store = KVStore(1, 1, SIZE, 2, 4, 4, torch.float32, CPU)
    step = planned(rows_of(draw(1, 0, 2).request), MASKED, exact=False, store=store)
    arguments = {"attention_mask": None, "slipstream_plan": step} | given
    with pytest.raises(RuntimeError, match="mask or dropout of their own"):
        slipstream_attention(torch.nn.Module(), *attention_inputs(), **arguments)  # type: ignore[arg-type]
