"""Linear layers with LoRA adapters, applied per row according to the row's request.

The layer's own result is unchanged. If some rows of a step have adapters, their adapters' products are
added to these rows; other rows keep their bits. On CPUs a compiled kernel does this and reads the
row-to-adapter mapping at run time, so steps can be recorded; elsewhere torch's operations do it,
adapter by adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.batch import ForwardOutput, InputBatch, InputTensors
from engine.kernels import host_kernel
from engine.kernels.triton import missing_for
from engine.kernels.triton.row_ops import row_product
from engine.model.fused import FusedParts, fused_forward
from engine.model.layers import GroupedLinear, LayerShape, PackedLinear, is_plain
from engine.transfer import upload

Parts = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""An adapter's matrices by layer name: ``first`` ``[rank, in_features]`` and ``second``
``[out_features, rank]``, float32."""


class Adapter(Protocol):
    """An adapter in a device's memory. ``address`` says which it is in a batch's rows; it lives for as
    long as a request has it."""

    @property
    def address(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


class _Rows(NamedTuple):
    """Where a device's rows with one adapter are, among all and among those with logits."""

    adapter: _DeviceAdapter
    all_rows: torch.Tensor
    with_logits: torch.Tensor


class _Step(NamedTuple):
    """The rows of the forward that is under way: addresses of their adapters, of all and of those with
    logits; ``by_adapter``: where torch's operations add."""

    adapters: torch.Tensor
    logits_adapters: torch.Tensor
    by_adapter: list[_Rows]


class AdaptedLayer:
    """A layer that adapters may change, the one with the number ``place``. ``is_head``: its rows are
    those with logits."""

    def __init__(self, layers: AdaptedLayers, place: int, shape: LayerShape, is_head: bool) -> None:
        self._layers, self.place, self.shape, self.is_head = layers, place, shape, is_head

    @property
    def is_wanted(self) -> bool:
        """Whether the forward that is under way has rows with adapters."""
        return self._layers.step is not None

    def add(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        """Adds what ``rows`` ``[num_rows, in_features]`` get to ``output`` ``[num_rows, out_features]``,
        in place."""
        step = self._layers.step
        if step is None:
            return
        adapters = step.logits_adapters if self.is_head else step.adapters
        if len(rows) != len(adapters):
            raise RuntimeError(f"{len(rows)} rows of a layer, adapters of {len(adapters)}")
        kernel = host_kernel("low_rank", output.device)
        if kernel is not None:
            kernel.add_low_rank(rows, output, adapters, self.place)
            return
        for each in step.by_adapter:
            chosen = each.with_logits if self.is_head else each.all_rows
            each.adapter.add(self.place, rows, output, chosen)


class AdaptedLayers:
    """The layers of a model that adapters may change. ``probe`` runs a forward of ``num_rows`` rows, one
    of them with logits, of other tokens each time: a layer that sees other rows, as an expert does, has
    no place for an adapter."""

    def __init__(self, model: PreTrainedModel, probe: Callable[[], object], num_rows: int) -> None:
        self._device = model.device
        self._layers: dict[str, AdaptedLayer] = {}
        self.step: _Step | None = None
        head: Any = model.get_output_embeddings()
        modules = list(model.named_modules())
        linear = {
            module: name
            for name, module in modules
            if is_plain(module) or isinstance(module, PackedLinear | GroupedLinear)
        }
        gated = {
            name: module
            for name, module in modules
            if isinstance(fused_forward(module), FusedParts)
        }
        seen = _rows_seen({**linear, **{each: name for name, each in gated.items()}}, probe)
        for module, name in linear.items():
            if seen[name] == [1 if module is head else num_rows] * _PROBES:
                layer = self._add(name, _shape_of(module), module is head)
                module.register_forward_hook(partial(_add_after, layer))
        for name, network in gated.items():
            if seen[name] == [num_rows] * _PROBES:
                fused: Any = fused_forward(network)
                fused.adapted = tuple(
                    self._add(f"{name}.{own}", shape) for own, shape in fused.parts.items()
                )

    def _add(self, name: str, shape: LayerShape, is_head: bool = False) -> AdaptedLayer:
        layer = AdaptedLayer(self, len(self._layers), shape, is_head)
        self._layers[name] = layer
        return layer

    @property
    def shapes(self) -> dict[str, LayerShape]:
        """Shapes by layer name."""
        return {name: layer.shape for name, layer in self._layers.items()}

    def pack(self, parts: Parts) -> Adapter:
        """Returns the adapter as rows take it. ``parts``: of layers that there are, in their shapes."""
        by_place = {self._layers[name].place: part for name, part in parts.items()}
        kernel = host_kernel("low_rank", self._device)
        if kernel is not None:
            packed: Adapter = kernel.PackedAdapter(len(self._layers), by_place)
            return packed
        return _DeviceAdapter(by_place, self._device)

    def run(
        self, batch: InputBatch, inputs: InputTensors, run: Callable[[], ForwardOutput]
    ) -> ForwardOutput:
        """Runs a forward whose rows have adapters."""
        self.step = _Step(inputs.adapters, inputs.logits_adapters, self._by_adapter(batch))
        try:
            return run()
        finally:
            self.step = None

    def _by_adapter(self, batch: InputBatch) -> list[_Rows]:
        """Where the host knows it, for operations whose shapes it knows."""
        held = {each.adapter.address: each.adapter for each in batch.requests if each.adapter}
        found = []
        for address, adapter in held.items():
            if isinstance(adapter, _DeviceAdapter):
                of_logits = [batch.adapters[row] for row in batch.logits_indices or [0]]
                both = (_places_of(address, each) for each in (batch.adapters, of_logits))
                found.append(_Rows(adapter, *(upload(each, self._device) for each in both)))
        return found


class _DeviceAdapter:
    """An adapter that torch's operations add."""

    def __init__(
        self, parts: Mapping[int, tuple[torch.Tensor, torch.Tensor]], device: torch.device
    ) -> None:
        self._parts = {
            place: (first.to(device).contiguous(), second.to(device).contiguous())
            for place, (first, second) in parts.items()
        }
        # In one order of sums, where that can be had.
        self._product: Any = F.linear if missing_for(device) is not None else row_product
        self.address = id(self)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for part in self._parts.values() for tensor in part)

    def add(
        self, place: int, rows: torch.Tensor, output: torch.Tensor, chosen: torch.Tensor
    ) -> None:
        """To the ``chosen`` rows of the output."""
        part = self._parts.get(place)
        if part is None or not len(chosen):
            return
        sums = self._product(rows.index_select(0, chosen).float(), part[0])
        added = self._product(sums, part[1])
        total = output.index_select(0, chosen).float() + added
        output.index_copy_(0, chosen, total.to(output.dtype))


def _places_of(address: int, adapters: list[int]) -> torch.Tensor:
    places = [place for place, each in enumerate(adapters) if each == address]
    return torch.tensor(places, dtype=torch.long)


def _add_after(
    layer: AdaptedLayer, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
) -> None:
    del module
    if layer.is_wanted:
        rows = inputs[0].reshape(-1, layer.shape.in_features)
        # The layer made its output, of which this is another view.
        layer.add(rows, output.view(-1, layer.shape.out_features))


def _shape_of(module: Any) -> LayerShape:
    if isinstance(module, Conv1D):
        return LayerShape(*module.weight.shape)
    return LayerShape(module.in_features, module.out_features)


_PROBES = 2


def _rows_seen(names: Mapping[nn.Module, str], probe: Callable[[], object]) -> dict[str, list[int]]:
    """Returns how many rows each module was called with in each call of two forwards."""
    seen: dict[str, list[int]] = {name: [] for name in names.values()}

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...], named: dict[str, Any]) -> None:
        first = inputs[0] if inputs else named.get("hidden_states")
        if first is not None:
            seen[names[module]].append(first.shape[:-1].numel())

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in names]
    try:
        for _ in range(_PROBES):
            probe()
    finally:
        for handle in handles:
            handle.remove()
    return seen
