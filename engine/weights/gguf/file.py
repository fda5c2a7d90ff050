"""GGUF files: found, and their headers read by a reader that trusts no count in them. Needs no torch.

A header says how many values, tensors and bytes follow, and parsers believe it: one wrong number and
they run for hours or ask for all memory there is. So every file is walked here first, within the bounds
of its size, and only a sound one is handed on. What the walk finds is also what the server's process
reads its tokenizer from.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import os
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from engine.request.errors import UnsupportedModelError
from engine.weights.index import StoredTensor, TensorIndex

_VERSIONS = (2, 3)
_MOST_HEADER_BYTES = 1 << 28
_MOST_ELEMENTS = 1 << 22
"""Elements of all arrays of a header together; the largest are vocabularies, and parsers loop over
them."""
_MOST_VALUES, _MOST_TENSORS = 1 << 16, 1 << 17
_MOST_DIMENSIONS, _MOST_PARTS, _MOST_QUOTED = 4, 1 << 12, 40
_ALIGNMENT, _USUAL_ALIGNMENT = "general.alignment", 32
_FIXED = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Types of metadata values by their numbers, as ``struct`` calls them."""
_STRING, _ARRAY = 8, 9
_LEAST_VALUE_BYTES, _LEAST_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 4 + 8
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""Names that llama.cpp's gguf-split gives to the parts of a file."""
_WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata and the tensors that a file says before its data. ``spans``: where each metadata
    value begins and ends in the file, its key and type included."""

    metadata: Mapping[str, Any]
    tensors: TensorIndex
    spans: Mapping[str, tuple[int, int]]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])


def find_gguf(model: str) -> Path | None:
    """Returns the GGUF file that a path means: itself, or the only one of a folder without other weights.
    Of files that are parts of one the first is meant. Raises UnsupportedModelError where a folder has
    several."""
    path = Path(model)
    if path.is_file():
        return _first_part(path) if path.suffix == ".gguf" or _has_magic(path) else None
    if not path.is_dir() or any(next(path.glob(each), None) for each in _WEIGHTS):
        return None
    found = sorted({_first_part(each) for each in path.glob("*.gguf")})
    if len(found) > 1:
        raise UnsupportedModelError(
            f"the folder holds {len(found)} GGUF files ({found[0].name}, {found[1].name}"
            f"{', ..' if len(found) > 2 else ''}): name one of them"
        )
    return found[0] if found else None


def _first_part(path: Path) -> Path:
    return path.with_name(_PART.sub(r"\g<1>-00001-of-\g<3>.gguf", path.name))


def _has_magic(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


@contextmanager
def needing_gguf() -> Iterator[None]:
    """Raises UnsupportedModelError with the extra's name where one of its packages is missing."""
    try:
        yield
    except ImportError as error:
        raise UnsupportedModelError(
            f"GGUF files need {error.name or error}: pip install -e '.[gguf]'"
        ) from error


def read_header(path: Path) -> GgufHeader:
    """Returns the header of a file that holds all that it says: strings, arrays and tensors end within
    it. Parts that it was split into lie beside it, and their tensors are the header's, too.

    Raises UnsupportedModelError with what is wrong, OSError where the file cannot be read.
    """
    whole = _read_part(path)
    count = whole.metadata.get("split.count", 1)
    if not isinstance(count, int) or not 1 <= count <= _MOST_PARTS:
        raise UnsupportedModelError(f"its split.count is {str(count)[:_MOST_QUOTED]}")
    tensors = dict(whole.tensors)
    for number in range(1, count):
        name = _PART.sub(rf"\g<1>-{number + 1:05d}-of-{count:05d}.gguf", path.name)
        if name == path.name or not path.with_name(name).is_file():
            raise UnsupportedModelError(f"part {number + 1} of {count} is missing: {name}")
        part = _read_part(path.with_name(name))
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number, count):
            raise UnsupportedModelError(f"{name} is not part {number + 1} of {count}")
        if not tensors.keys().isdisjoint(part.tensors):
            raise UnsupportedModelError("its parts name a tensor twice")
        tensors |= part.tensors
    return replace(whole, tensors=TensorIndex(tensors))


def _read_part(path: Path) -> GgufHeader:
    with path.open("rb") as file:
        return _Walk(path, file, os.fstat(file.fileno()).st_size).header()


class _Walk:
    """One pass over a header, which reads nothing that the file has no room for. ``part``: what is being
    read, for messages."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size = path, file, size
        self._left = min(size, _MOST_HEADER_BYTES)
        self._num_elements = 0
        self._spans: dict[str, tuple[int, int]] = {}
        self._part = "header"

    def header(self) -> GgufHeader:
        if self._bytes(4) != b"GGUF":
            raise UnsupportedModelError("it does not begin as a GGUF file does")
        version = self._number("I")
        if version not in _VERSIONS:
            raise UnsupportedModelError(
                f"GGUF version {version}; read are 2 and 3, in little-endian order"
            )
        num_tensors = self._count("tensors", _LEAST_TENSOR_BYTES, _MOST_TENSORS)
        num_values = self._count("metadata values", _LEAST_VALUE_BYTES, _MOST_VALUES)
        self._part = "metadata"
        metadata = self._metadata(num_values)
        is_later = bool(metadata.get("split.no"))
        if not is_later and not isinstance(metadata.get("general.architecture"), str):
            raise UnsupportedModelError("its metadata names no general.architecture")
        self._part = "list of tensors"
        tensors = self._tensors(num_tensors, _alignment(metadata))
        return GgufHeader(metadata, tensors, self._spans)

    def _metadata(self, num_values: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(num_values):
            first = self._file.tell()
            key = self._string()
            if key in found:
                raise UnsupportedModelError(f"its metadata says {key!r} twice")
            kind = self._number("I")
            found[key] = self._array(key) if kind == _ARRAY else self._values(key, kind, 1)[0]
            self._spans[key] = first, self._file.tell()
        return found

    def _array(self, key: str) -> list[Any]:
        kind = self._number("I")
        width = struct.calcsize(_FIXED.get(kind, "Q"))
        count = self._count(f"elements of {key!r}", width)
        self._num_elements += count
        if self._num_elements > _MOST_ELEMENTS:
            raise UnsupportedModelError(
                f"its arrays have more than {_MOST_ELEMENTS} elements, up to {key!r}"
            )
        return self._values(key, kind, count)

    def _values(self, key: str, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind not in _FIXED:
            raise UnsupportedModelError(f"metadata {key!r} has the unknown type {kind}")
        layout = f"<{count}{_FIXED[kind]}"
        return list(struct.unpack(layout, self._bytes(struct.calcsize(layout))))

    def _tensors(self, num_tensors: int, alignment: int) -> TensorIndex:
        infos = [self._tensor_info() for _ in range(num_tensors)]
        names = {name for name, *_ in infos}
        if len(names) < len(infos):
            raise UnsupportedModelError("its list of tensors names one twice")
        start = -(-self._file.tell() // alignment) * alignment
        for name, _, _, offset in infos:
            if offset % alignment:
                raise UnsupportedModelError(
                    f"the data of tensor {name!r} begins at {offset}, no multiple of {alignment}"
                )
        tensors = {info[0]: self._stored(*info, start) for info in infos}
        for one, next_one in pairwise(sorted(tensors.values(), key=lambda each: each.start)):
            if one.start + one.num_bytes > next_one.start:
                raise UnsupportedModelError(
                    f"the data of tensors {one.name!r} and {next_one.name!r} overlap"
                )
        return TensorIndex(tensors)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._number("I")
        if num_dimensions > _MOST_DIMENSIONS:
            raise UnsupportedModelError(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))
        return name, shape, self._number("I"), self._number("Q")

    def _stored(
        self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int
    ) -> StoredTensor:
        if kind not in _block_sizes():
            raise UnsupportedModelError(f"tensor {name!r} has the unknown type {kind}")
        kind_name, in_block, block_bytes = _block_sizes()[kind]
        if not shape or not all(shape) or shape[0] % in_block:
            raise UnsupportedModelError(
                f"tensor {name!r} has the shape {list(shape)}, in blocks of {in_block}"
            )
        num_bytes = prod(shape) // in_block * block_bytes
        end = start + offset + num_bytes
        if end > self._size:
            raise UnsupportedModelError(
                f"the file ends in its data: it has {self._size} bytes, and tensor {name!r} ends at {end}"
            )
        return StoredTensor(name, kind_name, shape[::-1], self._path, start + offset, num_bytes)

    def _count(self, of_what: str, least_bytes: int, most: int = sys.maxsize) -> int:
        """Returns how many things follow, of so many bytes each at least."""
        count: int = self._number("Q")
        if count * least_bytes > self._left:
            raise UnsupportedModelError(
                f"its {self._part} counts {count} {of_what}, for which the file's {self._size} bytes "
                "have no room: it is cut or damaged"
            )
        if count > most:
            raise UnsupportedModelError(f"it has {count} {of_what}; read are at most {most}")
        return count

    def _string(self) -> str:
        try:
            return self._bytes(self._number("Q")).decode()
        except UnicodeDecodeError as error:
            raise UnsupportedModelError(f"its {self._part} holds text that is not UTF-8") from error

    def _number(self, kind: str) -> Any:
        (value,) = struct.unpack("<" + kind, self._bytes(struct.calcsize(kind)))
        return value

    def _bytes(self, count: int) -> bytes:
        if count > self._left:
            raise UnsupportedModelError(
                f"the file ends in its {self._part}: {count} bytes more should follow byte "
                f"{self._file.tell()} of {self._size}"
            )
        self._left -= count
        return self._file.read(count)


def _alignment(metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get(_ALIGNMENT, _USUAL_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise UnsupportedModelError(f"its {_ALIGNMENT} is {alignment!r}")
    return alignment


@lru_cache(maxsize=1)
def _block_sizes() -> dict[int, tuple[str, int, int]]:
    """Returns each type's name and the values and bytes of a block, by the type's number."""
    with needing_gguf():
        from gguf.constants import GGML_QUANT_SIZES
    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
