"""Linear layers: weights packed once on CPUs, and in exact mode calls that keep a row's bits.

torch's ``F.linear`` re-packs a bf16 weight at every call; oneDNN's prepacked form reads it once and
gives the same bits (measured here: 1.3-1.5x as fast at 1-16 rows). What bits a row gets depends on how
many rows share the call, and that depends on machine, type and shape. Prepacked, it is usually the single
row alone that differs: on CPUs with AMX, with AVX-512 and with AVX2, in fp32, fp16 and bf16. MKL's fp32
products, which ``F.linear`` uses, change from 12-16 rows on, and with AVX2 by a row's place in the call.
So in exact mode every type is packed, the span of row counts that share their bits is measured at load,
and inputs go through in pieces within that span.

On GPUs the library's kernels follow the number of rows, too, and there is a second product to choose
from: a program of our own, whose sums have one order (``engine.kernels.triton``). The same probe measures
both, and of those that keep a row's bits the faster is taken.

On CPUs with AVX-512 there is a second one, too, whose sums have one order
(``engine.kernels.float_product``): few rows take little more than reading the weights, many about as long
as oneDNN's. Which of the two a layer gets is a rule, and not a matter of timing: another start must write
the same texts.

Models also multiply by weights that are no layer: routers, and experts kept in one tensor.
``SteadyProducts`` does the same for these.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from engine.kernels import find_kernel
from engine.kernels.triton import missing_for
from engine.kernels.triton.row_ops import row_product
from engine.machine import has_tiles, is_packable

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_PROBED_ROWS = (2, 3, 4, 5, 6, 8, 12, 13, 16, 17, 24, 31, 32, 33, 48, 64, 128, 256, 512, 1024)
# Where a span of equal bits may begin: fewer rows are padded to so many, about as cheap as a single
# row where weights bound the time.
_LEAST_ROWS = (1, 2, 4)
# Spans this long are worth having.
_SHORTEST_SLICE = 16
_LARGE_WEIGHT = 1 << 25
_LARGE_WEIGHT_ROWS = 64
_MOST_DISTINCT_ROWS = 64
_ENOUGH_SUMS = 8192
"""Sums of the probe, in distinct rows: a difference shows in about every other one."""
_TIMED_ROWS = (1, 16, 256)
_REPEATS = 7
_CLEARLY_FASTER = 1.25
"""Another product than the library's gives other bits, so that a start should not choose by a hair what
the last one did not."""


class RowSpan(NamedTuple):
    """Row counts of a call, both ends included, that give every row the same bits."""

    least: int
    most: int


TILES = RowSpan(4, 4)
"""Always exactly so many rows: every call has the same shape, only a row's place in it differs."""

Product = Callable[[torch.Tensor], torch.Tensor]
"""``[rows, in_features]`` to ``[rows, out_features]``."""


LinearProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""As ``F.linear``: of rows, a weight ``[out_features, in_features]`` and a bias or None."""


def library_product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return F.linear(rows, weight, bias)


def fixed_order_product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """By a Triton program (``engine.kernels.triton.row_ops``)."""
    result: torch.Tensor = row_product(rows, weight, bias)
    return result


def one_order_product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """By a compiled kernel (``engine.kernels.float_product``), which layers pack weights for once."""
    result: torch.Tensor = find_kernel("float_product").pack(weight, bias).times(rows)
    return result


def usual_product(
    in_features: int, out_features: int, dtype: torch.dtype, device: torch.device
) -> LinearProduct:
    """What a layer on a CPU multiplies by, whatever the determinism: our kernel where it can, except for
    types of 16 bits where oneDNN has the tiles of AMX, many times as fast for prompts."""
    kernel = find_kernel("float_product") if device.type == "cpu" else None
    if kernel is None or not kernel.can_multiply(in_features, out_features, dtype):
        return library_product
    return library_product if dtype.itemsize == 2 and has_tiles() else one_order_product


def products_for(device: torch.device) -> tuple[LinearProduct, ...]:
    """What exact mode chooses from there."""
    if device.type != "cuda" or missing_for(device) is not None:
        return (library_product,)
    return (library_product, fixed_order_product)


class Call(NamedTuple):
    """How a layer multiplies. ``span``: inputs are cut into calls of so many rows, and padded where there
    are fewer; None: as they come. ``product``: where weights are not packed."""

    span: RowSpan | None = None
    product: LinearProduct = library_product


class PackedLinear(nn.Module):
    """``nn.Linear`` over a weight packed for oneDNN or for our kernel, or over the weight itself where
    oneDNN does not take its type. ``floats``: packed for our kernel, or None."""

    def __init__(self, linear: nn.Linear, call: Call | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        weight = linear.weight.detach()
        self.span, self._product = call or Call()
        is_library = self._product is library_product
        self.is_packed = is_library and is_packable(weight.device, weight.dtype)
        self.floats: Any = None
        if self.is_packed:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        elif self._product is one_order_product:
            self.floats = find_kernel("float_product").pack(weight, linear.bias)
            self.packed = self.floats.weights
        else:
            self.packed = weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # [..., in_features]
        rows = inputs.numel() // self.in_features
        if self.span is None or self.span.least <= rows <= self.span.most:
            return self._apply_packed(inputs)
        result = in_pieces(self._apply_packed, inputs.reshape(rows, self.in_features), self.span)
        return result.view(*inputs.shape[:-1], self.out_features)

    def _apply_packed(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.floats is not None:
            rows = self.floats.times(inputs.reshape(-1, self.in_features))
            return rows.view(*inputs.shape[:-1], self.out_features)  # type: ignore[no-any-return]
        if not self.is_packed:
            return self._product(inputs, self.packed, self.bias)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            inputs, self.packed, self.bias, "none", [], ""
        )
        return result


def in_pieces(product: Product, inputs: torch.Tensor, span: RowSpan) -> torch.Tensor:
    """``product`` of ``[rows, in_features]`` in calls of row counts within the span."""
    parts = []
    for part in inputs.split(span.most):
        missing = max(0, span.least - part.shape[0])
        parts.append(product(F.pad(part, (0, 0, 0, missing)))[: part.shape[0]])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@torch.inference_mode()
def steady_call(
    in_features: int,
    out_features: int,
    most: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device = _CPU,
    products: Sequence[LinearProduct] | None = None,
) -> Call | None:
    """How a layer of this shape is to multiply up to ``most`` rows, for rows to keep their bits.
    ``products``: what to choose from; None: what there is for the device."""
    weight, rows = cancelling(in_features, out_features, dtype, device)
    linear = nn.Linear(in_features, out_features, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if products is None:
        usual = Call(None, usual_product(in_features, out_features, dtype, device))
        if usual.product is one_order_product and _has_one_order(
            PackedLinear(linear, usual), rows, most
        ):
            return usual
    named = products_for(device) if products is None else products
    return choose_call(
        [(each, PackedLinear(linear, Call(None, each))) for each in named], rows, most
    )


def _has_one_order(product: Product, rows: torch.Tensor, most: int) -> bool:
    """Whether no probed row count changes a row's bits: then none does."""
    span = stable_span(product, rows, most)
    return span is not None and span.least == 1 and span.most >= min(most, _PROBED_ROWS[-1])


def choose_call(
    products: Sequence[tuple[LinearProduct, Product]], rows: torch.Tensor, most: int
) -> Call | None:
    """Of products that keep a row's bits in some span, the fastest; None: there is none. ``products``:
    each with itself over a probe's weight; ``rows`` as in ``stable_span``."""
    spans = [(stable_span(bound, rows, most), product, bound) for product, bound in products]
    return fastest_call(
        [(Call(span, product), bound) for span, product, bound in spans if span is not None],
        rows,
        most,
    )


def fastest_call(
    found: Sequence[tuple[Call, Product]], rows: torch.Tensor, most: int
) -> Call | None:
    """The first one unless another is clearly faster, as timed where there are several."""
    if len(found) < 2:
        return found[0][0] if found else None
    costs = [_cost(call, bound, rows, most) for call, bound in found]
    best = min(range(len(found)), key=costs.__getitem__)
    return found[0 if costs[0] <= costs[best] + math.log(_CLEARLY_FASTER) else best][0]


def _cost(call: Call, bound: Product, rows: torch.Tensor, most: int) -> float:
    """Mean logarithm of the seconds that it takes few rows, some and many."""
    assert call.span is not None
    span, costs = call.span, []
    for count in sorted({min(count, most) for count in _TIMED_ROWS}):
        given = _repeated(rows, count)
        times = []
        for _ in range(_REPEATS):
            _wait(rows.device)
            start = time.perf_counter()
            in_pieces(bound, given, span)
            _wait(rows.device)
            times.append(time.perf_counter() - start)
        costs.append(math.log(median(times)))
    return sum(costs) / len(costs)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def stable_span(product: Product, rows: torch.Tensor, most: int) -> RowSpan | None:
    """The first long enough span of probed row counts, up to ``most``, that share their bits; else tiles;
    None where a row's bits depend even on its place in a tile. A row has to come out with the same bits
    alone, at every place and in any company; ``rows`` ``[num_rows, in_features]`` are repeated to fill a
    call."""
    most = max(1, min(most, _PROBED_ROWS[-1]))
    counts = sorted({1, most, *(count for count in _PROBED_ROWS if count < most)})
    outputs: dict[int, torch.Tensor] = {}

    def among(count: int) -> torch.Tensor:
        if count not in outputs:
            outputs[count] = product(_repeated(rows, count))
        return outputs[count]

    for least in _LEAST_ROWS:
        alone = _alone(product, rows, least)
        last = 0
        for count in counts:
            if count < least:
                continue
            if not torch.equal(among(count), _repeated(alone, count)):
                break
            last = count
        if last >= min(most, _SHORTEST_SLICE):
            return RowSpan(least, last)
    alone = _alone(product, rows, TILES.least)
    for shift in range(TILES.least):
        rolled = rows.roll(shift, 0)
        if not torch.equal(in_pieces(product, rolled, TILES), alone.roll(shift, 0)):
            return None
    return TILES


def _alone(product: Product, rows: torch.Tensor, least: int) -> torch.Tensor:
    return torch.cat([in_pieces(product, row, RowSpan(least, least)) for row in rows.split(1)])


def _repeated(rows: torch.Tensor, count: int) -> torch.Tensor:
    return rows.repeat(-(-count // rows.shape[0]), 1)[:count].contiguous()


def cancelling(
    in_features: int, out_features: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight ``[out_features, in_features]`` and rows ``[num_rows, in_features]`` whose products cancel
    in pairs.

    Rounding hides most differences in the order of summation, in bf16 above all. Of sums that cancel,
    only their rounding errors are left, and no other order repeats these.
    """
    generator = torch.Generator().manual_seed(0)
    num_rows = max(4, min(_MOST_DISTINCT_ROWS, _ENOUGH_SUMS // out_features))
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    rows = torch.randn(num_rows, in_features, generator=generator).to(dtype)
    order = torch.randperm(in_features, generator=generator)
    half = in_features // 2
    first, second = order[:half], order[half : 2 * half]
    weight[:, second] = weight[:, first]
    rows[:, second] = -rows[:, first]
    return weight.to(device), rows.to(device)


def _within_reason(in_features: int, out_features: int, most: int) -> int:
    """Vocabulary-sized heads see few rows; probing them for a whole chunk would take half a minute."""
    large = in_features * out_features > _LARGE_WEIGHT
    return min(most, _LARGE_WEIGHT_ROWS) if large else most


class SteadyProducts(TorchFunctionMode):
    """Within it, products of rows with a matrix are cut into calls that keep a row's bits. Spans are
    probed when a shape is first seen, which the checks at load see to; ``failures`` names those that
    have none."""

    def __init__(
        self,
        most_rows: int,
        failures: set[str],
        products: Sequence[LinearProduct] | None = None,
    ) -> None:
        super().__init__()
        self._most_rows = most_rows
        self._products = products
        self._calls: dict[tuple[object, ...], Call] = {}
        self._failures = failures

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func in _MATMULS and args[1].dim() == 2:
            return self._linear(args[0], args[1].T)
        if func in _WITH_TAILS:
            width = args[0].shape[-1]
            return func(F.pad(args[0], (0, -width % 64)), *args[1:], **kwargs)[..., :width]
        if func in _OTHER_PRODUCTS:
            self._failures.add(f"products by {func.__name__}")
        return func(*args, **kwargs)

    def _linear(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``weight``: ``[out_features, in_features]``, as it lies or transposed."""
        flat = rows.reshape(-1, rows.shape[-1])
        span, product = self._call(weight, bias)
        assert span is not None
        result = in_pieces(lambda part: product(part, weight, bias), flat, span)
        return result.view(*rows.shape[:-1], weight.shape[0])

    def _call(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Call:
        key = (weight.shape, weight.stride(1) == 1, weight.dtype, bias is None)
        if key not in self._calls:
            out_features, in_features = weight.shape
            probe, rows = cancelling(in_features, out_features, weight.dtype, weight.device)
            if weight.stride(1) != 1:
                probe = probe.T.contiguous().T
            none = None if bias is None else torch.zeros_like(bias)
            most = _within_reason(in_features, out_features, self._most_rows)
            products = products_for(weight.device) if self._products is None else self._products
            call = choose_call([(each, _bound(each, probe, none)) for each in products], rows, most)
            if call is None:
                self._failures.add(_name(in_features, out_features))
            self._calls[key] = call or Call(TILES)
        return self._calls[key]


def _bound(product: LinearProduct, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    return lambda rows: product(rows, weight, bias)


_MATMULS = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)
_WITH_TAILS = (torch.sigmoid, torch.Tensor.sigmoid, F.silu)
"""Of a length that vectors do not divide, torch computes the rest in another way; which elements are the
rest depends on the number of rows."""
_OTHER_PRODUCTS = (*_MATMULS, torch.addmm, torch.bmm, torch.baddbmm, torch.einsum, F.grouped_mm)


def _name(in_features: int, out_features: int) -> str:
    return f"products of {in_features} by {out_features}"


class PackedLayers(NamedTuple):
    """``failures``: products that no way of calling keeps exact, in words; products with weights outside
    of layers join when they are first computed."""

    num_layers: int
    failures: set[str]


def pack_linears(
    model: nn.Module,
    most_rows: int,
    exact: bool,
    products: Sequence[LinearProduct] | None = None,
) -> PackedLayers:
    """Replace every plain ``nn.Linear`` of the model, and transformers' ``Conv1D``, in place.
    ``products``: what exact mode chooses from; None: what there is for the model's device.

    The unpacked weight is dropped with its module; a tied head keeps the embedding and packs a copy.
    """
    calls: dict[tuple[int, int, torch.dtype], Call] = {}
    failures: set[str] = set()
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            linear = as_linear(child)
            if linear is None:
                continue
            sizes = (linear.in_features, linear.out_features)
            shape = (*sizes, linear.weight.dtype)
            if not exact:
                calls[shape] = Call(None, usual_product(*shape, linear.weight.device))
            elif shape not in calls:
                most = _within_reason(*sizes, most_rows)
                weight = linear.weight
                call = steady_call(*sizes, most, weight.dtype, weight.device, products)
                if call is None:
                    failures.add(_name(*sizes))
                calls[shape] = call or Call(TILES)
                logger.info("%s: %s, %s", _name(*sizes), *_described(calls[shape]))
            setattr(parent, name, PackedLinear(linear, calls[shape]))
            replaced += 1
    if exact:
        _steady(model, SteadyProducts(most_rows, failures, products))
    return PackedLayers(replaced, failures)


def _described(call: Call) -> tuple[str, str]:
    rows = "any number of rows"
    if call.span is not None:
        rows = f"{call.span.least} to {call.span.most} rows at a time"
    return call.product.__name__.replace("_", " "), rows


def as_linear(module: nn.Module) -> nn.Linear | None:
    """A plain linear layer as it is, transformers' ``Conv1D`` as one; None: it is something else."""
    if type(module) is nn.Linear:
        return module
    if type(module) is not Conv1D:
        return None
    weight = module.weight.detach()
    in_features, out_features = weight.shape
    linear = nn.Linear(in_features, out_features, device="meta")
    linear.weight = nn.Parameter(weight.T.contiguous(), requires_grad=False)
    linear.bias = module.bias
    return linear


def _steady(model: nn.Module, products: SteadyProducts) -> None:
    """Run modules that multiply by weights of their own under ``products``, experts one by one."""
    if getattr(model, "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation("eager")  # type: ignore[operator]
    for module in model.modules():
        own = [each for each in module.parameters(recurse=False) if each.dim() >= 2]
        if own and not isinstance(module, nn.Embedding):
            vars(module)["forward"] = partial(_run_within, products, module.forward)


def _run_within(
    products: SteadyProducts, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with products:
        return forward(*args, **kwargs)
