"""Formats of quantized checkpoints. One file per format, named as ``quant_method`` is, with underscores
for hyphens; all files here are loaded with the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from engine.request.errors import UnsupportedModelError
from engine.weights.layer import Place
from engine.weights.places import StoredConfig

_READERS: dict[str, Callable[[Any], Place]] = {
    each.name.replace("_", "-"): import_module(f"{__name__}.{each.name}").read
    for each in iter_modules(__path__)
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_places(config: Any, key_mapping: Mapping[str, str] | None = None) -> StoredConfig | None:
    """Returns what ``from_pretrained`` has to be given as its ``quantization_config`` for a model of
    this configuration; None: no format of these, which transformers loads as it does. Takes what is read
    out of ``config``: the model is none of transformers' quantised ones. ``key_mapping``: what
    ``from_pretrained`` is given as such.

    Raises UnsupportedModelError, which says the field and its value, for variants that are not served.
    """
    found = getattr(config, "quantization_config", None)
    if not isinstance(found, Mapping):
        return None
    method = found.get("quant_method")
    reader = _READERS.get(method) if isinstance(method, str) else None
    if method == "fp8" and any(getattr(config, name, None) for name in _EXPERTS):
        # transformers makes one tensor of experts, and floats of them; on newer GPUs only if it is asked.
        config.quantization_config = {**found, "dequantize": True}
        return None
    if reader is None:
        return None
    try:
        place = reader(found)
    except RecursionError as error:
        raise UnsupportedModelError("quantization_config is nested too deeply") from error
    del config.quantization_config
    return StoredConfig(place, key_mapping)
