"""Decoder layers in few launches, where Triton's programs run.

Between two products there is one pass. Layers that read one input are one product, over weights that lie
together, or, quantized in several formats, several that are joined. What it left (``Sums``) goes to a
pass that adds it up and does all there is to do before the next: attention norms and rotates heads and
stores keys and values, a gated network gates, and a decoder layer adds to the residual and norms, for the
layer after it, too.

Each is found by what it does with random rows: a module gets another forward if that writes the same.
Its own stays for calls that are of another kind: plans that take no joint product, masks, caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, permutations
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from engine.attention.backend import (
    AttentionOptions,
    JointPlan,
    attended,
    attending,
    layer_number,
)
from engine.kernels import KINDS
from engine.kernels.triton.joint_ops import ACTIVATIONS, HeadNorms, Heads, gate_rows, put_heads
from engine.kernels.triton.packed_codes import PackedCodes
from engine.kernels.triton.row_ops import Sums, row_product
from engine.model.fused import (
    PROBED_ROWS,
    Find,
    Fused,
    FusedNorm,
    FusedParts,
    activation_of,
    computed,
    find_norm,
    fused_forward,
    is_near,
)
from engine.model.layers import GroupedLinear, LayerShape, PackedLinear
from engine.model.linear import DeviceWeight

_Linear = nn.Linear | PackedLinear | GroupedLinear


class JointFloats:
    """Layers of one input as one product. Of several the weights are copied to lie together; once they
    ``adopt`` these, they are held once."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        weights, biases = zip(*map(_weight_of, layers), strict=True)
        self._weight, self._bias = weights[0], biases[0]
        if len(layers) > 1:
            self._weight, self._bias = torch.cat(weights), None
            if any(each is not None for each in biases):
                parts = zip(weights, biases, strict=True)
                self._bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in parts])
        self._is_exact = isinstance(layers[0], PackedLinear)

    def adopt(self) -> None:
        """Makes the layers' weights views of the joint ones."""
        first = 0
        for layer in self._layers if len(self._layers) > 1 else ():
            rows = slice(first, first + layer.out_features)
            weight, bias = self._weight[rows], None if self._bias is None else self._bias[rows]
            if isinstance(layer, PackedLinear):
                layer.packed = DeviceWeight(weight, bias)
            else:
                layer.weight = nn.Parameter(weight, requires_grad=False)
                if bias is not None:
                    layer.bias = nn.Parameter(bias, requires_grad=False)
            first += layer.out_features

    def sums(self, rows: torch.Tensor) -> Sums:
        """Returns the sums for ``rows`` ``[num_rows, in_features]``."""
        if self._is_exact:
            return Sums.of(rows, self._weight, self._bias)
        return Sums(self.whole(rows)[None])

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the product ``[num_rows, out_features]``."""
        multiply: Any = row_product if self._is_exact else F.linear
        product: torch.Tensor = multiply(rows, self._weight, self._bias)
        return product


class JointCodes:
    """The same of quantized layers, whose products may be one already."""

    def __init__(self, layers: Sequence[GroupedLinear]) -> None:
        self._parts: list[tuple[Any, slice]] = []
        for each in layers:
            first, before = each.first, self._parts[-1:]
            if before and (each.product, first) == (before[0][0], before[0][1].stop):
                first = self._parts.pop()[1].start
            self._parts.append((each.product, slice(first, each.first + each.out_features)))
        self._products = [*dict.fromkeys(product for product, _ in self._parts)]
        product, columns = self._parts[0]
        is_alone = len(self._parts) == 1 and columns == slice(0, product.out_features)
        self._alone: Any = product if is_alone else None
        """The product of which they are all the columns, in their order."""

    def adopt(self) -> None:
        """Nothing was copied."""

    def sums(self, rows: torch.Tensor) -> Sums:
        # Rows of another type would be rounded by the number of their chunks.
        if self._alone is not None and rows.dtype == self._alone.dtype:
            found: Sums = self._alone.sums(rows)
            return found
        return Sums(self.whole(rows)[None])

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        products = {product: product(rows) for product in self._products}
        parts = [products[product][:, columns] for product, columns in self._parts]
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0].contiguous()


def _joint(layers: Sequence[Any]) -> JointFloats | JointCodes:
    return (JointCodes if isinstance(layers[0], GroupedLinear) else JointFloats)(layers)


def _weight_of(layer: nn.Linear | PackedLinear) -> tuple[torch.Tensor, torch.Tensor | None]:
    held = layer.packed if isinstance(layer, PackedLinear) else layer
    bias = held.bias
    return held.weight.detach(), None if bias is None else bias.detach()


def _kind_of(layer: _Linear) -> tuple[torch.device, torch.dtype]:
    """Returns where it is, and the type of its rows."""
    if isinstance(layer, GroupedLinear):
        return layer.product.packed.blocks.device, layer.product.dtype
    weight, _ = _weight_of(layer)
    return weight.device, weight.dtype


def _linear_layers(module: nn.Module) -> dict[str, _Linear] | None:
    """Returns the children that multiply, by floats or by a device's codes, of one kind; None: there is
    another way in which some work, or hooks see what they read and write."""
    found: dict[str, _Linear] = {}
    for name, child in module.named_children():
        is_exact = isinstance(child, PackedLinear) and isinstance(child.packed, DeviceWeight)
        is_packed = is_exact or (
            isinstance(child, GroupedLinear) and isinstance(child.product.packed, PackedCodes)
        )
        if is_packed or type(child) is nn.Linear:
            has_hooks = child._forward_hooks or child._forward_pre_hooks or "forward" in vars(child)
            if has_hooks or _kind_of(child)[1] not in KINDS:  # type: ignore[arg-type]
                return None
            found[name] = child  # type: ignore[assignment]
    return found if len({type(each) for each in found.values()}) == 1 else None


class _FusedProducts(FusedParts):
    """Passes around two products: ``first``, of the layers that read the input, and ``last``."""

    def __init__(self, names: Mapping[_Linear, str], *layers: _Linear) -> None:
        super().__init__()
        self.first, self.last = _joint(layers[:-1]), _joint(layers[-1:])
        self.parts = {
            names[each]: LayerShape(each.in_features, each.out_features) for each in layers
        }

    def begin(self, rows: torch.Tensor) -> Sums:
        if not self.is_adapted:
            return self.first.sums(rows)
        joint = self.first.whole(rows)
        self.adapt(rows, joint)
        return Sums(joint[None])

    def end(self, rows: torch.Tensor, like: torch.Tensor, as_sums: bool) -> Any:
        """Returns the product of ``rows``, of the shape of ``like`` but for its features, or as it is
        added up later."""
        if as_sums and not self.is_adapted:
            return self.last.sums(rows)
        product = self.last.whole(rows)
        if self.is_adapted:
            self.adapted[-1].add(rows, product)
        return Sums(product[None]) if as_sums else product.view(*like.shape[:-1], -1)


# --- attention ---


class FusedAttention(_FusedProducts):
    """Attention whose heads are normed, or not, and rotated by halves."""

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[_Linear],
        norms: Sequence[FusedNorm],
        asked: _Asked,
    ) -> None:
        super().__init__({each: name for name, each in module.named_children()}, *layers)  # type: ignore[misc]
        self._own, self._module = module.forward, module
        self._options = asked.options
        _, self._num_heads, self.dim = asked.query.shape
        self._norms = None
        if norms:
            factors = torch.stack([each.factors for each in norms])
            self._norms = HeadNorms(factors, norms[0].epsilon, norms[0].is_rounded)

    def heads(self, cosines: torch.Tensor, sines: torch.Tensor) -> Heads:
        return Heads(self._num_heads, cosines, sines, self._norms)

    def __call__(
        self, hidden_states: torch.Tensor, *more: Any, as_sums: bool = False, **named: Any
    ) -> Any:
        """``as_sums``: returns what is added up later, and no weights."""
        plan, angles = attended.plan, named.get("position_embeddings")
        if more or not isinstance(plan, JointPlan) or not self._fits(hidden_states, angles, named):
            found = self._own(hidden_states, *more, **named)
            return Sums(found[0].reshape(1, -1, found[0].shape[-1])) if as_sums else found
        cosines, sines = angles
        rows = hidden_states[0]
        heads = self.heads(cosines[0], sines[0])
        number = layer_number(self._module)
        answer = plan.attend_joint(number, self.begin(rows), heads, self._options)
        product = self.end(answer.view(len(rows), -1), hidden_states, as_sums)
        return product if as_sums else (product, None)

    def _fits(self, states: torch.Tensor, angles: Any, named: Mapping[str, Any]) -> bool:
        if not isinstance(angles, tuple) or any(
            named.get(each) is not None for each in ("attention_mask", "past_key_values", "cache")
        ):
            return False
        wanted = (1, states.shape[1], self.dim)
        return states.shape[0] == 1 and all(
            each.shape == wanted and each.dtype == states.dtype for each in angles
        )


class _Asked(NamedTuple):
    """A module's request to attention, the answer, and the module's output."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    options: AttentionOptions
    answer: torch.Tensor
    output: Any


class _Answering:
    """A plan that answers with something of queries, keys and values, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        del layer
        each = query.shape[1] // key.shape[1]
        mixed = key.repeat_interleave(each, 1) - value.repeat_interleave(each, 1)
        answer = (query + mixed).contiguous()
        self.asked.append((query, key, value, options, answer))
        return answer


def _find_attention(module: nn.Module) -> FusedAttention | None:
    dim, linear = getattr(module, "head_dim", None), _linear_layers(module)
    if not isinstance(dim, int) or dim % 2 or linear is None or len(linear) not in (2, 4):
        return None
    found = [fused_forward(each) for each in module.children()]
    norms = [each for each in found if isinstance(each, FusedNorm) and len(each.factors) == dim]
    num_known = len(linear) + sum(isinstance(each, FusedNorm) for each in found)
    are_alike = len({(each.epsilon, each.is_rounded) for each in norms}) <= 1
    if len(norms) not in (0, 2) or not are_alike or num_known != _num_weighted(module):
        return None
    for width in {each.in_features for each in linear.values()}:
        hidden, angles = _probe(next(iter(linear.values())), width, dim)
        asked = _asked(module, hidden, angles)
        if asked is None:
            continue
        for layers in _orders(list(linear.values()), asked, hidden[0]):
            for ordered in permutations(norms):
                fused = FusedAttention(module, layers, ordered, asked)
                if _puts(fused, asked, hidden[0], angles):
                    fused.first.adopt()
                    return fused
    return None


def _num_weighted(module: nn.Module) -> int:
    """Returns how many children have weights, in whatever form."""
    return sum(map(_has_weights, module.children()))


def _has_weights(module: nn.Module) -> bool:
    packed = any(isinstance(each, PackedLinear | GroupedLinear) for each in module.modules())
    return packed or any(True for _ in module.parameters())


def _probe(
    layer: _Linear, width: int, dim: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Returns hidden states ``[1, num_rows, width]``, cosines and sines ``[1, num_rows, dim]``."""
    kind, generator = _kind_of(layer), torch.Generator().manual_seed(0)
    hidden, cosines, sines = (
        torch.randn(1, PROBED_ROWS, each, generator=generator).to(*kind)
        for each in (width, dim, dim)
    )
    return hidden, (cosines, sines)


def _asked(module: Callable[..., Any], hidden: torch.Tensor, angles: Any) -> _Asked | None:
    """Returns what the module asks for ``hidden`` states, farther apart in their text than any model's
    original length; None: it takes them otherwise, or attends several times."""
    plan = _Answering()
    positions = 8 ** torch.arange(hidden.shape[1], device=hidden.device)[None]

    def run() -> Any:
        with attending(plan):
            return module(
                hidden_states=hidden,
                position_embeddings=angles,
                position_ids=positions,
                attention_mask=None,
            )

    output = computed(run)
    is_like_attention = isinstance(output, tuple) and len(output) == 2 and output[1] is None
    if len(plan.asked) != 1 or not (is_like_attention or isinstance(output, torch.Tensor)):
        return None
    (asked,) = plan.asked
    return _Asked._make((*asked, output))


def _orders(
    layers: Sequence[_Linear], asked: _Asked, rows: torch.Tensor
) -> Iterator[Sequence[_Linear]]:
    """Yields orders of ``layers`` in which they may make queries, keys and values, or all of them,
    and, the last, the output."""
    widths = [each[0].numel() for each in (asked.query, asked.key, asked.value)]
    attended = asked.answer.flatten(1)
    for *first, last in permutations(layers):
        made = [each.out_features for each in first]
        fits = made == widths or made == [sum(widths)]
        if (
            not fits
            or last.in_features != widths[0]
            or {each.in_features for each in first} != {rows.shape[1]}
        ):
            continue
        value = first[-1](rows)[:, -widths[2] :]
        if is_near(value, asked.value.flatten(1)) and is_near(last(attended), _states(asked)[0]):
            yield [*first, last]


def _puts(fused: FusedAttention, asked: _Asked, rows: torch.Tensor, angles: Any) -> bool:
    """Whether it makes the queries, keys and values that its module made."""
    num_rows, num_kv_heads, dim = asked.key.shape
    if asked.value.shape[2] != dim:
        return False
    keys, values = rows.new_zeros(2, num_kv_heads, num_rows, dim)
    slots = torch.arange(num_rows, device=rows.device)
    heads = fused.heads(*(each[0] for each in angles))
    query, _ = put_heads(fused.first.sums(rows), heads, (keys, values), slots, float("inf"))
    made = query, keys.transpose(0, 1), values.transpose(0, 1)
    return all(map(is_near, made, (asked.query, asked.key, asked.value)))


# --- gated feed-forward networks ---


class GatedRows(_FusedProducts):
    """A gated network, down(activation(gate(x)) * up(x))."""

    def __init__(self, network: nn.Module, layers: Sequence[_Linear], activation: str) -> None:
        super().__init__({each: name for name, each in network.named_children()}, *layers)  # type: ignore[misc]
        self._activation = activation

    def __call__(self, hidden_states: torch.Tensor, as_sums: bool = False) -> Any:
        """``[.., hidden_size]`` to the same, or to what is added up later."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        gated = gate_rows(self.begin(rows), self._activation, rows.dtype)
        return self.end(gated, hidden_states, as_sums)


def _find_gated(network: nn.Module) -> GatedRows | None:
    linear = _linear_layers(network)
    others = [each for each in network.children() if linear and each not in linear.values()]
    if linear is None or len(linear) not in (2, 3) or len(others) != 1:
        return None
    device, _ = _kind_of(next(iter(linear.values())))
    activation = activation_of(others[0], ACTIVATIONS, _gate, device)
    if activation is None:
        return None
    for layers in permutations(linear.values()):
        *first, last = layers
        width, half = first[0].in_features, last.in_features
        is_square = all(each.in_features == width for each in first) and last.out_features == width
        if not is_square or sum(each.out_features for each in first) != 2 * half:
            continue
        rows, _ = _probe(last, width, 2)
        made = torch.cat([each(rows[0]) for each in first], -1)
        if made.shape[1] != 2 * half or not is_near(
            last(_gate(made, activation)), computed(network, rows[0])
        ):
            continue
        fused = GatedRows(network, layers, activation)
        fused.first.adopt()
        return fused
    return None


def _gate(rows: torch.Tensor, activation: str) -> torch.Tensor:
    return gate_rows(Sums(rows[None]), activation, rows.dtype)


# --- decoder layers ---


class FusedLayer(Fused):
    """A decoder layer, x + attention(first(x)) and that + network(second(that)). ``following``: the norm
    of what it writes, where it is known."""

    def __init__(
        self,
        module: nn.Module,
        first: nn.Module,
        attention: nn.Module,
        second: nn.Module,
        network: nn.Module,
    ) -> None:
        self._own, self.is_tuple = module.forward, False
        self.first, self._attention, self._second = first, attention, second
        self._network = network
        self.following: FusedNorm | None = None

    def __call__(self, hidden_states: torch.Tensor, *more: Any, **named: Any) -> Any:
        if more or hidden_states.shape[0] != 1:
            return self._own(hidden_states, *more, **named)
        norm: Any = fused_forward(self._second)
        normed = self.first(hidden_states)
        product = self._attention(hidden_states=normed, as_sums=True, **named)
        hidden, normed = norm.of_sum(product, hidden_states)
        if self.following is None:
            hidden = hidden + self._network(normed)
        else:
            hidden = self.following.summed(self._sums(normed), hidden)
        return (hidden,) if self.is_tuple else hidden

    def _sums(self, normed: torch.Tensor) -> Sums:
        if isinstance(fused_forward(self._network), GatedRows):
            found: Sums = self._network(normed, as_sums=True)
            return found
        return Sums(self._network(normed).reshape(1, -1, normed.shape[-1]))


def _find_layer(module: nn.Module) -> FusedLayer | None:
    by_kind = [(fused_forward(each), each) for each in module.children()]
    attention = [each for fused, each in by_kind if isinstance(fused, FusedAttention)]
    norms = [each for fused, each in by_kind if isinstance(fused, FusedNorm)]
    others = (each for each in module.children() if each not in (*attention, *norms))
    networks = [each for each in others if _has_weights(each)]
    if (len(attention), len(networks), len(norms), _num_weighted(module)) != (1, 1, 2, 4):
        return None
    told: Any = fused_forward(attention[0])
    layer = next(each for each in attention[0].children() if isinstance(each, _Linear))
    norm: Any = fused_forward(norms[0])
    hidden, angles = _probe(layer, len(norm.factors), told.dim)
    expected = _asked(module, hidden, angles)
    if expected is None:
        return None
    for first, second in permutations(norms):
        fused = FusedLayer(module, first, attention[0], second, networks[0])
        fused.is_tuple = isinstance(expected.output, tuple)
        found = _asked(fused, hidden, angles)
        if found is not None and is_near(_states(found), _states(expected)):
            return fused
    return None


def _states(asked: _Asked) -> torch.Tensor:
    states: torch.Tensor = asked.output[0] if isinstance(asked.output, tuple) else asked.output
    return states


def chain_layers(model: nn.Module) -> None:
    """Tells layers the norm of what they write: the next one's, or the one beside their list."""
    for module in model.modules():
        for child in module.children():
            layers = [fused_forward(each) for each in child.children()]
            if not isinstance(child, nn.ModuleList) or not layers:
                continue
            for before, after in pairwise(layers):
                if isinstance(before, FusedLayer) and isinstance(after, FusedLayer):
                    before.following = fused_forward(after.first)  # type: ignore[assignment]
            beside = [fused_forward(each) for each in module.children()]
            norms = [each for each in beside if isinstance(each, FusedNorm)]
            if isinstance(layers[-1], FusedLayer) and len(norms) == 1:
                layers[-1].following = norms[0]


DEVICE_FINDERS: dict[str, Find] = {
    "norms": find_norm,
    "attention": _find_attention,
    "gated networks": _find_gated,
    "layers": _find_layer,
}
"""In their order: later ones are made of earlier ones."""
