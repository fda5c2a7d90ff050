"""The tensors of stored weights by their names, as the headers of files describe them: GGUF's
(``gguf/file.py``), safetensors' and torch's (``files.py``). Needs no torch to be imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TORCH_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
}
"""Types of values as headers call them, and as torch does."""
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a header describes it. ``kind``: its type's name, "BF16" or "Q4_K". ``shape``: the
    fastest moving dimension last. ``start``: in bytes from the beginning of the file, and ``num_bytes``:
    where a file is read without its format's library."""

    name: str
    kind: str
    shape: tuple[int, ...]
    file: Path
    start: int = 0
    num_bytes: int = 0

    @property
    def dtype(self) -> torch.dtype | None:
        """The type as torch has it; None: it has none such, or it is not known here."""
        import torch

        found: torch.dtype | None = getattr(torch, TORCH_TYPES.get(self.kind, ""), None)
        return found


class TensorIndex(Mapping[str, StoredTensor]):
    """Tensors by name. ``prefix``: of a model's names, which a file may leave out: names that begin with
    it are found without it, too."""

    def __init__(self, tensors: Mapping[str, StoredTensor], prefix: str = "") -> None:
        self._tensors = tensors
        self._prefix = f"{prefix}." if prefix else ""
        self._modules = {name.rpartition(".")[0] for name in tensors}

    def __getitem__(self, name: str) -> StoredTensor:
        found = self._tensors.get(name)
        return self._tensors[name.removeprefix(self._prefix)] if found is None else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def has_module(self, name: str) -> bool:
        """Whether there are tensors of a module of this name."""
        return not self._modules.isdisjoint({name, name.removeprefix(self._prefix)})


def named(names: Sequence[str]) -> str:
    """Returns the first names for a message, and how many more there are."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
