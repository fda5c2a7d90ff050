"""Linear layers over weights that are packed once, which give a row the same bits in any batch.

On CPUs a compiled kernel of our own multiplies (``engine.kernels.float_product``), on GPUs, in exact
mode, a Triton program (``engine.kernels.triton.row_ops``). Both add a row's features in one order,
whatever rows share the call.

CPUs with AMX multiply 16-bit types by oneDNN, whose tiles take a prompt in a tenth of the time. There a
row usually has different bits alone than among others. So in exact mode a call has at least two rows,
and one probe determines whether rows then keep their bits, in calls of any number of rows or only of
fewer; if they do not, our kernel multiplies.

A layer's product is chosen by a rule, and nothing is timed, so every start generates the same texts.

Models also multiply by weights outside layers: routers, and experts of other forms than
``engine.model.experts`` knows. ``OneOrderProducts`` handles these in exact mode.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from engine.kernels import KINDS
from engine.kernels.triton import missing_for
from engine.kernels.triton.row_ops import row_product
from engine.machine import has_tiles, onednn_packs
from engine.model.experts import is_experts, pack_float_experts
from engine.model.layers import PackedLinear, PackedWeight, as_linear, is_plain
from engine.model.row_functions import REPLACED, replaced

_CPU = torch.device("cpu")
_CHANNELS = 64
"""Output channels that the kernel takes at least."""
_LEAST_ROWS = 2
_PROBED_ROWS = (2, 3, 4, 5, 6, 8, 12, 13, 16, 17, 24, 31, 32, 33, 48, 64, 128, 256, 512, 1024)
_FEWER_ROWS = 128
"""The most rows of a call if larger calls change rows' bits: oneDNN then divides some sums among
threads."""
_LARGE_WEIGHT = 1 << 25
_MOST_ROWS_OF_LARGE = 64
"""Vocabulary-sized heads see few rows; to probe them for a whole chunk would take half a minute."""
_MOST_DISTINCT_ROWS = 64
_ENOUGH_SUMS = 8192
"""Sums of the probe, in distinct rows: a difference shows in about every other one."""


class PaddedFloats:
    """A weight packed for our kernel with zeros added, where it has fewer channels or features than the
    kernel takes."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        from engine.kernels.float_product import pack

        self._out_features, self._in_features = weight.shape
        channels, self._features = max(0, _CHANNELS - self._out_features), self._in_features % 2
        wide = F.pad(weight, (0, self._features, 0, channels))
        self._packed = pack(wide, None if bias is None else F.pad(bias, (0, channels)))

    @property
    def weight(self) -> torch.Tensor:
        """See ``PackedWeight``."""
        return self._packed.weight[: self._out_features, : self._in_features]

    def times(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``PackedWeight``."""
        rows = F.pad(rows, (0, self._features)) if self._features else rows
        product = self._packed.times(rows)
        return product[:, : self._out_features].contiguous()


class OneDnnWeight:
    """A weight packed for oneDNN, which is called with ``least`` to ``most`` rows: fewer are padded, more
    are cut into several calls."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        least: int = 1,
        most: int = sys.maxsize,
    ) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self._bias, self._least, self._most = bias, least, most

    @property
    def weight(self) -> torch.Tensor:
        """See ``PackedWeight``."""
        plain: torch.Tensor = self._packed.to_dense()
        return plain

    def times(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``PackedWeight``."""
        if self._least <= len(rows) <= self._most:
            return self._multiply(rows)
        return torch.cat([self._padded(part) for part in rows.split(self._most)])

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        missing = max(0, self._least - len(rows))
        return self._multiply(F.pad(rows, (0, 0, 0, missing)))[: len(rows)]

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self._bias, "none", [], ""
        )
        return result


class DeviceWeight:
    """A weight as it is, multiplied by a Triton program."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def times(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``PackedWeight``."""
        result: torch.Tensor = row_product(rows, self.weight, self.bias)
        return result


def pack_floats(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
    """Returns a weight ``[out_features, in_features]`` of a CPU packed for our kernel."""
    from engine.kernels.float_product import pack

    if weight.shape[0] < _CHANNELS or weight.shape[1] % 2:
        return PaddedFloats(weight, bias)
    packed: PackedWeight = pack(weight, bias)
    return packed


def pack_weight(
    weight: torch.Tensor, bias: torch.Tensor | None, most_rows: int, exact: bool
) -> PackedWeight:
    """Returns a layer's weight packed for what multiplies it on its device. ``exact``: calls of any
    number of rows up to ``most_rows`` have to give a row the same bits."""
    if weight.device.type != "cpu":
        return DeviceWeight(weight, bias)
    if not has_tiles() or not onednn_packs(weight.dtype):
        return pack_floats(weight, bias)
    if not exact:
        return OneDnnWeight(weight, bias)
    out_features, in_features = weight.shape
    is_large = in_features * out_features > _LARGE_WEIGHT
    most = min(most_rows, _MOST_ROWS_OF_LARGE if is_large else _PROBED_ROWS[-1])
    for limit in sorted({most, min(most, _FEWER_ROWS)}, reverse=True):
        if onednn_keeps_bits(in_features, out_features, weight.dtype, limit):
            return OneDnnWeight(weight, bias, _LEAST_ROWS, limit)
    return pack_floats(weight, bias)


@cache
def onednn_keeps_bits(in_features: int, out_features: int, dtype: torch.dtype, most: int) -> bool:
    """Whether oneDNN's product of these sizes gives rows the same bits in calls of 2 to ``most`` rows."""
    weight, rows = cancelling(in_features, out_features, dtype, _CPU)
    return keeps_bits(OneDnnWeight(weight, None, _LEAST_ROWS, most), rows, most)


@torch.inference_mode()
def keeps_bits(packed: PackedWeight, rows: torch.Tensor, most: int) -> bool:
    """Whether ``rows`` ``[num_rows, in_features]``, repeated to fill calls of up to ``most`` rows, have
    the bits in each of these that they have alone."""
    alone = torch.cat([packed.times(row) for row in rows.split(1)])
    counts = {most, *(count for count in _PROBED_ROWS if count < most)}
    return all(
        torch.equal(packed.times(_repeated(rows, count)), _repeated(alone, count))
        for count in sorted(counts)
    )


def _repeated(rows: torch.Tensor, count: int) -> torch.Tensor:
    return rows.repeat(-(-count // rows.shape[0]), 1)[:count].contiguous()


def cancelling(
    in_features: int, out_features: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a weight ``[out_features, in_features]`` and rows ``[num_rows, in_features]`` whose
    products cancel in pairs.

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


def pack_linears(model: nn.Module, most_rows: int, exact: bool) -> set[str]:
    """Replaces every plain ``nn.Linear`` of the model, transformers' ``Conv1D`` and experts, in place.
    ``most_rows``: of a call. Returns products that are not ``exact`` though they are to be, in words;
    those with weights outside of layers join when they are first computed.

    The unpacked weight is dropped with its module; a tied head keeps the embedding and packs a copy.
    """
    device = next((each.device for each in model.parameters()), _CPU)
    missing = missing_for(device) if device.type == "cuda" else None
    if missing is not None:
        return {f"products by torch's library: {missing}"}
    # By their names, which keep no layer that is replaced.
    for name in [name for name, each in model.named_modules() if is_experts(each)]:
        experts = pack_float_experts(model.get_submodule(name))
        if experts is not None:
            model.set_submodule(name, experts)
    for name in [name for name, _ in model.named_modules(remove_duplicate=False) if name]:
        module: Any = model.get_submodule(name)
        if is_plain(module) and module.weight.dtype in KINDS:
            linear = as_linear(module)
            packed = pack_weight(linear.weight.detach(), linear.bias, most_rows, exact)
            layer = PackedLinear(linear.in_features, linear.out_features, packed, linear.bias)
            model.set_submodule(name, layer)
    failures: set[str] = set()
    if exact:
        _steady(model, failures)
    return failures


class Experts:
    """Packed experts in the place of a parameter that holds them all, ``[experts, in_features,
    out_features]``, where a module multiplies with all at once."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.shape = weights.shape
        self._experts = [pack_floats(weight.T, None) for weight in weights]

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        """To torch an operand like a tensor; ``OneOrderProducts`` computes what it is in."""
        return NotImplemented

    def times_each(self, rows: torch.Tensor) -> torch.Tensor:
        """Computes ``torch.bmm`` of ``rows`` ``[experts, rows, in_features]`` with them."""
        pairs = zip(rows, self._experts, strict=True)
        return torch.stack([packed.times(each) for each, packed in pairs])


class _Mode(TorchFunctionMode, ABC):
    """A mode that computes torch's functions in its own way."""

    @abstractmethod
    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what the function returns."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        return self.compute(func, args, kwargs or {})


class OneOrderProducts(_Mode):
    """A mode for a ``module``, in which products of rows with a matrix add a row's features in one order.
    ``failures`` names other products, which do not."""

    def __init__(self, module: nn.Module, failures: set[str]) -> None:
        super().__init__()
        self._module, self._failures = module, failures
        self._packed: dict[tuple[int, int], tuple[Any, Any, PackedWeight]] = {}
        """Weights of the module's own by their identities and their biases'. These are kept beside them,
        so that no other tensor gets an identity that is known."""
        self._converted: dict[tuple[Any, ...], nn.Parameter] = {}
        """Own weights as other types, by what made them."""

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _CONVERSIONS and isinstance(args[0], nn.Parameter):
            return self._convert(func, args, kwargs)
        if func is F.linear:
            return self._product(*args, **kwargs)
        if func in _MATMULS and args[1].dim() == 2:
            return self._product(args[0], args[1].T)
        if func in _MATMULS and isinstance(args[0], nn.Parameter) and args[0].dim() == 2:
            return self._product(args[1].mT, args[0]).mT
        if func is torch.bmm:
            experts = _packed_whole(self._module, args[1])
            if experts is not None:
                return experts.times_each(args[0])
        if func in _OTHER_PRODUCTS:
            self._failures.add(f"products by {func.__name__}")
        return func(*args, **kwargs)

    def _convert(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns an own weight as another type, made once where it is said which."""
        if any(isinstance(each, torch.Tensor) for each in (*args[1:], *kwargs.values())):
            return func(*args, **kwargs)
        key = func, *args, *kwargs.items()
        if key not in self._converted:
            self._converted[key] = nn.Parameter(func(*args, **kwargs), requires_grad=False)
        return self._converted[key]

    def _product(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes ``F.linear``."""
        product = self._pack(weight, bias).times(rows.reshape(-1, rows.shape[-1]))
        return product.view(*rows.shape[:-1], product.shape[-1])

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
        """Returns a weight packed: once if it is a parameter, else anew, since it may change."""
        kept = self._packed.get((id(weight), id(bias)))
        if kept is not None:
            return kept[2]
        pack = DeviceWeight if weight.device.type != "cpu" else pack_floats
        packed = pack(weight, bias)
        if isinstance(weight, nn.Parameter):
            self._packed[id(weight), id(bias)] = weight, bias, packed
        return packed


def _packed_whole(module: nn.Module, weights: object) -> Experts | None:
    """Returns experts that a module multiplies all at once, packed in the place of its parameter the
    first time; None: ``weights`` are not such."""
    if isinstance(weights, Experts):
        return weights
    for name, own in list(module.named_parameters(recurse=False)):
        if own is weights and own.dtype in KINDS and own.device.type == "cpu":
            delattr(module, name)
            setattr(module, name, Experts(own.detach()))
            packed: Experts = getattr(module, name)
            return packed
    return None


_CONVERSIONS = (torch.Tensor.to, torch.Tensor.type, torch.Tensor.float)
_MATMULS = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)
_SIGMOIDS = (torch.sigmoid, torch.Tensor.sigmoid, F.gelu, F.mish, F.silu, F.softplus)
_EXPONENTIALS = (F.elu, F.celu, torch.exp2, torch.Tensor.exp2, torch.rsqrt, torch.Tensor.rsqrt)
_WITH_TAILS = {*_SIGMOIDS, *_EXPONENTIALS}
"""Functions that torch computes in another way for the rest of a length that vectors do not divide; which
elements are the rest depends on the number of rows. They run in whole vectors where no kernel does."""
_VECTORS = 64
_OTHER_PRODUCTS = (*_MATMULS, torch.addmm, torch.bmm, torch.baddbmm, torch.einsum, F.grouped_mm)


class RowFunctions(_Mode):
    """A mode in which elements and rows are computed alike wherever in a call they stand."""

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = replaced(func, args, kwargs)
        if result is not None:
            return result
        if func not in _WITH_TAILS or not args:
            return func(*args, **kwargs)
        values = args[0]
        width = values.shape[-1] if values.dim() else 1
        rows = values.contiguous().view(values.numel() // max(width, 1), width)
        padded = func(F.pad(rows, (0, -width % _VECTORS)), *args[1:], **kwargs)
        return padded[:, :width].reshape(values.shape)


class _Noting(RowFunctions):
    """Notes which modules compute ``RowFunctions``, and which multiply by small weights of layers."""

    def __init__(self, running: list[nn.Module]) -> None:
        super().__init__()
        self._running = running
        self.functions: set[nn.Module] = set()
        self.products: set[nn.Module] = set()

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _WITH_TAILS or func in REPLACED:
            self.functions.add(self._running[-1])
        elif func is F.linear and args[1].numel() <= _LARGE_WEIGHT:
            self.products.add(self._running[-1])
        return super().compute(func, args, kwargs)


def _watch_first(model: nn.Module, failures: set[str]) -> None:
    """Has the first forward find the modules that compute what ``RowFunctions`` does, or with weights of
    their layers: from then on these run in such modes."""
    own, before = model.forward, vars(model).get("forward")
    running = [model]
    noting = _Noting(running)

    def begin(module: nn.Module, _: object) -> None:
        running.append(module)

    def end(*_: object) -> None:
        running.pop()

    def first(*args: Any, **kwargs: Any) -> Any:
        # A twin of the model's that is made later has a forward of its own.
        vars(model).pop("forward", None)
        if before is not None:
            vars(model)["forward"] = before
        handles = [each.register_forward_pre_hook(begin) for each in model.modules()]
        handles += [each.register_forward_hook(end) for each in model.modules()]
        try:
            with noting:
                return own(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
            _wrap(model, noting.products, lambda module: OneOrderProducts(module, failures))
            _wrap(model, noting.functions, lambda _: RowFunctions())

    vars(model)["forward"] = first


def _wrap(
    model: nn.Module, found: set[nn.Module], mode: Callable[[nn.Module], TorchFunctionMode]
) -> None:
    kinds = {type(module) for module in found}  # not every expert was chosen
    for module in model.modules():
        is_alike = type(module) in kinds and "forward" not in vars(module)
        if module in found or is_alike:
            vars(module)["forward"] = partial(_run_within, mode(module), module.forward)


def _steady(model: nn.Module, failures: set[str]) -> None:
    """Runs modules that multiply by their own weights under ``OneOrderProducts``, and modules with
    vector remainders in whole vectors. transformers' experts are left alone on other devices, where
    they are computed one by one."""
    if getattr(model, "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation("eager")  # type: ignore[operator]
    for module in model.modules():
        own = [each for each in module.parameters(recurse=False) if each.dim() >= 2]
        if own and not isinstance(module, nn.Embedding):
            products = OneOrderProducts(module, failures)
            vars(module)["forward"] = partial(_run_within, products, module.forward)
    if all(each.device.type == "cpu" for each in model.parameters()):
        _watch_first(model, failures)


def _run_within(
    mode: TorchFunctionMode, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with mode:
        return forward(*args, **kwargs)
