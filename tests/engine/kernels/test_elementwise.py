"""Operations on elements have torch's bits, or are near them and the same for each element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels import KINDS, elementwise
from engine.kernels.elementwise import computed, recorded

SPECIAL = [0.0, -0.0, 1e-30, -1e-30, 87.0, -87.0, torch.inf, -torch.inf, torch.nan]


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(operation: int, given: list[Any], like: torch.Tensor, *numbers: float) -> torch.Tensor:
    output = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    found = recorded(operation, given[0], given[1] if given[1:] else None, output, *numbers)
    assert found is not None
    found.kernel.run(found.arguments, found.num_threads)
    return output


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    is_nan = expected.isnan()
    return torch.equal(got.isnan(), is_nan) and torch.equal(got[~is_nan], expected[~is_nan])


EXACT: dict[str, Callable[..., torch.Tensor]] = {
    "NEGATIVE": torch.neg,
    "SQUARE": torch.square,
    "SUM": torch.add,
    "DIFFERENCE": torch.sub,
    "PRODUCT": torch.mul,
    "QUOTIENT": torch.div,
}
TWO = ["SUM", "DIFFERENCE", "PRODUCT", "QUOTIENT"]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("name", EXACT)
def test_results_are_rounded_as_torch_rounds_them(name: str, dtype: torch.dtype) -> None:
    operation, reference = getattr(elementwise, name), EXACT[name]
    left, right = (drawn(seed, 70, 1041).to(dtype) for seed in (1, 2))
    left[0, :9] = right[3, 5:14] = torch.tensor(SPECIAL).to(dtype)
    given = [left, right][: 2 if name in TWO else 1]
    expected = reference(*given)
    assert same(run(operation, given, expected), expected)
    if name in TWO:  # one number for all
        expected = reference(left, 0.25)
        assert same(run(operation, [left], expected, 0.25), expected)


@given(
    sizes=st.lists(st.integers(1, 21), min_size=1, max_size=4),
    orders=st.tuples(st.permutations(range(4)), st.permutations(range(4))),
    kept=st.lists(st.booleans(), min_size=4, max_size=4),
    name=st.sampled_from(TWO),
    seed=st.integers(0, 9),
)
def test_tensors_may_lie_as_they_like(
    sizes: list[int], orders: tuple[list[int], ...], kept: list[bool], name: str, seed: int
) -> None:
    """In any order of dimensions, with gaps, and the second as one number for a whole dimension."""

    def lying(sizes: list[int], order: list[int], seed: int) -> torch.Tensor:
        order = [each for each in order if each < len(sizes)]
        memory = drawn(seed, *(sizes[dim] + 1 for dim in order))
        within = memory[tuple(slice(sizes[dim]) for dim in order)]
        return within.permute([order.index(dim) for dim in range(len(sizes))])

    left = lying(sizes, orders[0], seed)
    small = [size if keep else 1 for size, keep in zip(sizes, kept, strict=False)]
    right = lying(small, orders[1], seed + 1)
    expected = EXACT[name](left, right)
    assert same(run(getattr(elementwise, name), [left, right], expected), expected)


def test_types_may_differ() -> None:
    left, right = drawn(1, 3, 50).bfloat16(), drawn(2, 50)
    assert same(run(elementwise.PRODUCT, [left, right], left * right), left * right)
    for source, dtype in ((right, torch.float16), (left, torch.float32)):
        assert same(run(elementwise.COPY, [source], source.to(dtype)), source.to(dtype))


def test_numbers_are_kept_between_two_others() -> None:
    values = torch.tensor([*SPECIAL, 6.5, -6.5])
    for bounds in ((-7.0, 7.0), (0.0, torch.inf), (-torch.inf, 1.0)):
        expected = values.clamp(*bounds)
        assert same(run(elementwise.CLAMP, [values], expected, *bounds), expected)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "LOGISTIC": torch.sigmoid,
    "SILU": F.silu,
    "GELU_TANH": lambda values: F.gelu(values, approximate="tanh"),
    "TANH": torch.tanh,
    "SOFTPLUS": F.softplus,
    "EXPONENTIAL": torch.exp,
    "INVERSE_ROOT": torch.rsqrt,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_near_torchs(name: str) -> None:
    values = torch.cat([torch.linspace(-80, 80, 4001), drawn(3, 4000), 1e-4 * drawn(4, 99)])
    values = values.abs() + 1e-9 if name == "INVERSE_ROOT" else values
    exact = FUNCTIONS[name](values.double())
    error = (computed(getattr(elementwise, name), values).double() - exact).abs()
    # Four steps of a float32; of what cancels, of one.
    near_zero = 2.5e-7 if name in ("TANH", "GELU_TANH") else 1e-37
    assert bool((error <= 5e-7 * exact.abs() + near_zero).all())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_what_is_no_usual_number_are_torchs(name: str) -> None:
    values = torch.tensor([torch.inf, torch.nan, 0.0, 30.0])
    expected = FUNCTIONS[name](values)
    torch.testing.assert_close(
        computed(getattr(elementwise, name), values), expected, equal_nan=True
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_element_has_the_same_bits_wherever_it_stands(name: str) -> None:
    operation, values = getattr(elementwise, name), drawn(5, 2, 3, 4, 5, 37).abs()
    together = computed(operation, values)
    assert together.shape == values.shape
    turned = computed(operation, values.transpose(1, 4)).transpose(1, 4)
    alone = torch.stack([computed(operation, each[None])[0] for each in values.flatten()[:80]])
    assert torch.equal(together, turned)
    assert torch.equal(together.flatten()[:80], alone)


def test_others_are_left_to_torch() -> None:
    plain = torch.zeros(4, 16)
    assert recorded(elementwise.SUM, plain, plain, plain) is not None
    assert recorded(elementwise.SUM, plain.double(), plain, plain) is None
    assert recorded(elementwise.SUM, plain, plain.long(), plain) is None
    assert recorded(elementwise.COPY, plain[:0], None, plain[:0]) is None
    assert recorded(elementwise.COPY, plain[:, ::2], None, plain[:, ::2]) is None
    deep = plain.view(2, 2, 2, 2, 4)
    assert recorded(elementwise.COPY, deep, None, deep) is None
