"""Triton's programs as operators of torch: what traces a model sees one call with known shapes."""

from __future__ import annotations

from typing import Any

import torch

from engine.kernels.triton import Variant, is_interpreted

_LEAST_LANES = 16
"""Products of tiles take at least so many, in every direction."""
_LOG2_E = 1.4426950408889634
_STORED_PAIRS = 16
"""Numbers of a row and a key head that a program stores."""
_INTERPRETED_PAIRS = 256
"""The same where a program's operations cost what numpy's calls do, however much they take."""


def lanes(dim: int) -> int:
    """The power of two that holds ``dim``."""
    return max(_LEAST_LANES, 1 << (dim - 1).bit_length())


def attend_variant(
    *,
    dtype: torch.dtype,
    share: int,
    key_dim: int,
    value_dim: int,
    block_size: int,
    tile_rows: int,
    chunk: int,
    window: int,
    softcap: float,
    has_sinks: bool,
    is_fp8: bool,
    is_exact: bool,
) -> Variant:
    """Returns what ``attend`` is compiled for: sizes that no batch changes, but for ``tile_rows``."""
    key_lanes, value_lanes = lanes(key_dim), lanes(value_dim)
    pairs = lanes(tile_rows * share)
    is_wide = max(key_lanes, value_lanes) > 128 or dtype == torch.float32
    may_round = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    constants = {
        "SHARE": share,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_LANES": key_lanes,
        "VALUE_LANES": value_lanes,
        "BLOCK_SIZE": block_size,
        "PAIRS": pairs,
        # With more of them, or fewer threads, programs run out of registers, which interpreters have not.
        "KEYS": min(chunk, 16 if is_wide or (pairs >= 64 and not is_interpreted()) else 32),
        "HAS_WINDOW": window > 0,
        "HAS_SOFTCAP": softcap > 0,
        "HAS_SINKS": has_sinks,
        "IS_FP8": is_fp8,
        "PRECISION": "tf32" if may_round and not is_exact else "ieee",
        "IS_INTERPRETED": is_interpreted(),
    }
    # Programs of few pairs leave room for another on their processor.
    is_small = pairs <= (16 if is_wide else 32)
    return Variant(constants, _launch(4 if is_small else 8, is_exact))


def join_variant(attending: Variant, is_exact: bool) -> Variant:
    sizes = attending.constants
    constants = {name: sizes[name] for name in ("SHARE", "VALUE_DIM", "VALUE_LANES", "HAS_SINKS")}
    constants["SHARE_LANES"] = 1 << (sizes["SHARE"] - 1).bit_length()
    return Variant(constants, _launch(4, is_exact))


def store_variant(share: int, key_dim: int, value_dim: int, is_fp8: bool) -> Variant:
    constants = {
        "SHARE": share,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_LANES": lanes(key_dim),
        "VALUE_LANES": lanes(value_dim),
        "PAIRS": _INTERPRETED_PAIRS if is_interpreted() else _STORED_PAIRS,
        "IS_FP8": is_fp8,
    }
    return Variant(constants, _launch(4, True))


def _launch(num_warps: int, is_exact: bool) -> dict[str, Any]:
    """A product and a sum that become one operation round once: in exact mode nowhere, so that merging
    sums rounds alike in both programs that do."""
    return {"num_warps": num_warps, "num_stages": 2, "enable_fp_fusion": not is_exact}


@torch.library.custom_op(
    "slipstream::ragged_attention",
    mutates_args=("output", "sums", "stats"),
    schema="(Tensor query, Tensor keys, Tensor values, Tensor plan, Tensor(a!) output, Tensor(b!) sums,"
    " Tensor(c!) stats, Tensor? sinks, int num_items, int num_joins, int joins_at, int tile_rows,"
    " int block_size, int chunk, float scaling, float softcap, int window, bool is_exact) -> ()",
)
def ragged_attention(
    query: torch.Tensor,  # [num_rows, num_heads, key_dim]
    keys: torch.Tensor,  # [num_kv_heads, num_slots, key_dim], or the bytes of 8-bit floats
    values: torch.Tensor,  # [num_kv_heads, num_slots, value_dim]
    plan: torch.Tensor,  # int32: engine.attention.work
    output: torch.Tensor,  # [num_rows, num_heads, value_dim]
    sums: torch.Tensor,
    stats: torch.Tensor,
    sinks: torch.Tensor | None,
    num_items: int,
    num_joins: int,
    joins_at: int,
    tile_rows: int,
    block_size: int,
    chunk: int,
    scaling: float,
    softcap: float,
    window: int,
    is_exact: bool,
) -> None:
    """Let each row attend, whose keys and values are stored. ``softcap``, ``window``: 0 is none. Outputs
    of rows of padding are left as they are."""
    query = _rows_together(query)
    _, num_heads, key_dim = query.shape
    num_kv_heads, _, value_dim = values.shape
    variant = attend_variant(
        dtype=query.dtype,
        share=num_heads // num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        block_size=block_size,
        tile_rows=tile_rows,
        chunk=chunk,
        window=window,
        softcap=softcap,
        has_sinks=sinks is not None,
        is_fp8=keys.dtype == torch.uint8,
        is_exact=is_exact,
    )
    given_sinks = query if sinks is None else sinks
    with torch.cuda.device_of(query):
        if num_items:
            numbers = (
                scaling / softcap if softcap else scaling * _LOG2_E,
                softcap * _LOG2_E,
                window,
            )
            tensors = (query, keys, values, plan, output, sums, stats, given_sinks)
            _attend(variant, num_items, tensors, numbers)
        if num_joins:
            joined = (plan[joins_at:], output, sums, stats, given_sinks)
            _join(join_variant(variant, is_exact), (num_joins, num_kv_heads), joined)


@torch.library.custom_op("slipstream::store_rows", mutates_args=("keys", "values"))
def store_rows(
    key: torch.Tensor,  # [num_rows, num_kv_heads, key_dim]
    value: torch.Tensor,  # [num_rows, num_kv_heads, value_dim]
    keys: torch.Tensor,  # as for ragged_attention
    values: torch.Tensor,
    slots: torch.Tensor,  # [num_rows] int64; -1: padding
    num_heads: int,
    largest_key: float,
) -> torch.Tensor:
    """Stores the rows' keys and values: numbers that the store's type, and the rows', can hold. Returns
    room for their outputs, ``[num_rows, num_heads, value_dim]``, with zeros for rows of padding, which
    are stored nowhere."""
    from engine.kernels.triton import ragged_attention as programs

    key, value = _rows_together(key), _rows_together(value)
    num_rows, num_kv_heads, key_dim = key.shape
    output = key.new_empty(num_rows, num_heads, value.shape[2])
    is_fp8 = keys.dtype == torch.uint8
    constants, launch = store_variant(num_heads // num_kv_heads, key_dim, value.shape[2], is_fp8)
    stored = torch.float8_e4m3fn if is_fp8 else keys.dtype
    largest = min(torch.finfo(stored).max, torch.finfo(key.dtype).max)
    with torch.cuda.device_of(key):
        programs.store_rows[(-(-num_rows * num_kv_heads // constants["PAIRS"]),)](
            key,
            value,
            slots,
            keys,
            values,
            output,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            keys.stride(0),
            values.stride(0),
            num_rows,
            num_kv_heads,
            min(largest, largest_key),
            largest,
            **constants,
            **launch,
        )
    return output


@store_rows.register_fake
def _(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    largest_key: float,
) -> torch.Tensor:
    del keys, values, slots, largest_key
    return key.new_empty(key.shape[0], num_heads, value.shape[2])


def _attend(
    variant: Variant,
    num_items: int,
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[float, float, int],
) -> None:
    """``tensors`` and ``numbers`` in the program's order."""
    from engine.kernels.triton.ragged_attention import attend

    query, keys, values, _, output, *_ = tensors
    attend[(num_items, keys.shape[0])](
        *tensors,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        values.stride(0),
        output.stride(0),
        query.shape[1],
        *numbers,
        **variant.constants,
        **variant.launch,
    )


def _join(variant: Variant, grid: tuple[int, int], tensors: tuple[torch.Tensor, ...]) -> None:
    from engine.kernels.triton.ragged_attention import join

    output = tensors[1]
    join[grid](*tensors, output.stride(0), output.shape[1], **variant.constants, **variant.launch)


def _rows_together(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(2) == 1 else rows.contiguous()
