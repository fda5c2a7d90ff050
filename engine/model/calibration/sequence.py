"""Rounds a model's layers to 4 bits one after the other, each for the inputs that it will have: those
that come out of the layers before it when they are rounded already. So what one layer's rounding did,
those behind it make up for in part, and errors do not add up unseen.

The text's hidden states wait between two decoder layers; a decoder layer is run once for each group of
linear layers that read one input, as far as that input. Beside the model there are these states and one
group's Hessian, weights and factor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.kernels.grouped_weight import GroupedWeight
from engine.model.decoder import decoder_layers, states_read, states_written
from engine.model.experts import unrounded_layers
from engine.model.layers import as_linear, is_plain, names_by_input
from engine.request.errors import UnsupportedModelError
from engine.weights.rounding.gptq import round_by_inputs

logger = logging.getLogger(__name__)

Rounding = Callable[[torch.Tensor, torch.Tensor], GroupedWeight]
"""Takes a weight and its inputs' Hessian."""


@torch.no_grad()
def quantize_4_bits(
    model: PreTrainedModel,
    texts: torch.Tensor,
    rounding: Rounding = round_by_inputs,
    takes: Callable[[nn.Module], bool] = is_plain,
) -> Iterator[dict[str, GroupedWeight]]:
    """Yields the decoder's linear layers in 4 bits by their names, those together that read one input,
    in the order in which a forward computes them. ``texts``: ``[texts, tokens]`` ids to calibrate on.
    ``takes``: which of its linear layers are rounded.

    When they are yielded, the model holds their dequantised weights in its own type. Who takes them may
    put other modules in their place before asking for the next ones, whose inputs then come from those.
    The output head, embeddings, gates of states, routers and experts that are kept in one tensor are left
    as they are.

    Raises UnsupportedModelError where decoder layers hand on more than hidden states.
    """
    kept = unrounded_layers(model)
    layers = _layer_names(model)
    states, calls = _first_states(model, layers, texts.to(model.device))
    for number, name in enumerate(layers):
        run = _Run(model, name, calls[name], states)
        for group in run.groups(lambda module: takes(module) and module not in kept):
            yield _round_group(model, group, run.hessian(group[0]), rounding)
        states = run.outputs()
        logger.info("4 bits: decoder layer %d of %d", number + 1, len(layers))


class _Enough(Exception):  # noqa: N818 - it is none
    """Ends a forward whose further part is not needed."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One decoder layer on all texts. ``call``: positional and keyword arguments behind the hidden
    states, the same for each text. ``states``: ``[texts, tokens, hidden_size]``, which it reads."""

    model: PreTrainedModel
    name: str
    call: tuple[tuple[Any, ...], dict[str, Any]]
    states: torch.Tensor

    def groups(self, takes: Callable[[nn.Module], bool]) -> list[list[str]]:
        """Returns the names of the linear layers to round, in the order of a forward, grouped by the
        tensor they read. Layers that no token reached (experts) come last, each alone."""
        layers = {
            module: f"{self.name}.{name}"
            for name, module in self.model.get_submodule(self.name).named_modules()
            if is_plain(module) and takes(module)
        }
        groups = names_by_input(layers, lambda: self._forward(0))
        read = {name for names in groups for name in names}
        return [*groups, *([name] for name in layers.values() if name not in read)]

    def hessian(self, name: str) -> torch.Tensor:
        """Returns the sum of ``outer(x, x)`` over all inputs x of a linear layer, in float32."""
        layer: Any = self.model.get_submodule(name)
        in_features = as_linear(layer).in_features
        total = torch.zeros(in_features, in_features, device=self.states.device)

        def note(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> NoReturn:
            rows = inputs[0].reshape(-1, in_features).float()
            total.addmm_(rows.T, rows)
            raise _Enough

        handle = layer.register_forward_pre_hook(note)
        try:
            for text in range(len(self.states)):
                try:
                    self._forward(text)
                except _Enough:
                    continue
        finally:
            handle.remove()
        return total

    def outputs(self) -> torch.Tensor:
        """Returns what the layer hands on, in the place of what it read."""
        for text in range(len(self.states)):
            self.states[text] = self._forward(text)
        return self.states

    def _forward(self, text: int) -> torch.Tensor:
        positional, named = self.call
        layer = self.model.get_submodule(self.name)
        return states_written(layer(self.states[text : text + 1], *positional, **named))


def _layer_names(model: PreTrainedModel) -> list[str]:
    """Returns the names of the decoder's layers in order."""
    layers = decoder_layers(model)
    place = next(name for name, module in model.named_modules() if module is layers)
    return [f"{place}.{number}" for number in range(len(layers))]


def _first_states(
    model: PreTrainedModel, layers: list[str], texts: torch.Tensor
) -> tuple[torch.Tensor, dict[str, tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Returns what the first layer reads, and what each is called with beside it; all texts are as
    long, so that positions and masks are the same for each."""
    states: list[torch.Tensor] = []
    calls: list[dict[str, tuple[tuple[Any, ...], dict[str, Any]]]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            named = dict(named)
            first = states_read(positional, named)
            named.pop("hidden_states", None)
            calls[-1][name] = positional[1:], named
            if name == layers[0]:
                states.append(first[0])
                if len(states) > 2:
                    raise _Enough

        return hook

    handles = [
        model.get_submodule(name).register_forward_pre_hook(note(name), with_kwargs=True)
        for name in layers
    ]
    try:
        for text in texts:
            calls.append({})
            try:
                model(input_ids=text[None], use_cache=False)
            except _Enough:
                continue
    finally:
        for handle in handles:
            handle.remove()
    _check_alike(model, calls[:2])
    return torch.stack(states), calls[0]


def _check_alike(
    model: PreTrainedModel, calls: list[dict[str, tuple[tuple[Any, ...], dict[str, Any]]]]
) -> None:
    """Raises UnsupportedModelError where two texts' layers are called with different tensors."""
    tensors = [torch.utils._pytree.tree_leaves(list(each.values())) for each in calls]
    for first, *others in zip(*tensors, strict=True):
        for other in others:
            if isinstance(first, torch.Tensor) and not torch.equal(first, other):
                raise UnsupportedModelError(
                    f"4 bits: decoder layers of {type(model).__name__} hand on more than hidden states"
                )


def _round_group(
    model: PreTrainedModel, names: list[str], hessian: torch.Tensor, rounding: Rounding
) -> dict[str, GroupedWeight]:
    """Rounds layers that read one input, and gives the model what their codes mean."""
    found = {}
    for name in names:
        module: Any = model.get_submodule(name)
        linear = as_linear(module)
        found[name] = rounding(linear.weight.detach(), hessian)
        rounded = nn.Linear(linear.in_features, linear.out_features, device="meta")
        values = found[name].dequantized().to(linear.weight.dtype)
        rounded.weight = nn.Parameter(values, requires_grad=False)
        rounded.bias = linear.bias
        model.set_submodule(name, rounded)
    return found
