"""A checkpoint's weights, read and checked: what is missing, does not fit, is left over or is no number.

transformers gives random values to what a checkpoint lacks and drops what it does not know: the model
would load, and write nonsense.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine.request.errors import UnsupportedModelError
from engine.weights.files import read_header
from engine.weights.index import named
from engine.weights.shards import local_part

_VALUES_AT_ONCE = 1 << 24
"""Types without a kernel for extremes are made wider in slices, which bounds the memory that takes."""
_WITH_EXTREMES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
_LARGEST_BYTES = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}
"""The bits of the largest number, without its sign, of 8-bit floats: those above are none."""
_LEFT_OVER = re.compile(r"\.rotary_emb\.\w+$|\.masked_bias$|\.(kv|[qkv])_scale$")
"""Names that older versions wrote beside the weights, and scales for keys and values in 8 bits: none of
them is a weight of the model."""


def load_config(path: str, **options: Any) -> Any:
    """Returns a model's configuration, by transformers' ``from_pretrained``, without its choices of code
    for attention and experts: some fetch it from a hub, whatever ``trust_remote_code`` says."""
    parts = [config := AutoConfig.from_pretrained(path, **options)]
    for part in parts:  # transformers' own setters reach only those that a class declares
        part._attn_implementation_internal = part._experts_implementation_internal = None
        parts += [each for each in vars(part).values() if isinstance(each, PreTrainedConfig)]
    return config


def load_weights(
    model: str | None, config: Any, kind: Any = AutoModelForCausalLM, **options: Any
) -> PreTrainedModel:
    """Returns the causal LM of a folder or hub id, with exactly the weights that its configuration asks
    for. ``kind``: the class; ``options``: of its ``from_pretrained``, with a ``state_dict`` among them
    where ``model`` is None.

    Raises UnsupportedModelError naming the tensors that are missing, of another shape, left over or not
    finite, or the file that cannot be read; whatever else transformers raises.
    """
    try:
        with _quiet():
            answer: Any = kind.from_pretrained(
                model,
                config=config,
                ignore_mismatched_sizes=True,  # they are named below, all of them
                output_loading_info=True,
                **options,
            )
    except SafetensorError as error:
        for file in sorted(Path(model or "").glob("*.safetensors")):
            read_header(file)  # the error that this raises names the file
        raise UnsupportedModelError(f"a file of weights cannot be read: {error}") from error
    loaded: PreTrainedModel = answer[0]
    faults = [*_misfits(loaded, answer[1]), *not_finite(loaded.named_parameters())]
    if faults:
        raise UnsupportedModelError("; ".join(faults))
    return loaded


def not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Returns a fault that names those tensors that hold infinities or no numbers, or nothing. The values
    are passed over once and not copied: 0.2 s for half a billion in bf16 on a core."""
    found = [name for name, tensor in tensors if not _is_finite(local_part(tensor.detach()))]
    return [f"weights that are not finite: {named(found)}"] if found else []


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    flat = tensor.flatten()
    largest = _LARGEST_BYTES.get(tensor.dtype)
    if largest is not None:
        octets = flat.view(torch.uint8).split(_VALUES_AT_ONCE)
        return all(int((each & 0x7F).max()) <= largest for each in octets)
    parts = [flat] if tensor.dtype in _WITH_EXTREMES else flat.split(_VALUES_AT_ONCE)
    for part in parts:
        values = part if part.dtype in _WITH_EXTREMES else part.float()
        # Extremes of values among which one is no number are no numbers.
        if not bool(torch.stack(values.aminmax()).isfinite().all()):
            return False
    return True


def _misfits(model: PreTrainedModel, found: Mapping[str, Any]) -> list[str]:
    """Returns the faults of names and shapes."""
    wrong = [
        f"{name} {list(stored)} instead of {list(wanted)}"
        for name, stored, wanted in sorted(found["mismatched_keys"])
    ]
    faults = {
        "tensors that the configuration asks for are missing": sorted(found["missing_keys"]),
        "tensors have other shapes than the configuration says": wrong,
        "tensors of the decoder are not in the configuration": _dropped(
            model, found["unexpected_keys"]
        ),
    }
    return [f"{len(names)} {fault}: {named(names)}" for fault, names in faults.items() if names]


def _dropped(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Returns those of a checkpoint's unused tensors that its decoder would have computed with: they hang
    at a module that the model has, or lie within its list of layers. Other parts of a larger model (a
    vision tower, heads that predict further tokens) are no loss."""
    modules = dict(model.named_modules())
    lists = [name for name, each in modules.items() if isinstance(each, nn.ModuleList)]
    own = modules.keys() - {"", model.base_model_prefix}
    spare = _prediction_layers(model.config)
    return sorted(
        name
        for name in names
        if not _LEFT_OVER.search(name)
        and not any(f".{layer}." in name for layer in spare)
        and (name.rpartition(".")[0] in own or any(name.startswith(f"{each}.") for each in lists))
    )


def _prediction_layers(config: Any) -> list[str]:
    """Returns the layers after the last that predict further tokens while training: some families number
    them on."""
    first = getattr(config, "num_hidden_layers", None) or 0
    more = getattr(config, "num_nextn_predict_layers", None) or 0
    return [f"layers.{number}" for number in range(first, first + more)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers' report of mismatches, which are reported here, and its progress bar if
    there is no terminal."""
    verbosity = transformers_logging.get_verbosity()
    shows_progress = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shows_progress:
            transformers_logging.enable_progress_bar()
