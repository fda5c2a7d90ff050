"""The multi-token-prediction layers that a GGUF file has behind its model's: blocks like any other, with
``nextn`` tensors for what joins a token's embedding and the state of the token before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.request.errors import UnsupportedModelError
from engine.weights.gguf.architectures import ARCHITECTURES
from engine.weights.gguf.file import GgufHeader
from engine.weights.gguf.parameters import Making, bytes_of, values_of
from engine.weights.index import StoredTensor, TensorIndex

PARTS = ("enorm", "hnorm", "eh_proj", "shared_head_norm")
"""Names of the token's norm, the state's, what joins both, and the last norm."""
EMBEDDING, HEAD = "embed_tokens", "shared_head_head"
"""Names of an embedding and an output head that are a layer's own."""
_MODELS = {
    "shared_head_norm": ("output_norm",),
    EMBEDDING: ("token_embd",),
    HEAD: ("output", "token_embd"),
}
"""The model's tensors in the place of parts that a layer does not have."""


class MtpLayer:
    """The first such layer of a file, behind ``num_layers``. Raises UnsupportedModelError where the file
    has none."""

    def __init__(self, header: GgufHeader, num_layers: int) -> None:
        self._header, self._start = header, f"blk.{num_layers}."
        if self._stored("eh_proj") is None:
            raise UnsupportedModelError("the file has no multi-token-prediction layer")
        joins = (name.endswith(".nextn.eh_proj.weight") for name in header.tensors)
        self.count = sum(joins)
        """How many the file has."""

    @property
    def names(self) -> list[str]:
        """The names of the decoder layer's tensors, without the number of the layer."""
        start = self._start
        own = (name.removeprefix(start) for name in self._header.tensors if name.startswith(start))
        return [name for name in own if not name.startswith("nextn.")]

    def as_model(self) -> GgufHeader:
        """Returns the header of a model of this one layer, with its last norm behind it, and one token,
        since it has no embedding and head."""
        old = self._header.tensors
        found = {f"blk.0.{name}": old[self._start + name] for name in self.names}
        found |= {name: each for name, each in old.items() if name.startswith("rope_")}
        embedding = old["token_embd.weight"]
        row = replace(
            embedding,
            shape=(1, *embedding.shape[1:]),
            num_bytes=embedding.num_bytes // embedding.shape[0],
        )
        found |= {"token_embd.weight": row, "output.weight": row}
        found["output_norm.weight"] = self._needed("shared_head_norm")
        named = {name: replace(each, name=name) for name, each in found.items()}
        return replace(self._header, tensors=TensorIndex(named))

    def values(self, config: Any, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns a part in float32, as the model's class has it. Raises UnsupportedModelError where it
        is missing or of another shape."""
        tensor = self._needed(name)
        if tensor.shape != shape:
            raise UnsupportedModelError(
                f"{tensor.name} {list(tensor.shape)} instead of {list(shape)}"
            )
        undo = ARCHITECTURES[self._header.architecture].undo
        own = tuple(each for each in undo if each.is_for(f"{name}.weight", 1))
        values = Making((tensor,), own, shape, None).joined(
            config, [values_of(tensor, bytes_of(tensor))]
        )
        return torch.from_numpy(values.copy())

    def has_own(self, name: str) -> bool:
        """Whether it has a part of its own, other than the model's."""
        own = self._stored(name)
        theirs = self._of_model(name)
        if own is None or theirs is None:
            return own is not None
        return own.kind != theirs.kind or not bool((bytes_of(own) == bytes_of(theirs)).all())

    def _stored(self, name: str) -> StoredTensor | None:
        return self._header.tensors.get(f"{self._start}nextn.{name}.weight")

    def _of_model(self, name: str) -> StoredTensor | None:
        tensors = self._header.tensors
        several = (tensors.get(f"{each}.weight") for each in _MODELS.get(name, ()))
        return next((each for each in several if each is not None), None)

    def _needed(self, name: str) -> StoredTensor:
        found = self._stored(name) or self._of_model(name)
        if found is None:
            raise UnsupportedModelError(f"{self._start}nextn.{name}.weight is missing")
        return found


def is_first_blank(model: PreTrainedModel) -> bool:
    """Returns whether such a layer reads zeros as the embedding of a text's first token: DeepSeek-V3's
    and GLM's do, whose checkpoints have it as one layer more, and those do not that have it apart."""
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    return not any("mtp" in each for each in ignored)
