"""A folder that PEFT wrote, with an adapter of low rank in it: its configuration and tensors, read with
distrust.

Sizes, names and shapes are known before a tensor is read, and nothing is unpickled. Whatever does not fit
the model, or would be served as something else than it was trained as, is an ``AdapterError`` of one
line.
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.kernels import MOST_RANK
from engine.model.layers import LayerShape
from engine.request.errors import AdapterError, UnsupportedModelError
from engine.weights.files import read_header, read_tensors
from engine.weights.index import named
from engine.weights.patterns import Patterns

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_MOST_CONFIG_BYTES = 1 << 20
_MOST_PATH_CHARS = 300
_PREFIX = "base_model.model."
_FIRST, _SECOND = "lora_A", "lora_B"
_TYPES = (torch.float32, torch.bfloat16, torch.float16)

_READ = frozenset(
    {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias"}
    | {"init_lora_weights", "base_model_name_or_path"}
)
_WITHOUT_EFFECT = frozenset(
    {"task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "runtime_config"}
    | {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
    | {"lora_dropout", "fan_in_fan_out", "loftq_config", "eva_config", "corda_config"}
    | {"lora_ga_config", "megatron_config", "megatron_core", "qalora_group_size"}
    | {"ensure_weight_tying"}
)
"""Keys that say how the adapter was trained; which layers it changes, its tensors say."""
_INITIALISATIONS = frozenset({"gaussian", "eva", "orthogonal"})
"""That leave the base model's weights as they are."""


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """``parts``: by the layer's name ``lora_A`` ``[rank, in_features]`` and, times the scale, ``lora_B``
    ``[out_features, rank]``, float32. ``digest``: of all that changes what the model computes. ``base``:
    the model that the folder names; ""."""

    parts: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    digest: str
    rank: int
    base: str


def read_adapter(path: Path, shapes: Mapping[str, LayerShape]) -> AdapterWeights:
    """``shapes``: of the layers that an adapter may change, by name. Raises AdapterError."""
    try:
        return _Folder(path.expanduser(), shapes).read()
    except (AdapterError, OSError, RuntimeError) as error:
        # A path may be too long, or begin at a home that is not known.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise AdapterError(
            f"{str(path)[:_MOST_PATH_CHARS]}: {' '.join(str(reason).split())}"
        ) from None


class _Folder:
    def __init__(self, path: Path, shapes: Mapping[str, LayerShape]) -> None:
        self._path, self._shapes = path, shapes
        self._config: Mapping[str, Any] = {}
        self._patterns = Patterns()

    def read(self) -> AdapterWeights:
        if not self._path.is_dir():
            raise AdapterError("there is no such folder")
        self._config = self._read_config()
        self._check_config()
        tensors = self._read_tensors()
        parts, hashed, rank = {}, hashlib.sha256(), 0
        for layer in sorted({key.rpartition(".")[0] for key in tensors}):
            first, second = tensors[f"{layer}.{_FIRST}"], tensors[f"{layer}.{_SECOND}"]
            scale = self._scale(layer, len(first))
            second = second * scale
            for part in (first, second):
                if not bool(part.isfinite().all()):
                    raise AdapterError(f"{layer}: it has numbers that are not finite")
                hashed.update(f"{layer} {tuple(part.shape)} ".encode())
                hashed.update(part.contiguous().numpy().data)
            parts[self._name(layer)] = first, second
            rank = max(rank, len(first))
        base = self._config.get("base_model_name_or_path")
        return AdapterWeights(
            parts, hashed.hexdigest(), rank, base if isinstance(base, str) else ""
        )

    # --- the configuration ---

    def _read_config(self) -> Mapping[str, Any]:
        path = self._path / CONFIG
        try:
            if path.stat().st_size > _MOST_CONFIG_BYTES:
                raise AdapterError(f"{CONFIG} has more than {_MOST_CONFIG_BYTES} bytes")
            config = json.loads(path.read_text())
        except OSError as error:
            raise AdapterError(f"{CONFIG} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise AdapterError(f"{CONFIG} is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise AdapterError(f"{CONFIG} is not an object")
        return config

    def _check_config(self) -> None:
        config = self._config
        if config.get("peft_type") != "LORA":
            raise AdapterError(f"peft_type is {config.get('peft_type')!r}; only LORA is served")
        for key in ("r", "lora_alpha"):
            if not _is_positive(config.get(key)):
                raise AdapterError(f"{key} is {config.get(key)!r}, not a positive number")
        for key in ("rank_pattern", "alpha_pattern"):
            pattern = config.get(key) or {}
            if not isinstance(pattern, dict) or not all(map(_is_positive, pattern.values())):
                raise AdapterError(f"{key} does not give positive numbers by modules' names")
        if config.get("bias", "none") != "none":
            raise AdapterError(f"bias is {config['bias']!r}; adapters with biases are not served")
        how = config.get("init_lora_weights", True)
        if not isinstance(how, bool) and how not in _INITIALISATIONS:
            raise AdapterError(
                f"init_lora_weights is {how!r}, which changes the base model's weights, too; save the "
                "adapter with path_initial_model_for_weight_conversion, as plain LoRA"
            )
        for key, value in config.items():
            if key not in _READ | _WITHOUT_EFFECT and value:
                raise AdapterError(f"{key} is set, which is not served: only plain LoRA is")

    def _scale(self, layer: str, rank: int) -> float:
        """Returns what a layer's products are multiplied by; PEFT's names of the layer decide."""
        wanted = self._of_pattern("rank_pattern", layer, self._config["r"])
        if rank != wanted:
            raise AdapterError(f"{layer}: its rank is {rank}; {CONFIG} says {wanted}")
        alpha = self._of_pattern("alpha_pattern", layer, self._config["lora_alpha"])
        return float(alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank))

    def _of_pattern(self, name: str, layer: str, default: Any) -> Any:
        for key, value in (self._config.get(name) or {}).items():
            try:
                if self._patterns.match(key, layer, r"(.*\.)?({})$"):
                    return value
            except ValueError as error:
                shown = reprlib.repr(key)
                raise AdapterError(f"{name}: {shown} is no pattern: {error}") from None
        return default

    # --- the tensors ---

    def _read_tensors(self) -> dict[str, torch.Tensor]:
        """Returns all, as float32, by the layer's name and which of the two it is."""
        path = self._path / WEIGHTS
        if not path.is_file():
            has_pickles = (self._path / "adapter_model.bin").exists()
            raise AdapterError(
                f"it has no {WEIGHTS}"
                + (": a .bin is not read, save it anew" if has_pickles else "")
            )
        try:
            known = {_key_of(name): tensor for name, tensor in read_header(path).items()}
            self._check({key: tensor.shape for key, tensor in known.items()})
            stored = read_tensors(known.values())
        except UnsupportedModelError as error:
            raise AdapterError(str(error)) from None
        tensors = {key: stored[each.name] for key, each in known.items()}
        for key, tensor in tensors.items():
            if tensor.dtype not in _TYPES:
                raise AdapterError(f"{key} has the type {tensor.dtype}, which is not served")
        return {key: tensor.float() for key, tensor in tensors.items()}

    def _check(self, found: Mapping[str, tuple[int, ...]]) -> None:
        """Raises unless each layer that is named is one of the model's and has both tensors, in shapes
        that fit it."""
        if not found:
            raise AdapterError(f"{WEIGHTS} has no tensors")
        layers = sorted({key.rpartition(".")[0] for key in found})
        unknown = [layer for layer in layers if self._name(layer) not in self._shapes]
        if unknown:
            raise AdapterError(
                f"{named(unknown)}: not among the layers that an adapter may change here"
                f"{self._of_base()}"
            )
        own = {self._name(layer) for layer in layers}
        if len(own) < len(layers):
            raise AdapterError(f"{WEIGHTS} has several parts for one layer")
        for layer in layers:
            shape = self._shapes[self._name(layer)]
            pair = [found.get(f"{layer}.{each}") for each in (_FIRST, _SECOND)]
            rank = pair[0][0] if pair[0] else 0
            if None in pair:
                missing = (_FIRST, _SECOND)[pair.index(None)]
                raise AdapterError(f"{layer}: {missing} is missing")
            if not 1 <= rank <= MOST_RANK:
                raise AdapterError(f"{layer}: its rank is {rank}, not 1 to {MOST_RANK}")
            if pair != [(rank, shape.in_features), (shape.out_features, rank)]:
                raise AdapterError(
                    f"{layer}: {_FIRST} is {pair[0]} and {_SECOND} {pair[1]}; the model's layer takes "
                    f"{shape.in_features} features and makes {shape.out_features}{self._of_base()}"
                )

    def _name(self, layer: str) -> str:
        """The layer's name in the model served, which may be the text half of a larger one."""
        if layer in self._shapes:
            return layer
        return layer.replace("language_model.", "")

    def _of_base(self) -> str:
        base = self._config.get("base_model_name_or_path")
        return f"; it was made for {base}" if isinstance(base, str) else ""


def _key_of(name: str) -> str:
    """``base_model.model.LAYER.lora_A.weight``: the layer, and which of the two."""
    own = name.removeprefix(_PREFIX).removesuffix(".weight")
    layer, _, which = own.rpartition(".")
    is_known = name.startswith(_PREFIX) and name.endswith(".weight")
    if is_known and own.endswith(".base_layer"):
        raise AdapterError(
            f"{name} are the base's own weights; save with save_embedding_layers=False"
        )
    if not is_known or which not in (_FIRST, _SECOND) or not layer:
        raise AdapterError(
            f"the tensor {name} is not served: only lora_A and lora_B of linear layers are"
        )
    return own


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf  # type: ignore[operator]
