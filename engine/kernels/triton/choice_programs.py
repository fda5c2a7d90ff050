"""The choice of a row's token, as Triton programs: what ``engine.sampling.sampler`` defines where nothing
edits or truncates the logits.

``score``: a program looks at one tile of a row's tokens, and leaves the best sum of logit and noise, and
its token. ``choose`` takes the best of a row's tiles. Scores are float64's, made element by element, and
their maxima: a row's token hangs on nothing else in the batch, nor on how tiles are shared out.
"""

import triton
import triton.language as tl

from compiled import noise_numbers as n

_GOLDEN, _MIX1, _MIX2 = (tl.constexpr(each) for each in (n.GOLDEN, n.MIX1, n.MIX2))
_GROUP, _GROUP_COUNTER = tl.constexpr(n.GROUP_TOKENS), tl.constexpr(n.GROUP_COUNTER)
_SHIFT, _UNIT = tl.constexpr(64 - n.MANTISSA_BITS), tl.constexpr(n.UNIT)
_NO_NUMBER = tl.constexpr(-1)
"""Stands for the token of what is no number, and comes before all others."""
_LAST = tl.constexpr(2147483647)


@triton.jit
def _mix(z):
    """The finaliser of splitmix64."""
    z = (z ^ (z >> 30)) * _MIX1
    z = (z ^ (z >> 27)) * _MIX2
    return z ^ (z >> 31)


@triton.jit
def _hash(state, counter):
    return _mix(state + (counter + 1).to(tl.uint64) * _GOLDEN)


@triton.jit
def _exponential(bits):
    """From the upper 52 bits. What a logarithm is taken of has no rounding error."""
    uniform = ((bits >> _SHIFT).to(tl.int64).to(tl.float64) + 0.5) * _UNIT
    return -tl.log(1.0 - uniform)


@triton.jit
def _noise(state, first, member, lane):
    """Orders a tile's tokens, ``first`` the lowest: in each lane is a group, of which one member comes
    before the others."""
    bits = _hash(state, (first // _GROUP + lane).to(tl.int64) + _GROUP_COUNTER)
    is_later = (bits & (_GROUP - 1)).to(tl.int32) != member
    own = _exponential(_hash(state, (first + member * _GROUP + lane).to(tl.int64)))
    arrivals = _exponential(bits) / _GROUP + tl.where(is_later, own, 0.0)
    return (-tl.log(arrivals)).to(tl.float32)


@triton.jit
def _first_best(scores, tokens):
    """The largest of each row, and its lowest token: ``[rows, numbers]`` to ``[rows]``."""
    best = tl.max(scores, 1)
    return best, tl.min(tl.where(scores == best[:, None], tokens, _LAST), 1)


@triton.jit(do_not_specialize=["num_rows"])
def score(
    logits,  # [num_rows, vocab_size]
    noise_keys,  # [num_rows] int64
    noise_positions,  # [num_rows] int64
    temperatures,  # [num_rows] float64; 0: no noise; below: the row has no token
    scores,  # [num_rows, num_tiles] float64
    best_tokens,  # [num_rows, num_tiles] int32
    num_rows,
    vocab_size,
    row_stride,
    num_tiles,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1)
    is_row = row < num_rows
    temperature = tl.load(temperatures + row, mask=is_row, other=-1.0)[:, None, None]
    member = tl.arange(0, _GROUP)[None, :, None]
    lane = tl.arange(0, _GROUP)[None, None, :]
    first = tile * _GROUP * _GROUP
    token = first + member * _GROUP + lane
    is_read = (token < vocab_size) & (temperature >= 0.0)
    place = row[:, None, None] * row_stride + token
    score = tl.load(logits + place, mask=is_read, other=float("-inf")).to(tl.float64)
    if tl.max(temperature) > 0.0:
        key = tl.load(noise_keys + row, mask=is_row, other=0).to(tl.uint64, bitcast=True)
        position = tl.load(noise_positions + row, mask=is_row, other=0)
        noise = _noise(_hash(key, position)[:, None, None], first, member, lane)
        divided = score / tl.where(temperature > 0.0, temperature, 1.0) + noise.to(tl.float64)
        score = tl.where(temperature > 0.0, divided, score)
    is_number = score == score
    score = tl.where(is_number, score, float("inf"))
    token = tl.where(is_number, token, _NO_NUMBER)
    flat: tl.constexpr = [ROWS, _GROUP * _GROUP]
    best, best_token = _first_best(tl.reshape(score, flat), tl.reshape(token, flat))
    tl.store(scores + row * num_tiles + tile, best, is_row)
    tl.store(best_tokens + row * num_tiles + tile, best_token, is_row)


@triton.jit
def choose(
    scores,  # [num_rows, num_tiles] float64
    best_tokens,  # [num_rows, num_tiles] int32
    chosen,  # [num_rows] int64
    num_tiles,
    LANES: tl.constexpr,
):
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)[None, :]
    is_tile = lane < num_tiles
    score = tl.load(scores + row * num_tiles + lane, mask=is_tile, other=float("-inf"))
    token = tl.load(best_tokens + row * num_tiles + lane, mask=is_tile, other=_LAST)
    _, best = _first_best(score, token)
    tl.store(chosen + row + tl.arange(0, 1), tl.maximum(best, 0).to(tl.int64))
