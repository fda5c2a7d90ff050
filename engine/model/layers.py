"""Linear layers: which of a model's are replaced, and by what, in every form that weights are held in.
What multiplies with them is made in ``linear`` (floats) and ``product`` (few bits).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.weights.layer import scaled


def is_plain(module: nn.Module) -> bool:
    """Whether the module is torch's own linear layer, or transformers' of another form."""
    return type(module) in (nn.Linear, Conv1D)


def as_linear(module: Any) -> nn.Linear:
    """Returns an ``nn.Linear`` as it is, and transformers' ``Conv1D`` as one."""
    if isinstance(module, nn.Linear):
        return module
    in_features, out_features = module.weight.shape
    linear = nn.Linear(in_features, out_features, device="meta")
    linear.weight = nn.Parameter(module.weight.detach().T.contiguous(), requires_grad=False)
    linear.bias = module.bias
    return linear


def names_by_input(
    layers: Mapping[nn.Module, str], forward: Callable[[], object]
) -> list[list[str]]:
    """Returns the names of linear ``layers``, grouped by the tensor that ``forward`` passes to them, in
    the order of first calls; layers that it does not call are left out."""
    unread = dict(layers)
    groups: defaultdict[object, list[str]] = defaultdict(list)

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        name = unread.pop(module, None)
        if name is not None:
            # One that is written to in between is another input: that changes its version.
            groups[inputs[0], inputs[0]._version].append(name)

    handles = [module.register_forward_pre_hook(note) for module in layers]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return list(groups.values())


class LayerShape(NamedTuple):
    in_features: int
    out_features: int


class AdaptsRows(Protocol):
    """A layer that adapters may change, as who computes its product sees it
    (``engine.model.adapted.AdaptedLayer``)."""

    @property
    def shape(self) -> LayerShape: ...

    @property
    def is_wanted(self) -> bool:
        """Whether the forward that is under way has rows with adapters."""

    def add(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        """Adds what ``rows`` ``[num_rows, in_features]`` get to ``output`` ``[num_rows, out_features]``,
        in place."""


class PackedWeight(Protocol):
    """A weight, and a bias where there is one, as what multiplies with them wants them."""

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it was, ``[out_features, in_features]``."""

    def times(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the product ``[rows, out_features]`` of ``rows`` ``[rows, in_features]``."""


class PackedLinear(nn.Module):
    """A layer in ``nn.Linear``'s place, whose weight is ``packed``, and ``bias`` with it, which is kept
    for models that read it."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        packed: PackedWeight,
        bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.bias = None if bias is None else bias.detach()  # no parameter: it is packed as well
        self.in_features, self.out_features = in_features, out_features
        self.packed: Any = packed
        self._weight: tuple[nn.Parameter, ...] = ()  # within: it is none of the module's

    @property
    def weight(self) -> torch.Tensor:
        """Unpacked for the few models that read it, mostly of routers, and kept for them."""
        if not self._weight:
            self._weight = (nn.Parameter(self.packed.weight, requires_grad=False),)
        return self._weight[0]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``inputs`` ``[.., in_features]``; returns ``[.., out_features]``."""
        product: torch.Tensor = self.packed.times(inputs.reshape(-1, self.in_features))
        return product.view(*inputs.shape[:-1], self.out_features)


class GroupedLinear(nn.Module):
    """Replaces ``nn.Linear``: ``out_features`` columns, from ``first`` on, of a product that it may
    share with other layers that read its input (``engine.model.product.GroupedProduct``). ``scheme``:
    the weights' scheme as shown to users; ``method``: the checkpoint's format, or how the weights were
    rounded."""

    def __init__(
        self, product: Any, out_features: int, scheme: str, method: str, first: int = 0
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = product.in_features, out_features
        self.product = product
        self.scheme, self.method = scheme, method
        self.first = first
        self._weight: tuple[nn.Parameter, ...] = ()  # within: it is none of the module's

    @property
    def weight(self) -> torch.Tensor:
        """Made of its codes for the few models that read it, mostly of routers, and kept for them."""
        if not self._weight:
            weight = self.product.weight(self.first, self.out_features)
            self._weight = (nn.Parameter(weight, requires_grad=False),)
        return self._weight[0]

    @property
    def bias(self) -> torch.Tensor | None:
        """``[out_features]``, for models that read it; it is added to the product already."""
        bias: torch.Tensor | None = self.product.packed.bias
        return None if bias is None else bias.flatten()[self.first :][: self.out_features]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``inputs`` ``[.., in_features]``; returns ``[.., out_features]``."""
        result: torch.Tensor = self.product.shared(inputs)
        if result.shape[-1] == self.out_features:
            return result
        return result.narrow(-1, self.first, self.out_features)


class ScaledEmbedding(nn.Embedding):
    """An embedding that multiplies what it looks up."""

    embed_scale: float = 1.0

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``token_ids`` ``[..]`` int64; returns ``[.., embedding_dim]``."""
        return scaled(super().forward(token_ids), self.embed_scale)
