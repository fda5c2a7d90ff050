"""A layer's experts over packed weights, in the place of transformers' own module.

transformers has one form for them (``integrations/moe.py``): a module that keeps two parameters of three
dimensions and is called with rows, the experts chosen for each, and their weights. Here all pairs of a
row and an expert go through three kernels: a product whose rows are those of each expert together, one
more that gates what it reads (on a device a pass before it does), and a sum of each row's experts in the
order in which they were chosen (``engine.kernels.routes``). A row's bits depend on nothing but the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engine.kernels import KINDS, LANES
from engine.kernels.grouped_weight import GroupedWeight, UnpackableError
from engine.kernels.triton import joint_ops
from engine.model.fused import computed
from engine.model.product import GroupedProduct, kernels_for, kernels_of
from engine.states.seam import gates_of
from engine.weights.experts import ExpertWeights, StoredExperts, expert_sizes
from engine.weights.layer import fixed

if TYPE_CHECKING:
    from engine.kernels.float_product import PackedFloats
    from engine.kernels.routes import Routes
    from engine.kernels.row_records import Gate

_UP, _DOWN = "gate_up_proj", "down_proj"
_LEAST_CHANNELS = 64
_GATE_TOLERANCE = 2e-6


class FloatProduct:
    """Products of rows with ``packed`` experts; ``out_features`` of them have a use."""

    def __init__(self, packed: PackedFloats, out_features: int) -> None:
        from engine.kernels.row_records import gate_rows

        self.packed, self.out_features, self._gate_rows = packed, out_features, gate_rows
        self.in_features = packed.in_features

    def __call__(
        self, rows: torch.Tensor, gate: Gate | None = None, routes: Routes | None = None
    ) -> torch.Tensor:
        """See ``GroupedProduct``."""
        rows = rows if gate is None else self._gate_rows(rows, gate)
        return self.packed.times(rows, routes)[:, : self.out_features]


class PackedExperts(nn.Module):
    """Experts in the place of ``own``, which computes gates that kernels do not know. ``first``: one
    product whose channels are the gate's and then the others, or one of each; of rows without a gate one.
    ``gates``: whether ``first`` has gated them already. ``method``, ``scheme``: as of a
    ``GroupedLinear``, or nothing: floats."""

    def __init__(
        self,
        own: Any,
        first: list[Any],
        down: Any,
        gates: bool = False,
        method: str = "",
        scheme: str = "",
    ) -> None:
        super().__init__()
        kernels = kernels_of(down.packed)
        self.own, self.first, self.down = own, first, down
        self.method, self.scheme = method, scheme
        self._route, self._weighted_sum = kernels.route, kernels.weighted_sum
        gate = None if gates else kernel_gate(own, down.in_features)
        self._gate = gate if kernels.gates else None
        self._applies = not gates and self._gate is None
        self._activation = gate.activation if gate and not kernels.gates and len(first) == 1 else ""
        """Which a device's pass between products applies."""

    @property
    def num_experts(self) -> int:
        return int(self.down.packed.num_experts)

    @property
    def products(self) -> list[Any]:
        return [*self.first, self.down]

    def forward(
        self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """``rows`` ``[num_rows, hidden_size]``, ``chosen`` and ``weights`` ``[num_rows, num_chosen]``.
        Returns ``[num_rows, hidden_size]``."""
        own: Any = self.own
        routes = self._route(chosen, own.num_experts)
        if self._activation and rows.dtype == self.first[0].dtype:
            sums = self.first[0].sums(rows, routes)
            gated = joint_ops.gate_rows(sums, self._activation, rows.dtype)
            output = self.down(gated, routes=routes)
        else:
            output = self._unfused(rows, routes)
        if own.has_post_expert_norm:
            output = own.post_expert_norm(output)
        total: torch.Tensor = self._weighted_sum(output, weights, routes, rows.dtype)
        return total

    def _unfused(self, rows: torch.Tensor, routes: Any) -> torch.Tensor:
        parts = [product(rows, routes=routes) for product in self.first]
        both = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if self._applies:
            both = self._applied(both)
        output: torch.Tensor = self.down(both, self._gate, routes)
        return output

    def _applied(self, both: torch.Tensor) -> torch.Tensor:
        own: Any = self.own
        if own.has_gate and not own.is_concatenated:
            both = both.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        gated: torch.Tensor = (own._apply_gate if own.has_gate else own.act_fn)(both)
        return gated


def kernel_gate(own: Any, features: int) -> Gate | None:
    """Returns what a kernel gates as the module does, found out with random rows; None: it does
    otherwise, or the ``features`` between its products do not fill sixteens."""
    from engine.kernels.lanes import ACTIVATIONS
    from engine.kernels.row_records import Gate, gate_rows

    if not own.has_gate or not own.is_concatenated or features % LANES:
        return None
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-1, 2, 16, device="cpu")[:, None]
    both = sizes * torch.randn(16, 8 * LANES, generator=generator, device="cpu")
    expected = computed(own._apply_gate, both)
    if expected is None:
        return None
    for name in ACTIVATIONS:
        found = gate_rows(both, Gate(name, True))
        if bool(((found - expected).abs() <= _GATE_TOLERANCE * (1 + expected.abs())).all()):
            return Gate(name, True)
    return None


# --- floats ---


def own_weight(own: Any, name: str, expert: int) -> torch.Tensor:
    """Returns an expert's weight ``[out_features, in_features]``, of a gate's channels first."""
    weight: torch.Tensor = getattr(own, name).detach()[expert]
    return _gate_first(own, name, weight.T if own.is_transposed else weight)


def own_bias(own: Any, name: str) -> torch.Tensor | None:
    """Returns ``[num_experts, out_features]``, in the order of ``own_weight``."""
    bias = getattr(own, f"{name}_bias", None) if own.has_bias else None
    return None if bias is None else _gate_first(own, name, bias.detach().T).T


def _gate_first(own: Any, name: str, channels: torch.Tensor) -> torch.Tensor:
    if name != _UP or own.is_concatenated:
        return channels
    return torch.cat([channels[::2], channels[1::2]])


def is_experts(module: nn.Module) -> bool:
    """Whether it is transformers' module of experts, in floats."""
    return bool(expert_sizes(module))


def unrounded_layers(model: nn.Module) -> set[nn.Module]:
    """Returns linear layers that stay in their type where weights are rounded: few weights, which say how
    states decay, where rows go and how much experts count there."""
    return gates_of(model) | _routers_of(model)


def _routers_of(model: nn.Module) -> set[nn.Module]:
    blocks = [
        (model.get_submodule(name.rpartition(".")[0]), module.num_experts)
        for name, module in model.named_modules()
        if is_experts(module) or isinstance(module, PackedExperts)
    ]
    return {
        each
        for block, num_experts in blocks
        for each in block.modules()
        if isinstance(each, nn.Linear) and each.out_features <= num_experts
    }


def pack_float_experts(own: Any) -> PackedExperts | None:
    """Packs a module's experts of a CPU for our kernel, one by one; None: the kernel does not take them.
    The module loses its weights."""
    from engine.kernels.float_product import can_gate, pack_experts, pack_gated

    sizes = expert_sizes(own)
    weight = own.down_proj
    if weight.device.type != "cpu" or weight.dtype not in KINDS or not sizes:
        return None
    if any(features % 2 for _, features in sizes.values()):
        return None

    def packed(name: str, part: slice = slice(None)) -> FloatProduct:
        channels = len(range(sizes[name][0])[part])
        missing = (0, 0, 0, max(0, _LEAST_CHANNELS - channels))
        each = (
            nn.functional.pad(own_weight(own, name, expert)[part], missing)
            for expert in range(own.num_experts)
        )
        bias = own_bias(own, name)
        if bias is not None:
            bias = nn.functional.pad(bias[:, part], missing[2:])
        return FloatProduct(pack_experts(each, bias, own.num_experts), channels)

    names = list(sizes)
    gate, half = kernel_gate(own, sizes[_DOWN][1]), sizes[names[0]][0] // 2
    if gate is not None and half % _LEAST_CHANNELS == 0:
        both = packed(names[0], slice(half)).packed, packed(names[0], slice(half, None)).packed
        assert can_gate(*both)
        first = FloatProduct(pack_gated(*both, gate.activation), half)
        del both
    else:
        gate, first = None, packed(names[0])
    down = packed(_DOWN)
    _empty(own)
    return PackedExperts(own, [first], down, gate is not None)


def _empty(own: Any) -> None:
    for name in list(own._parameters):
        delattr(own, name)


# --- few bits ---


def grouped_experts(
    own: Any, weights: dict[str, ExpertWeights], method: str, dtype: torch.dtype, keeps_inputs: bool
) -> PackedExperts:
    """Returns experts over ``weights``, with products named as in ``StoredExperts``. Raises
    UnpackableError for weights without a kernel."""
    weights = dict(weights)
    down = weights.pop(_DOWN)
    scheme = ", ".join(dict.fromkeys(each.scheme for each in (*weights.values(), down)))
    try:
        first = [_product(_joined(list(weights.values())), own.num_experts, dtype, keeps_inputs)]
    except UnpackableError:
        first = [_product(each, own.num_experts, dtype, keeps_inputs) for each in weights.values()]
    # Sums of experts are rounded once.
    last = _product(down, own.num_experts, torch.float32, keeps_inputs)
    return PackedExperts(own, first, last, method=method, scheme=scheme)


def _joined(weights: list[ExpertWeights]) -> ExpertWeights:
    """Returns the weights of one product whose channels are those of several."""
    from engine.kernels.formats import CHANNELS

    if any(each.out_features % CHANNELS for each in weights[:-1]):
        raise UnpackableError("experts' halves are no whole blocks")
    biases = [each.bias for each in weights if each.bias is not None]
    return ExpertWeights(
        sum(each.out_features for each in weights),
        weights[0].in_features,
        lambda expert: chain.from_iterable(each.parts(expert) for each in weights),
        torch.cat(biases, 1) if biases else None,
        weights[0].scheme,
        packs=all(each.packs for each in weights),
    )


def _product(
    weights: ExpertWeights, num_experts: int, dtype: torch.dtype, keeps_inputs: bool
) -> GroupedProduct:
    if not weights.packs:
        raise UnpackableError("features in an order of each expert's own")
    parts = chain.from_iterable(weights.parts(expert) for expert in range(num_experts))
    first = next(parts)
    packed = kernels_for(first.codes.device).pack(
        chain([first], parts), weights.out_features, weights.in_features, weights.bias, num_experts
    )
    return GroupedProduct(packed, dtype, keeps_inputs=keeps_inputs)


def restored_experts(stored: StoredExperts, dtype: torch.dtype) -> nn.Module:
    """Returns the model's own module with the floats that ``stored`` weights mean, for what has no
    kernel."""
    own: Any = vars(stored)["own"]
    weights = stored.weights()
    groups = {_DOWN: [weights.pop(_DOWN)]}
    groups |= {_UP if own.has_gate else "up_proj": list(weights.values())}
    for name, group in groups.items():
        experts = []
        for expert in range(own.num_experts):
            weight = torch.cat([each.dequantized(expert, dtype) for each in group])
            weight = _gate_between(own, name, weight)
            experts.append(weight.T if own.is_transposed else weight)
        setattr(own, name, fixed(torch.stack(experts)))
        biases = [each.bias for each in group if each.bias is not None]
        if own.has_bias:
            bias = _gate_between(own, name, torch.cat(biases, 1).to(dtype).T).T
            setattr(own, f"{name}_bias", fixed(bias.contiguous()))
    found: nn.Module = own
    return found


def _gate_between(own: Any, name: str, channels: torch.Tensor) -> torch.Tensor:
    """Undoes ``_gate_first``."""
    if name != _UP or own.is_concatenated:
        return channels
    mixed: torch.Tensor = channels.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
    return mixed


def rounded_experts(
    own: Any,
    rounding: Callable[[torch.Tensor], GroupedWeight],
    method: str,
    scheme: str,
    dtype: torch.dtype,
) -> PackedExperts:
    """Returns a module's experts quantized one by one by ``rounding``. The module loses its floats."""

    def weights(name: str, sizes: tuple[int, int]) -> ExpertWeights:
        def parts(expert: int) -> Iterator[GroupedWeight]:
            yield rounding(own_weight(own, name, expert))

        return ExpertWeights(*sizes, parts, own_bias(own, name), scheme)

    rounded = {name: weights(name, sizes) for name, sizes in expert_sizes(own).items()}
    found = grouped_experts(own, rounded, method, dtype, keeps_inputs=False)
    _empty(own)
    return found


def packed_experts(model: nn.Module) -> Iterator[tuple[str, PackedExperts]]:
    """Yields a model's quantized experts, with the names of modules."""
    for name, module in model.named_modules():
        if isinstance(module, PackedExperts) and module.method:
            yield name, module
