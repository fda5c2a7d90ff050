"""How much a quantised model differs from what it was made from, on a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

_WINDOW = 512
"""Tokens that are read at once, each after those before it in its window."""


@torch.inference_mode()
def compare(
    model: PreTrainedModel, quantized: PreTrainedModel, token_ids: Sequence[int], bits: int
) -> dict[str, float]:
    """Means over the text's tokens: ``loss`` and that of the quantised model (``loss_int8`` if it has 8
    ``bits``) in nats, ``kl`` of its distributions from the model's, ``same_argmax`` as a share."""
    totals = torch.zeros(4, dtype=torch.float64)
    num_tokens = 0
    for start in range(0, len(token_ids) - 1, _WINDOW):
        window = torch.tensor([token_ids[start : start + _WINDOW + 1]])
        targets = window[0, 1:]
        ours, theirs = (
            each(input_ids=window[:, :-1], use_cache=False).logits[0].float().log_softmax(-1)
            for each in (model, quantized)
        )
        totals += torch.stack(
            [
                F.nll_loss(ours, targets, reduction="sum"),
                F.nll_loss(theirs, targets, reduction="sum"),
                F.kl_div(theirs, ours, reduction="sum", log_target=True),
                (ours.argmax(-1) == theirs.argmax(-1)).sum(),
            ]
        )
        num_tokens += len(targets)
    loss, loss_quantized, kl, same = (totals / num_tokens).tolist()
    return {
        "num_tokens": num_tokens,
        "loss": loss,
        f"loss_int{bits}": loss_quantized,
        "kl": kl,
        "same_argmax": same,
    }


@torch.inference_mode()
def layer_errors(
    model: PreTrainedModel,
    quantized: PreTrainedModel,
    token_ids: Sequence[int],
    kinds: tuple[type[nn.Module], ...],
) -> dict[str, float]:
    """How far each layer of these kinds in ``quantized`` lies from the one it was made from, for the
    inputs that the model's own layer reads on the text's first window: the norm of the difference over
    that of the output. By the layer's name, the largest first."""
    totals: dict[str, torch.Tensor] = {}

    def note(name: str, layer: Any) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            del module
            error, size = (layer(inputs[0]) - output).float(), output.float()
            found = torch.stack([error.square().sum(), size.square().sum()]).double()
            totals[name] = totals.get(name, 0) + found

        return hook

    layers = {
        name: module for name, module in quantized.named_modules() if isinstance(module, kinds)
    }
    handles = [
        model.get_submodule(name).register_forward_hook(note(name, layer))
        for name, layer in layers.items()
    ]
    try:
        model(input_ids=torch.tensor([list(token_ids[:_WINDOW])]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    errors = {name: float((error / size).sqrt()) for name, (error, size) in totals.items()}
    return dict(sorted(errors.items(), key=lambda item: -item[1]))
