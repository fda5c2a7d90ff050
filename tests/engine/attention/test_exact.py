"""Which calls of attention keep a row's bits: the probe's yes holds for rows it does not know, and it can
say no."""

from __future__ import annotations

import pytest
import torch

from engine.attention import exact
from engine.attention.backend import AttentionNeeds, KVShape
from engine.attention.exact import bmm_calls, exact_calls, keeps_bits
from engine.attention.products import CallShapes

torch.set_num_threads(1)

CPU = torch.device("cpu")
SHAPE = KVShape(4, 2, 16, 16)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = [
    SHAPE,
    KVShape(4, 4, 16, 12),
    KVShape(4, 2, 16, 16, 3.0),
    KVShape(4, 2, 16, 16, None, True),
]


def needs(*shapes: KVShape, dtype: torch.dtype = torch.float32) -> AttentionNeeds:
    return AttentionNeeds("exact", CPU, dtype, 16, shapes)


@pytest.fixture(autouse=True)
def no_memory_of_other_kernels() -> None:
    exact._keeps_bits.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_some_calls_keep_bits_on_every_kind_of_cpu_we_know(dtype: torch.dtype) -> None:
    """Else what the tests of exact rows assert where it is claimed might be nothing. With AVX2, AVX-512
    and AMX, in fp32, bf16 and fp16, for plain attention, soft caps and sinks."""
    calls, failures = exact_calls(needs(*KINDS, dtype=dtype))
    assert failures == ()
    assert all(keeps_bits(calls, shape, dtype, CPU) for shape in KINDS)


def steady(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Sums without a visible order."""
    return (left.double() @ right.double()).round(decimals=3).to(left.dtype)


@pytest.mark.parametrize("fussy", ["rows", "place", "keys", "branches"])
def test_the_probe_notices_products_that_follow_their_shape(
    monkeypatch: pytest.MonkeyPatch, fussy: str
) -> None:
    """A kernel that adds in one order up to a size, or in some places, and in another beyond it."""

    def follows_shape(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        result = steady(left, right)
        if fussy == "place":
            result[:, 7:8] += 1.0
        sizes = {"rows": (left.shape[1], 256), "branches": (left.shape[0], 8)}
        sizes["keys"] = (max(left.shape[2], right.shape[2]), 1024)
        size, limit = sizes.get(fussy, (0, 0))
        # Not the same everywhere: a softmax does not notice that.
        return result + torch.arange(result.shape[2]) % 3 if size > limit else result

    monkeypatch.setattr(torch, "bmm", steady)
    assert keeps_bits(bmm_calls(), SHAPE, torch.float32, CPU)
    exact._keeps_bits.cache_clear()
    monkeypatch.setattr(torch, "bmm", follows_shape)
    assert not keeps_bits(bmm_calls(), SHAPE, torch.float32, CPU)


def test_where_rows_may_not_come_as_they_are_tiles_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As MKL's products with AVX2, where bits follow a row's place: one row at a time is steady."""

    def follows_place(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        result = steady(left, right)
        result[:, 5:] += 1.0
        return result

    monkeypatch.setattr(torch, "bmm", follows_place)
    assert exact_calls(needs(SHAPE)) == (bmm_calls(tile_rows=1), ())


def test_where_nothing_holds_the_kinds_that_fail_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def not_capped(
        calls: CallShapes, shape: KVShape, dtype: torch.dtype, device: torch.device
    ) -> bool:
        del calls, dtype, device
        return shape.softcap is None

    monkeypatch.setattr(exact, "keeps_bits", not_capped)
    failures = exact_calls(needs(*KINDS)).failures
    assert failures == ("attention of 4 heads over 2, 16 and 16 wide, capped",)
