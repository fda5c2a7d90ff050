"""The parameters of a model, as a GGUF file has them: the tensors that each is made of, and how.

``gguf``'s table says which tensor each parameter is, ``conversion.SOURCES`` where the table does not, and
``conversion.Undo`` what llama.cpp's conversion did to them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.request.errors import UnsupportedModelError
from engine.weights.gguf.conversion import DECAY, SOURCES, Array, Undo
from engine.weights.gguf.file import GgufHeader, needing_gguf
from engine.weights.index import StoredTensor, named

_LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")
_STORED_LAYER = re.compile(r"blk\.(\d+)\.(.*)")
_SHARED = re.compile(r"attn_[kv](_norm)?\.weight")
_IN_METADATA = re.compile(r"layers\.(\d+)\.mlp\.act_fn\.(alpha_p|alpha_n|beta|eps)$")


class Making(NamedTuple):
    """How a parameter is made: its tensors, and how they are restored. ``at``: its index in a stack of
    matrices."""

    parts: tuple[StoredTensor, ...]
    undo: tuple[Undo, ...]
    shape: tuple[int, ...]
    at: int | None

    @property
    def keeps_rows(self) -> bool:
        """Whether it has the parts' rows, in any order, and columns in another at most."""
        return self.at is None and not any(each.values or each.join for each in self.undo)

    def features(self, config: Any) -> torch.Tensor | None:
        """Returns which feature each of the file's columns is for, None where they are in order."""
        columns = next((each.columns for each in self.undo if each.columns), None)
        if columns is None:
            return None
        return torch.from_numpy(np.argsort(columns(config, self.shape[1])))

    def joined(self, config: Any, parts: Sequence[Array]) -> Array:
        """Returns the parameter of its parts, as they are in the file."""
        join = next((each.join for each in self.undo if each.join), None)
        if join is not None:
            found = join(config, parts)
        elif self.at is not None:
            found = parts[0][self.at]
        else:
            found = self.stacked(config, [_without_ones(each) for each in parts])
        for each in self.undo:
            if each.columns is not None:
                found = found[:, each.columns(config, found.shape[1])]
            if each.values is not None:
                found = each.values(found)
        return found

    def stacked(self, config: Any, parts: Sequence[Array]) -> Array:
        """Lays rows one below the other, for each expert where there are such, in the model's order."""
        found = (
            parts[0] if len(parts) == 1 else np.concatenate(parts, axis=max(0, parts[0].ndim - 2))
        )
        for each in self.undo:
            if each.rows is not None:
                found = found[each.rows(config, len(found))]
        return found


def _without_ones(values: Array) -> Array:
    """Convolutions have dimensions of one channel between their own in some files."""
    return values.squeeze() if values.ndim > 3 else values


class _Names:
    """Which tensors of a file a parameter is made of."""

    def __init__(self, header: GgufHeader, num_layers: int) -> None:
        with needing_gguf():
            from gguf import MODEL_ARCH_NAMES, TensorNameMap

        class Table(TensorNameMap):
            # The one of the package takes over the rows of whatever architecture is asked for.
            block_mappings_cfg = dict(TensorNameMap.block_mappings_cfg)

        numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
        if header.architecture not in numbers:
            raise UnsupportedModelError(
                "the installed package gguf has no names of tensors for architecture "
                f"{header.architecture!r}"
            )
        self._table = Table(numbers[header.architecture], num_layers)
        self._tensors = header.tensors

    def of(self, name: str) -> tuple[tuple[StoredTensor, ...], int | None] | None:
        """Returns the tensors, and which of a stack it is; None where none are in the file."""
        for names, at in self._candidates(name):
            found = tuple(self._tensors[each] for each in names if each in self._tensors)
            if len(found) == len(names):
                return found, at
        return None

    def _candidates(self, name: str) -> Iterator[tuple[list[str], int | None]]:
        layer = _LAYER.search(name)
        # Some types keep their layers in a model that had another name.
        for known in (name, re.sub(r"^model\.", "backbone.", name)):
            stored = self._table.get_name(known, try_suffixes=(".weight", ".bias"))
            if stored is not None:
                yield from (([f"{stored}{end}"], None) for end in ("", ".weight", ".bias"))
        for pattern, several in SOURCES:
            if (found := re.search(pattern, name)) is not None:
                begin = "" if layer is None else f"blk.{layer[1]}."
                at = found.groupdict().get("at")
                yield [begin + each for each in several.split()], None if at is None else int(at)


def plan(
    header: GgufHeader,
    config: Any,
    undo: Sequence[Undo],
    wanted: Mapping[str, torch.Tensor],
    tied: Mapping[str, str],
) -> tuple[dict[str, Making], dict[str, torch.Tensor]]:
    """Returns how each parameter is made, and those whose values the metadata says, in float32.
    ``wanted``: a model's parameters, on the device "meta"; ``tied``: aliases of parameters. Raises
    UnsupportedModelError where a tensor is missing, or is no parameter's."""
    names = _Names(header, config.num_hidden_layers)
    found, said, missing = {}, {}, []
    for name, parameter in wanted.items():
        if (sources := names.of(name)) is not None:
            own = tuple(each for each in (*undo, DECAY) if each.is_for(name, len(sources[0])))
            found[name] = Making(sources[0], own, tuple(parameter.shape), sources[1])
        elif (value := _in_metadata(header, name)) is not None:
            said[name] = torch.tensor(value).reshape(parameter.shape)
        elif name not in tied:
            missing.append(name)
    used = {part.name for making in found.values() for part in making.parts}
    left = header.tensors.keys() - used
    refuse("tensors that the configuration asks for are missing", missing)
    refuse("tensors are no parameters of the model", (n for n in left if _is_needed(config, n)))
    return found, said


def _in_metadata(header: GgufHeader, name: str) -> float | None:
    """Returns a parameter of an activation, which files have among their values."""
    found = _IN_METADATA.search(name)
    values = found and header.metadata.get(f"xielu.{found[2]}")
    if not found or not isinstance(values, list) or int(found[1]) >= len(values):
        return None
    return float(values[int(found[1])])


def _is_needed(config: Any, name: str) -> bool:
    """Whether the model needs a tensor. It does not need rotary embedding factors,
    multi-token-prediction layers, or keys and values of layers that reuse another layer's."""
    found = _STORED_LAYER.match(name)
    if found is None:
        return not name.startswith(("rope_freqs.", "rope_factors_"))
    num_layers = config.num_hidden_layers
    first_shared = num_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    layer = int(found[1])
    is_shared = layer >= first_shared and _SHARED.fullmatch(found[2])
    return not (layer >= num_layers or is_shared or found[2].startswith("rope_f"))


def refuse(fault: str, names: Iterable[str]) -> None:
    """Raises UnsupportedModelError if there are any."""
    several = sorted(names)
    if several:
        raise UnsupportedModelError(f"{len(several)} {fault}: {named(several)}")


# --- values ---


def bytes_of(tensor: StoredTensor) -> Array:
    data: Array = np.fromfile(tensor.file, np.uint8, tensor.num_bytes, offset=tensor.start)
    if len(data) != tensor.num_bytes:
        raise UnsupportedModelError(
            f"the file ends in tensor {tensor.name!r}: it was cut meanwhile"
        )
    return data


def values_of(tensor: StoredTensor, data: Array) -> Array:
    """Returns a tensor in float32, the fastest moving dimension last."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = data.reshape(prod(tensor.shape[:-1]), -1)
    kind = GGMLQuantizationType[tensor.kind]
    try:
        # Scales that are no numbers are named with all others, later.
        with np.errstate(all="ignore"):
            values: Array = dequantize(rows, kind)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"tensor {tensor.name!r} is of the type {tensor.kind}, which is not read"
        ) from error
    return values.reshape(tensor.shape)


def read_floats(header: GgufHeader, name: str) -> torch.Tensor:
    """Returns a small tensor of the file. Raises UnsupportedModelError where it has none."""
    tensor = header.tensors.get(name)
    if tensor is None or tensor.kind != "F32":
        raise UnsupportedModelError(f"{name} is not stored in float32")
    return torch.from_numpy(bytes_of(tensor).view(np.float32))
