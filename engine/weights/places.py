"""Gives transformers' loader the placeholders that a quantized checkpoint fills.

transformers reads such formats by packages that turn weights back to floats, or not at all. Here a
quantizer of its own interface replaces layers by our modules; its loader does the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from engine.request.errors import UnsupportedModelError
from engine.weights.experts import StoredExperts, place_experts
from engine.weights.layer import StoredWeight, fixed

_METHOD = "slipstream-stored"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_EXPERTS = re.compile(r"\.experts\.\d+\.\w+\.(qweight|weight_packed|weight_scale(_inv)?)$")

Place = Callable[[str, nn.Module], nn.Module | None]
"""Takes a module's name and the module; returns what stands in its place, or None: it stays."""


class StoredTensor(NamedTuple):
    """A tensor as a file's header describes it. ``dtype`` None: one that is not known here."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]


class StoredTensors:
    """The tensors of a checkpoint, as its headers describe them. ``prefix``: of the model's names,
    which a file may leave out."""

    def __init__(self, entries: Mapping[str, StoredTensor], prefix: str = "") -> None:
        self.entries = entries
        self._prefix = f"{prefix}." if prefix else ""
        self._modules = {name.rpartition(".")[0] for name in entries}

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> StoredTensors:
        """Returns the description of these tensors."""
        return cls({name: StoredTensor(t.dtype, tuple(t.shape)) for name, t in tensors.items()})

    @classmethod
    def read(
        cls, files: Iterable[str], model: PreTrainedModel, key_mapping: Mapping[str, str]
    ) -> StoredTensors:
        """Reads the headers alone. ``key_mapping``: patterns in names, and what stands there in the
        model's; transformers has more for some models. Raises SafetensorError for damaged files,
        UnsupportedModelError for files of another kind."""
        entries = {}
        conversions = get_model_conversion_mapping(model)
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        for path in files:
            if not path.endswith(".safetensors"):
                raise UnsupportedModelError(
                    f"weights in few bits are read from safetensors files, not from {Path(path).name}"
                )
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    found = file.get_slice(name)
                    dtype = _DTYPES.get(found.get_dtype())
                    for pattern, new in key_mapping.items():
                        name = re.sub(pattern, new, name, count=1)
                    name = apply_renamings(name, renamings)
                    entries[name] = StoredTensor(dtype, tuple(found.get_shape()))
        return cls(entries, model.base_model_prefix)

    def get(self, name: str) -> StoredTensor | None:
        """Returns a tensor of this name in the model, or None."""
        return self.entries.get(name) or self.entries.get(name.removeprefix(self._prefix))

    def has_module(self, name: str) -> bool:
        """Whether there are tensors of a module of this name in the model."""
        return not self._modules.isdisjoint({name, name.removeprefix(self._prefix)})

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return self.get(name) is not None

    def room(
        self, name: str, shape: tuple[int, ...], dtypes: Sequence[torch.dtype]
    ) -> nn.Parameter:
        """Returns a parameter of the type that is stored, to be filled. Raises UnsupportedModelError
        where the tensor is missing, of another shape, or of none of these types."""
        found = self.get(name)
        if found is None:
            raise UnsupportedModelError(
                f"1 tensors that the configuration asks for are missing: {name}"
            )
        if found.shape != shape:
            raise UnsupportedModelError(
                "1 tensors have other shapes than the configuration says: "
                f"{name} {list(found.shape)} instead of {list(shape)}"
            )
        if found.dtype is None or found.dtype not in dtypes:
            wanted = ", ".join(_said(each) for each in dtypes)
            raise UnsupportedModelError(f"{name} is of {_said(found.dtype)} instead of {wanted}")
        return fixed(torch.empty(shape, dtype=found.dtype))


def _said(dtype: torch.dtype | None) -> str:
    return "an unknown type" if dtype is None else str(dtype).removeprefix("torch.")


PlaceByTensors = Callable[[str, nn.Module, StoredTensors], nn.Module | None]
"""As ``Place``, and what the checkpoint's headers say."""


@register_quantization_config(_METHOD)
class StoredConfig(QuantizationConfigMixin):
    """A ``quantization_config`` for ``from_pretrained``. ``place``: makes a ``StoredWeight`` for each
    module that is quantized in the checkpoint, or ``place_by_tensors``, for safetensors checkpoints,
    whose names are changed by ``key_mapping``. They are called while modules are on the device "meta"."""

    def __init__(
        self,
        place: Place | None = None,
        place_by_tensors: PlaceByTensors | None = None,
        key_mapping: Mapping[str, str] | None = None,
        **_: Any,
    ) -> None:
        self.quant_method: Any = _METHOD
        self.place = place
        self.place_by_tensors = place_by_tensors
        self.key_mapping = key_mapping or {}


@register_quantizer(_METHOD)
class StoredQuantizer(HfQuantizer):
    """Puts the places into a model before its weights are loaded, and lets them look at what came."""

    requires_calibration = False
    quantization_config: StoredConfig

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Iterable[str] = (), **_: Any
    ) -> None:
        by_tensors = self.quantization_config.place_by_tensors
        if by_tensors is None:
            place = self.quantization_config.place
            assert place is not None, "loaded by this package alone"
            _put(model, place)
            return
        tensors = StoredTensors.read(checkpoint_files, model, self.quantization_config.key_mapping)

        def found(name: str, module: nn.Module) -> nn.Module | None:
            def layer(part: str, plain: nn.Linear) -> nn.Module | None:
                return by_tensors(f"{name}.{part}", plain, tensors)

            def has(part: str) -> bool:
                return tensors.has_module(f"{name}.{part}")

            experts = place_experts(module, has, layer)
            return by_tensors(name, module, tensors) if experts is None else experts

        _put(model, found)
        _refuse_experts(model, tensors)
        _refuse_codes(model, tensors)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        for name, module in model.named_modules():
            if isinstance(module, StoredWeight | StoredExperts):
                module.loaded(name)
        # It is a model of ours, whose layers will be replaced.
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _put(model: PreTrainedModel, place: Place) -> None:
    """Puts the places into the model. One is tied to another place, or to nothing."""
    placed = set()
    for name, module in list(model.named_modules(remove_duplicate=False)):
        found = place(name, module)
        if found is not None:
            model.set_submodule(name, found)
            placed.add(f"{name}.weight")
    tied = model.all_tied_weights_keys
    for name in placed & tied.keys():
        if tied[name] not in placed:
            del tied[name]


def _refuse_experts(model: PreTrainedModel, tensors: StoredTensors) -> None:
    """Raises UnsupportedModelError if the model keeps experts in one tensor, which has no placeholder
    for quantized ones."""
    modules = dict(model.named_modules())
    for name in tensors.entries:
        if _EXPERTS.search(name) and name.rpartition(".")[0] not in modules:
            raise UnsupportedModelError(
                f"{name}: experts in few bits are not served, where the model keeps them in one tensor"
            )


def _refuse_codes(model: PreTrainedModel, tensors: StoredTensors) -> None:
    """Raises UnsupportedModelError where a layer that stayed would take codes for values."""
    kinds = StoredWeight | StoredExperts
    stored = {name for name, each in model.named_modules() if isinstance(each, kinds)}
    for name, _ in model.named_parameters():
        found = tensors.get(name)
        if found and found.dtype not in _FLOATS and name.rpartition(".")[0] not in stored:
            raise UnsupportedModelError(
                f"{name} is of {_said(found.dtype)}, which quantization_config does not explain"
            )
