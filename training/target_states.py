"""The frozen model that heads learn from: its parts in floats, and its hidden states in texts.

States are read once, one text at a time, and kept in a file that is mapped into memory: a small model
takes longer to read a text than a head to learn from it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.batch import NORMED
from engine.drafting.facts import target_facts
from engine.model.decoder import decoder_layers, kept_states
from engine.model.fusing import fuse
from engine.model.loader import load_model
from engine.model.quantization import complete_packed, has_packed_weights, round_inputs
from engine.request.errors import UnsupportedModelError
from training.head_data import Text

_MARKED = 1 << 32
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts, padded to one width, with what the target says of them."""

    ids: Tensor  # [num_texts, width]
    states: Tensor  # [num_texts, width, num_layers * hidden_size]: those of ``Target.layers``
    normed: Tensor  # [num_texts, width, hidden_size]: what the output head reads


def chosen_layers(num_layers: int) -> tuple[int, ...]:
    """Returns which layers' states heads read, as in ``InputBatch.hidden_layers``: those that EAGLE-3
    reads, or of a model with few layers three others, as far as there are so many."""
    for chosen in (
        (2, num_layers // 2, num_layers - 3),
        (num_layers // 4, num_layers // 2, num_layers - 1),
    ):
        if len(set(chosen)) == len(chosen) and min(chosen) >= 0:
            return tuple(sorted(chosen))
    return tuple(range(num_layers + 1))


class Target:
    """A causal LM without gradients, as it is served: in few bits, its inputs are rounded."""

    def __init__(self, name: str, device: torch.device, dtype: str = "auto") -> None:
        """Raises what ``load_model`` raises, and UnsupportedModelError for an output head that adds
        something to its product."""
        self.model = model = load_model(name, device, dtype)
        self.device, self.dtype = device, model.dtype
        self.facts = target_facts(model)
        self.config: Any = model.config.get_text_config()
        self.layers = chosen_layers(self.facts.num_layers)
        self._embed = model.get_input_embeddings()
        head = model.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise UnsupportedModelError(f"{name}: its output head has a bias")
        self.head = dense_weight(head, self.facts.hidden_size, model.dtype, device)
        """``[vocab_size, hidden_size]``, of the model's type."""
        if has_packed_weights(model):
            complete_packed(model)
            round_inputs(model)
            fuse(model)

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """``[..]`` to ``[.., hidden_size]``."""
        embedded: Tensor = self._embed(ids)
        return embedded

    @torch.no_grad()
    def states(self, ids: Sequence[int]) -> Tensor:
        """Returns what a text's tokens leave behind, ``[num_tokens, (num_layers + 1) * hidden_size]``:
        the states of ``layers``, then those behind the final norm."""
        row = torch.tensor([ids], device=self.device)
        with kept_states(self.model, (*self.layers, NORMED)) as kept:
            self.model.base_model(input_ids=row, use_cache=False)
        return torch.cat([kept[each] for each in (*self.layers, NORMED)], -1)

    @torch.no_grad()
    def likeliest(self, normed: Tensor) -> Tensor:
        """``[num_rows, hidden_size]`` to the ids of the likeliest tokens, ``[num_rows]``."""
        return torch.cat([(part @ self.head.T).argmax(-1) for part in normed.split(256)])

    def decoder_layer(self, index: int) -> dict[str, Tensor]:
        """Returns the weights of a layer in float32, under the names that they have in Llama's; those
        that it has in another way than Llama's layers are left out."""
        layer: Any = decoder_layers(self.model)[index]
        found: dict[str, Tensor] = {}
        for name in _NORMS:
            if isinstance(getattr(layer, name, None), nn.Module):
                found[name] = self.norm_weight(getattr(layer, name))
        for part, names in (("self_attn", _ATTENTION), ("mlp", _MLP)):
            module = getattr(layer, part, None)
            # A part with more in it, such as norms of queries, is not Llama's without that.
            if module is not None and {name for name, _ in module.named_children()} - {
                "act_fn"
            } == set(names):
                for name in names:
                    found[name] = self._linear_weight(getattr(module, name))
        return found

    def final_norm(self) -> Tensor | None:
        """Returns the weights of the final norm, ``[hidden_size]``; None: it has no usual name."""
        norm = getattr(self.model.base_model, "norm", None)
        return None if norm is None else self.norm_weight(norm)

    @torch.no_grad()
    def norm_weight(self, norm: nn.Module) -> Tensor:
        """Returns what a norm multiplies rows with, ``[hidden_size]`` float32, whether its weights are
        that, or that less one: seen in rows of -1 and 1, whose mean is 0 and that of their squares 1."""
        signs = torch.ones(self.facts.hidden_size, dtype=self.dtype, device=self.device)
        signs[1::2] = -1
        both = norm(torch.stack([signs, -signs])[None])[0].float()
        weight: Tensor = (both[0] - both[1]) / 2 * signs.float()
        return weight

    def _linear_weight(self, linear: Any) -> Tensor:
        return dense_weight(linear, int(linear.in_features), self.dtype, self.device).float()


@torch.no_grad()
def dense_weight(
    linear: nn.Module, in_features: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns the weight of a linear layer in whatever form, ``[out_features, in_features]``: in few bits
    it is its product with the identity."""
    if isinstance(linear, nn.Linear):
        return linear.weight.detach()
    identity = torch.eye(in_features, dtype=dtype, device=device)
    return torch.cat([linear(part) for part in identity.split(256)]).T.contiguous()


class States:
    """Reads texts. ``path``: a file that keeps the target's states, and goes on being used by later runs
    as far as texts and target are the same; None: the target reads texts each time anew."""

    def __init__(self, target: Target, texts: Sequence[Text], path: Path | None) -> None:
        self._target, self._texts = target, texts
        self._width = (len(target.layers) + 1) * target.facts.hidden_size
        self._starts = list(accumulate((len(text.ids) for text in texts), initial=0))
        self._kept: Tensor | None = None
        if path is not None:
            size = self._starts[-1] * self._width
            self._kept = _mapped(path, size, target.dtype).view(-1, self._width)
            self._marks = _mapped(path.with_suffix(".marks"), len(texts), torch.int64)
            wanted = torch.tensor([self._mark(index) for index in range(len(texts))])
            if bool(((self._marks != 0) & (self._marks != wanted)).any()):
                # Of other texts or another order: what lay there before may have been written over.
                self._marks.zero_()

    def read(self, indices: Sequence[int]) -> Batch:
        """Returns the texts of these indices, on the target's device."""
        target, size = self._target, self._target.facts.hidden_size
        most = max(len(self._texts[index].ids) for index in indices)
        ids = torch.zeros(len(indices), most, dtype=torch.int64)
        states = torch.zeros(
            len(indices), most, self._width, dtype=target.dtype, device=target.device
        )
        for row, index in enumerate(indices):
            text = self._texts[index].ids
            ids[row, : len(text)] = torch.tensor(text)
            states[row, : len(text)] = self._states(index)
        return Batch(ids.to(target.device), states[..., :-size], states[..., -size:])

    def _states(self, index: int) -> Tensor:
        ids = self._texts[index].ids
        if self._kept is None:
            return self._target.states(ids)
        kept = self._kept[self._starts[index] : self._starts[index + 1]]
        mark = self._mark(index)
        if int(self._marks[index]) != mark:
            kept.copy_(self._target.states(ids))
            self._marks[index] = mark
        return kept

    def _mark(self, index: int) -> int:
        """Returns what is noted of a text whose states are in the file: of another target, at another
        place or of another text it is another."""
        target = self._target
        held = (target.facts.fingerprint, str(target.dtype), target.layers, self._starts[index])
        return _MARKED | zlib.crc32(repr((held, self._texts[index].ids)).encode())


def _mapped(path: Path, size: int, dtype: torch.dtype) -> Tensor:
    """Returns a file's numbers ``[size]``; those that it has not yet are 0."""
    with path.open("ab") as file:
        # Before torch does it, which writes over the first byte of a file that grows.
        if file.tell() < size * dtype.itemsize:
            file.truncate(size * dtype.itemsize)
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype)
