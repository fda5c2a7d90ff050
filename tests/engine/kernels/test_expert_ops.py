"""Experts on a device: each pair of a row and an expert gets that expert's product, with the bits that it
has alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.routes import reference_sum
from engine.kernels.triton import code_ops, expert_ops
from engine.kernels.triton.code_ops import product
from engine.kernels.triton.expert_ops import ROWS_OF_BLOCK, Routes, route, weighted_sum
from engine.kernels.triton.packed_codes import PackedCodes, pack
from worlds.grouped_weights import channels_of, drawn_weight
from worlds.interpreted import DEVICE, drawn, patching_once
from worlds.lanes import examples

NUM_EXPERTS, CHANNELS, FEATURES = 5, 70, 288


@pytest.fixture(autouse=True, scope="module")
def short_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, patching_once():
        patch.setattr(code_ops, "_CHUNKS", (128,))
        yield


def experts_of(scheme: str, bias: torch.Tensor | None = None) -> tuple[PackedCodes, Any]:
    """Packed experts, and each one's alone."""
    weight = drawn_weight(scheme, NUM_EXPERTS * CHANNELS, 512)
    weight = weight._replace(codes=weight.codes[:, :FEATURES].contiguous())
    weight = weight._replace(
        **{
            name: each.to(DEVICE)
            for name, each in weight._asdict().items()
            if isinstance(each, torch.Tensor)
        }
    )
    parts = [
        channels_of(weight, CHANNELS * each, CHANNELS * (each + 1)) for each in range(NUM_EXPERTS)
    ]
    together = pack(iter(parts), CHANNELS, FEATURES, bias, NUM_EXPERTS)
    return together, [pack([each], CHANNELS, FEATURES) for each in parts]


def pairs_of(routes: Routes) -> dict[int, list[int]]:
    """Pairs by experts, as blocks have them."""
    found: dict[int, list[int]] = {}
    for expert, first, end in routes.blocks.T.tolist():
        assert end - first <= routes.rows_of_block
        found.setdefault(expert, []).extend(routes.pairs[first:end].tolist())
    return found


@given(
    num_rows=st.integers(1, 130), num_chosen=st.integers(1, 4), least=st.sampled_from([0, -1, 4])
)
def test_each_pair_is_in_one_block_of_its_expert(
    num_rows: int, num_chosen: int, least: int
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    chosen = torch.randint(least, NUM_EXPERTS + 1, (num_rows, num_chosen), generator=generator)
    routes = route(chosen.to(DEVICE), NUM_EXPERTS)
    found = pairs_of(routes)
    for expert in range(NUM_EXPERTS):
        expected = (chosen.flatten() == expert).nonzero()[:, 0].tolist()
        assert found.get(expert, []) == expected
    few = chosen.numel() <= ROWS_OF_BLOCK * NUM_EXPERTS
    assert routes.rows_of_block == (ROWS_OF_BLOCK if few else 2 * ROWS_OF_BLOCK)


@settings(deadline=None, max_examples=examples(12))
@given(
    num_rows=st.one_of(st.integers(1, 4), st.integers(40, 60)),
    scheme=st.sampled_from(["Q4_0", "Q4_K", "Q6_K", "AWQ"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    is_busy=st.booleans(),
    has_bias=st.booleans(),
)
def test_a_pair_has_the_bits_of_its_experts_product_alone(
    num_rows: int, scheme: str, dtype: torch.dtype, is_busy: bool, has_bias: bool
) -> None:
    """Rows are rows, of which each has several pairs, or the pairs; one pair has no expert."""
    bias = drawn(torch.float32, NUM_EXPERTS, CHANNELS, seed=5) if has_bias else None
    together, apart = experts_of(scheme, bias)
    generator = torch.Generator().manual_seed(num_rows)
    chosen = torch.randint(0, NUM_EXPERTS, (num_rows, 2), generator=generator).to(DEVICE)
    chosen[0, 1] = NUM_EXPERTS
    routes = route(chosen, NUM_EXPERTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code_ops, "_enough_programs", lambda _: 0 if is_busy else 1 << 20)
        for count in (num_rows, 2 * num_rows):
            rows = drawn(dtype, count, FEATURES, seed=2)
            got = product(rows, together, dtype, routes=routes)
            assert got.shape == (2 * num_rows, CHANNELS)
            # The first, the last and a few between, of both columns: each is a product of its own.
            some = {0, *range(2, 2 * num_rows, num_rows // 3 | 1), 2 * num_rows - 1} - {1}
            for pair in some:
                expert = int(chosen[pair // 2, pair % 2])
                row = rows[pair // (2 * num_rows // count), None]
                if bias is None:
                    expected = product(row, apart[expert], dtype)
                else:
                    plain = product(row, apart[expert], torch.float32)
                    expected = (plain + bias[expert]).to(dtype)
                assert torch.equal(got[pair, None], expected)


def test_what_has_no_expert_adds_nothing() -> None:
    together, _ = experts_of("Q4_0")
    chosen = torch.tensor([[0, -1], [NUM_EXPERTS, 2]], device=DEVICE)
    routes = route(chosen, NUM_EXPERTS)
    got = product(drawn(torch.float32, 2, FEATURES, seed=1), together, torch.float32, routes=routes)
    assert got[[0, 3]].any(-1).all()
    assert not got[1:3].any()


def test_experts_are_added_in_the_order_in_which_they_were_chosen() -> None:
    outputs, weights = drawn(torch.float32, 21, 33, seed=3), drawn(torch.bfloat16, 7, 3, seed=4)
    routes = route(torch.zeros(7, 3, dtype=torch.int64, device=DEVICE), 1)
    total = weighted_sum(outputs, weights, routes, torch.float32)
    expected = reference_sum(outputs.view(7, 3, 33), weights)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
    alone = [
        weighted_sum(outputs[3 * row : 3 * row + 3], weights[row, None], routes, torch.float32)
        for row in range(7)
    ]
    assert torch.equal(total, torch.cat(alone))
    assert expert_ops.ROWS_OF_BLOCK == code_ops._FEW_ROWS
