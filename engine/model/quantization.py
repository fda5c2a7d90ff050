"""Quantized weights in a model's layers: a checkpoint's are packed as they are, floats are rounded.

Layers that share an input are found in a forward, not guessed from names: queries, keys and values in
most models, gate and up projections, all children of one parent that read the same tensor.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.kernels import is_host
from engine.kernels.grouped_weight import GroupedWeight, UnpackableError
from engine.kernels.triton import missing_for
from engine.machine import release_memory
from engine.model.experts import (
    PackedExperts,
    grouped_experts,
    is_experts,
    packed_experts,
    restored_experts,
    rounded_experts,
    unrounded_layers,
)
from engine.model.layers import (
    GroupedLinear,
    ScaledEmbedding,
    as_linear,
    is_plain,
    names_by_input,
)
from engine.model.product import (
    GroupedEmbedding,
    GroupedProduct,
    can_join,
    join_products,
    kernels_for,
)
from engine.request.errors import UnsupportedModelError
from engine.request.info import QuantizationInfo
from engine.weights.experts import StoredExperts
from engine.weights.layer import StoredLinear, StoredWeight
from engine.weights.rounding.gptq import BITS, round_to_nearest
from engine.weights.rounding.int8 import GROUP, computes_whole_numbers, quantize_weight

if TYPE_CHECKING:
    from engine.model.product import Packed

logger = logging.getLogger(__name__)

ROUNDED = ("int8", "int4")
"""Methods of weights that were floats when the model was loaded."""
_SHARES = (1.0, 0.92, 0.84)
"""Shares of a group's range that are tried for layers in 4 bits: seven would take half a minute of a
head's 60 million weights."""


# --- weights that a checkpoint brings ---


@torch.inference_mode(False)
@torch.no_grad()
def pack_stored(model: PreTrainedModel, packed: bool = True) -> None:
    """Replaces the placeholders that a quantized checkpoint has filled by layers that multiply, one by
    one. Inputs keep their floats until ``round_inputs``. Without ``packed``, on devices without kernels
    and for weights without a kernel, layers of floats are made."""
    can_pack = packed and refusal(model.device) is None
    pair = _tied_places(model)
    unpacked: Counter[str] = Counter()
    # By their names, which keep no place that is replaced.
    for name in [name for name, each in model.named_modules() if isinstance(each, StoredExperts)]:
        _pack_stored_experts(model, name, can_pack, unpacked)
    names = [name for name, each in model.named_modules() if isinstance(each, StoredWeight)]
    for name in [each for each in names if each not in pair[1:]]:
        module: Any = model.get_submodule(name)
        made = _packed(module, model.dtype) if can_pack else None
        unpacked[module.scheme] += made is None
        for each in pair if name in pair else (name,):
            place: Any = model.get_submodule(each)
            model.set_submodule(each, _layer(place, made, model.dtype))
            del place
        del module, made
        release_memory()
    if pair and isinstance(model.get_submodule(pair[0]), nn.Embedding):
        model.tie_weights()
    said = ", ".join(f"{count} of {scheme}" for scheme, count in unpacked.items() if count)
    if said:
        logger.warning("weights that came in few bits are made floats: %s", said)


def _pack_stored_experts(
    model: PreTrainedModel, name: str, can_pack: bool, unpacked: Counter[str]
) -> None:
    stored: Any = model.get_submodule(name)
    weights = stored.weights()
    made: nn.Module | None = None
    try:
        if can_pack:
            own = vars(stored)["own"]
            made = grouped_experts(own, weights, stored.method, model.dtype, keeps_inputs=True)
    except UnpackableError as error:
        logger.info("%s: %s", name, error)
    if made is None:
        unpacked[next(iter(weights.values())).scheme] += 1
        made = restored_experts(stored, model.dtype)
    model.set_submodule(name, made)
    del stored, weights
    release_memory()


def _tied_places(model: PreTrainedModel) -> tuple[str, ...]:
    """Returns the names of the embedding and of the output head where they are places of one tensor."""
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    if (
        not all(isinstance(each, StoredWeight) for each in ends)
        or ends[0].weight is not ends[1].weight
    ):
        return ()
    names = {each: name for name, each in model.named_modules()}
    return names[ends[0]], names[ends[1]]


def _packed(module: StoredWeight, dtype: torch.dtype) -> GroupedProduct | None:
    """Returns None for weights that no kernel takes."""
    pack = kernels_for(next(module.parameters()).device).pack
    bias = module.bias if isinstance(module, StoredLinear) else None
    try:
        packed = pack(module.parts(), module.out_features, module.in_features, bias)
    except UnpackableError as error:
        logger.info("%s: %s", module.scheme, error)
        return None
    return GroupedProduct(packed, dtype, module.order, keeps_inputs=True)


def _layer(module: StoredWeight, made: GroupedProduct | None, dtype: torch.dtype) -> nn.Module:
    """Returns what stands in the place's place; floats where nothing is packed."""
    if made is not None and isinstance(module, StoredLinear):
        return GroupedLinear(made, module.out_features, module.scheme, module.method)
    if made is not None:
        return GroupedEmbedding(
            made.packed, dtype, module.scheme, module.method, module.embed_scale
        )
    weight = nn.Parameter(module.dequantized(dtype), requires_grad=False)
    if not isinstance(module, StoredLinear):
        embedding = ScaledEmbedding(module.out_features, module.in_features, device="meta")
        embedding.weight, embedding.embed_scale = weight, module.embed_scale
        return embedding
    linear = nn.Linear(module.in_features, module.out_features, device="meta")
    linear.weight = weight
    linear.register_parameter("bias", module.bias)
    return linear


def complete_packed(model: PreTrainedModel, with_head: bool = True) -> None:
    """Makes a model with packed weights ready to be served: layers that read one input share a product.
    ``with_head``: an output head that the checkpoint has in floats is rounded to 8 bits."""
    head = model.get_output_embeddings()
    if with_head and is_plain(head):
        names = [name for name, module in model.named_modules() if module is head]
        quantize_linears(model, names[:1], model.dtype)
    share_inputs(model)


def has_packed_weights(model: nn.Module) -> bool:
    """Whether the model's weights are held quantized."""
    return any(True for _ in packed_weights(model))


# --- floats that are rounded ---


@torch.inference_mode(False)
@torch.no_grad()
def quantize_model(model: PreTrainedModel, with_head: bool = True) -> None:
    """Replaces linear layers and experts by ones of 8 bits, all but gates of states and routers, one by
    one: memory never holds more than the model and its largest layer twice. ``model`` still runs on
    transformers' own attention. ``with_head``: the output head, too.

    Raises UnsupportedModelError where the machine does not multiply integers, or nothing is quantised.
    """
    kept = unrounded_layers(model)
    if not with_head:
        kept.add(model.get_output_embeddings())
    names = [
        name for name, module in model.named_modules() if is_plain(module) and module not in kept
    ]
    _check_refusal(model, "int8")
    if not names:
        raise _nothing_to_quantise(model, "int8")
    quantize_linears(model, names, model.dtype)
    round_experts(model, "int8")
    share_inputs(model)


@torch.inference_mode(False)
@torch.no_grad()
def round_experts(model: PreTrainedModel, method: str) -> None:
    """Gives a model's experts 8 or 4 bits (``ROUNDED``), one by one, each weight by its own group alone.
    Only where ``refusal`` has no reason."""
    names = [name for name, module in model.named_modules() if is_experts(module)]
    rounding: Callable[[torch.Tensor], GroupedWeight]
    rounding = quantize_weight if method == "int8" else round_to_nearest
    scheme = _said(8 if method == "int8" else BITS, GROUP)
    for name in names:
        own = model.get_submodule(name)
        model.set_submodule(name, rounded_experts(own, rounding, method, scheme, model.dtype))
        del own
        release_memory()


def quantize_linears(
    module: nn.Module, names: Iterable[str], dtype: torch.dtype, method: str = "int8"
) -> None:
    """Gives linear layers of a module 8 or 4 bits (``ROUNDED``), by their names, each weight by its own
    group alone. ``dtype``: of what they return. Only where ``refusal`` has no reason."""
    for name in names:
        weight = as_linear(module.get_submodule(name)).weight
        rounded = quantize_weight(weight) if method == "int8" else round_to_nearest(weight, _SHARES)
        _replace(module, name, rounded, method, dtype)


def replace_linears(
    model: PreTrainedModel, groups: Iterable[Mapping[str, GroupedWeight]], method: str
) -> None:
    """Gives layers quantized weights, by name, as soon as each group arrives. Raises
    UnsupportedModelError if the machine cannot multiply integers, or nothing is replaced."""
    _check_refusal(model, method)
    num_layers = 0
    for group in groups:
        for name, weight in group.items():
            _replace(model, name, weight, method, model.dtype)
        num_layers += len(group)
    if not num_layers:
        raise _nothing_to_quantise(model, method)


def _check_refusal(model: PreTrainedModel, method: str) -> None:
    reason = refusal(model.device)
    if reason is not None:
        raise UnsupportedModelError(f"quantization={method}: {reason}")


def _nothing_to_quantise(model: PreTrainedModel, method: str) -> UnsupportedModelError:
    kind = type(model).__name__
    return UnsupportedModelError(f"quantization={method}: {kind} has no linear layers to quantise")


def _replace(
    model: nn.Module, name: str, weight: GroupedWeight, method: str, dtype: torch.dtype
) -> None:
    linear = as_linear(model.get_submodule(name))
    pack = kernels_for(linear.weight.device).pack
    packed = pack([weight], len(weight.codes), weight.codes.shape[1], linear.bias)
    scheme = _said(weight.bits, weight.span)
    product = GroupedProduct(packed, dtype)
    model.set_submodule(name, GroupedLinear(product, packed.out_features, scheme, method))


def _said(bits: int, span: int) -> str:
    return f"{bits} bits, groups of {span}"


def refusal(device: torch.device) -> str | None:
    """Returns why models on this device cannot be served quantized; None: they can."""
    if not is_host(device):
        return missing_for(device)
    if not computes_whole_numbers():
        return "this CPU has no AVX2, and nothing else here multiplies integers"
    return None


# --- products that layers share ---


@torch.inference_mode(False)
@torch.no_grad()
def share_inputs(model: PreTrainedModel) -> None:
    """Makes one product of those of layers that read one input, where their weights are alike."""
    for names in _readers(model):
        by_kind: defaultdict[object, list[str]] = defaultdict(list)
        for name in names:
            layer: Any = model.get_submodule(name)
            packed = layer.product.packed
            by_kind[packed.form].append(name)
        for alike in by_kind.values():
            _join(model, alike)


def share_named(module: nn.Module, siblings: Iterable[Sequence[str]]) -> None:
    """Merges quantized layers with these names under one parent that read one input into one product,
    if their weights are alike."""
    every = {name for name, each in module.named_modules() if isinstance(each, GroupedLinear)}
    parents = sorted({name.rpartition(".")[0] for name in every})
    for names in siblings:
        for parent in parents:
            together = [f"{parent}.{name}" for name in names]
            if every.issuperset(together):
                _join(module, together)


def _join(model: nn.Module, names: Sequence[str]) -> None:
    layers: list[Any] = [model.get_submodule(name) for name in names]
    products = [layer.product for layer in layers]
    if len(set(products)) < 2 or len(set(products)) < len(products) or not can_join(products):
        return
    product = join_products(products)
    first = 0
    for layer in layers:
        layer.product, layer.first = product, first
        first += layer.out_features
    del products
    release_memory()


def _readers(model: PreTrainedModel) -> list[list[str]]:
    """Returns the names of quantized layers, grouped by the tensor that a forward passes to them under
    one parent; layers that read alone, or not at all, are left out."""
    layers: dict[nn.Module, str] = {
        module: name for name, module in model.named_modules() if isinstance(module, GroupedLinear)
    }
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    groups: defaultdict[object, list[str]] = defaultdict(list)
    for number, names in enumerate(
        names_by_input(layers, lambda: model(input_ids=ids, use_cache=False))
    ):
        for name in names:
            groups[name.rpartition(".")[0], number].append(name)
    return [names for names in groups.values() if len(names) > 1]


def round_inputs(model: nn.Module, rounds: bool = True) -> None:
    """Sets whether inputs of quantized weights are rounded to 8 bits, where possible."""
    for product in _products(model):
        product.round_inputs(rounds)


def rounds_inputs(model: nn.Module) -> bool:
    """Whether some inputs are rounded to 8 bits."""
    return any(not product.keeps_inputs for product in _products(model))


def is_rounded(model: nn.Module) -> bool:
    """Whether inputs are rounded, or weights were when the model was loaded."""
    layers = (each for each in model.modules() if isinstance(each, GroupedLinear | PackedExperts))
    return rounds_inputs(model) or any(each.method in ROUNDED for each in layers)


def _products(model: nn.Module) -> set[GroupedProduct]:
    experts = chain.from_iterable(each.products for _, each in packed_experts(model))
    layers = (each.product for each in model.modules() if isinstance(each, GroupedLinear))
    return {*layers, *experts}


# --- what there is ---


def quantization_info(model: PreTrainedModel) -> QuantizationInfo | None:
    """Returns the description of the quantized weights; None: there are none."""
    experts = [each for _, each in packed_experts(model)]
    layers = [each for each in model.modules() if isinstance(each, GroupedLinear)]
    if not layers:
        return None
    weights = list(_weights(model))
    schemes: Counter[str] = Counter()
    num_bits = 0
    for count, bits, scheme in weights:
        schemes[scheme] += count
        num_bits += count * bits
    num_quantized = schemes.total()
    info = QuantizationInfo(
        method=layers[0].method,
        source="start" if layers[0].method in ROUNDED else "checkpoint",
        bits=round(num_bits / num_quantized, 2),
        activation_bits=8 if rounds_inputs(model) else 8 * model.dtype.itemsize,
        schemes=dict(schemes.most_common()),
        num_layers=len(layers) + sum(len(each.products) for each in experts),
        num_quantized=num_quantized,
        num_parameters=num_parameters(model),
        num_bytes=num_bytes(model),
        head=isinstance(model.get_output_embeddings(), GroupedLinear),
    )
    logger.info(
        "%d linear layers in %s bits, %.0f %% of the parameters, inputs in %d: %.0f MiB of weights (%s)",
        info.num_layers,
        f"{info.bits:g}",
        100 * info.share,
        info.activation_bits,
        info.num_bytes / 2**20,
        ", ".join(info.schemes),
    )
    return info


def _weights(model: nn.Module) -> Iterator[tuple[int, int, str]]:
    """Yields number, bits and scheme of the weights of each layer, and of each embedding that is not
    also a head."""
    held = set()
    for each in model.modules():
        if isinstance(each, GroupedLinear):
            packed = each.product.packed
            held.add(packed)
            yield each.in_features * each.out_features, packed.format.bits, each.scheme
    for _, experts in packed_experts(model):
        for product in experts.products:
            packed, size = product.packed, product.in_features * product.out_features
            yield size * packed.num_experts, packed.format.bits, experts.scheme
    for each in model.modules():
        if isinstance(each, GroupedEmbedding) and each.packed not in held:
            yield each.num_embeddings * each.embedding_dim, each.packed.format.bits, each.scheme


def usual_bits(model: nn.Module) -> int:
    """Returns the bits that most of a model's packed weights have. There are some."""
    sizes: Counter[int] = Counter()
    for count, bits, _ in _weights(model):
        sizes[bits] += count
    return sizes.most_common(1)[0][0]


def packed_weights(model: nn.Module) -> Iterator[tuple[str, Packed]]:
    """Yields a model's packed weights: of layers, experts and embeddings, with the names of modules."""
    for name, module in model.named_modules():
        if isinstance(module, GroupedLinear):
            yield name, module.product.packed
        elif isinstance(module, GroupedEmbedding):
            yield name, module.packed
    for name, experts in packed_experts(model):
        for number, product in enumerate(experts.products):
            yield f"{name}.{number}", product.packed


def num_parameters(model: nn.Module) -> int:
    """Returns the number of weights; shared ones count once."""
    packed = sum(count for count, *_ in _weights(model))
    biased = {each for _, each in packed_weights(model) if each.bias is not None}
    biases = sum(each.num_experts * each.out_features for each in biased)
    return packed + biases + sum(parameter.numel() for parameter in model.parameters())


def num_bytes(model: nn.Module) -> int:
    """Returns the bytes of all weights, as they are held."""
    packed = {each for _, each in packed_weights(model)}
    held = chain.from_iterable(each.tensors.values() for each in packed)
    return sum(int(each.nbytes) for each in {*model.parameters(), *model.buffers(), *held})
