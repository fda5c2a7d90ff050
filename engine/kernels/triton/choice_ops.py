"""The choice of rows' tokens, as its programs are launched."""

from __future__ import annotations

from functools import cache

import torch

from compiled.noise_numbers import TILE_TOKENS
from engine.kernels import is_host
from engine.kernels.triton import Variant, is_interpreted, missing_for
from engine.kernels.triton.ops import lanes

_INTERPRETED_ROWS = 16
"""Rows of a program under the interpreter, whose operations cost a call of numpy each, whatever their
size."""
_LAUNCH = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
"""Without fusion of a product and a sum into one operation, which rounds once, as torch's do not."""


def can_choose(device: torch.device) -> bool:
    """Whether the programs run there, and no compiled kernel of the host's does."""
    return not is_host(device) and _is_there(device)


@cache
def _is_there(device: torch.device) -> bool:
    return missing_for(device) is None


def score_variant() -> Variant:
    return Variant({"ROWS": _INTERPRETED_ROWS if is_interpreted() else 1}, _LAUNCH)


def choose_variant(num_tiles: int) -> Variant:
    return Variant({"LANES": lanes(num_tiles)}, _LAUNCH)


def choose_rows(
    logits: torch.Tensor,
    noise_keys: torch.Tensor,
    noise_positions: torch.Tensor,
    temperatures: torch.Tensor,
) -> torch.Tensor:
    """Returns rows' tokens, int64 ``[num_rows]``: the largest sum of noise and a logit over temperature,
    the lowest of equals; 0 where no logit is finite, or one is no number.

    ``logits`` ``[num_rows, vocab_size]``, of any float type; keys and positions of noise int64, and
    ``temperatures`` float64, ``[num_rows]``. At temperature 0 there is no noise; below it the row is not
    read.
    """
    from engine.kernels.triton.choice_programs import choose, score

    num_rows, vocab_size = logits.shape
    num_tiles = -(-vocab_size // TILE_TOKENS)
    chosen = noise_keys.new_empty(num_rows)
    if not num_rows:
        return chosen
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    scores = temperatures.new_empty(num_rows, num_tiles)
    tokens = torch.empty_like(scores, dtype=torch.int32)
    constants, launch = score_variant()
    sizes = num_rows, vocab_size, logits.stride(0), num_tiles
    with torch.cuda.device_of(logits):
        score[(-(-num_rows // constants["ROWS"]), num_tiles)](
            *(logits, noise_keys, noise_positions, temperatures, scores, tokens, *sizes),
            **constants,
            **launch,
        )
        constants, launch = choose_variant(num_tiles)
        choose[(num_rows,)](scores, tokens, chosen, num_tiles, **constants, **launch)
    return chosen
