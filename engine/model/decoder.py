"""A model's decoder layers, by what transformers says of them, and the hidden states between them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.batch import NORMED
from engine.request.errors import UnsupportedModelError


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Returns the decoder's layers in order. Raises UnsupportedModelError where the decoder has no list
    of them, or several lists of their number."""
    wanted = getattr(model.config, "num_hidden_layers", None)
    lists = [
        child
        for child in model.get_decoder().children()
        if isinstance(child, nn.ModuleList) and len(child) == wanted
    ]
    if len(lists) != 1:
        raise UnsupportedModelError(f"{type(model).__name__} has no single list of decoder layers")
    return lists[0]


def cache_name(model: PreTrainedModel) -> str:
    """Returns what a forward calls the keys and values before its tokens, as argument and in its output:
    transformers renamed it in 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def states_read(positional: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
    """Returns the hidden states ``[1, num_rows, hidden_size]`` among a decoder layer's arguments."""
    states: Tensor = positional[0] if positional else named["hidden_states"]
    return states


def states_written(output: Any) -> Tensor:
    """Returns the hidden states ``[1, num_rows, hidden_size]`` of what a decoder layer returns."""
    states: Tensor = output[0] if isinstance(output, tuple) else output
    return states


@contextmanager
def kept_states(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Yields a dictionary into which a forward puts the hidden states ``[num_rows, hidden_size]`` of
    ``layers`` (as in ``InputBatch.hidden_layers``): the tensors that the forward itself made, uncopied.

    Raises UnsupportedModelError where the model has no such layers. Without ``layers`` the model is left
    alone.
    """
    kept: dict[int, Tensor] = {}
    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(_keep(model, layer, kept))
        yield kept


def _keep(model: PreTrainedModel, layer: int, kept: dict[int, Tensor]) -> Callable[[], None]:
    """Has forwards keep a layer's states; returns what ends that."""

    def keep_read(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        kept[layer] = states_read(positional, named)[0]

    def keep_written(_: nn.Module, __: object, output: Any) -> None:
        kept[layer] = states_written(output)[0]

    def keep_normed(_: nn.Module, __: object, output: Any) -> None:
        states = getattr(output, "last_hidden_state", None)
        if states is not None:
            kept[layer] = states[0]

    if layer == NORMED:
        # Not before the head, which may see fewer rows. Models call one of these, or one in another.
        parts = [each for each in model.children() if isinstance(each, PreTrainedModel)]
        with ExitStack() as hooks:
            for module in dict.fromkeys([model.get_decoder(), *parts, model.base_model]):
                hooks.callback(module.register_forward_hook(keep_normed).remove)
            return hooks.pop_all().close
    modules = decoder_layers(model)
    if not 0 <= layer <= len(modules):
        raise UnsupportedModelError(
            f"there are no hidden states of layer {layer}: {type(model).__name__} has those that "
            f"enter its layers 0 to {len(modules) - 1}, and {len(modules)} for what leaves the last"
        )
    if layer == len(modules):
        return modules[-1].register_forward_hook(keep_written).remove
    return modules[layer].register_forward_pre_hook(keep_read, with_kwargs=True).remove
