"""Medusa's heads: residual blocks on the target's hidden state, then an output projection.

Head i predicts the token i + 1 places after the one that the target itself predicts. Three forms are
read: that of its authors (``medusa_lm_head.pt`` or safetensors, each head with a projection of its own
to the vocabulary), vLLM's, and ours, which is vLLM's without a projection: the target's is used, so that
a head costs ``hidden_size`` squared and not ``hidden_size * vocab_size`` numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine.batch import NORMED
from engine.drafting.facts import TargetFacts
from engine.drafting.published.folder import CONFIG, DraftFolder

KIND = "medusa"
_PREFIX = re.compile(r"^medusa_heads?\.")
"""Prefix of tensor names if the heads were saved as a part of a model."""
_AUTHORS_BLOCK = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
_AUTHORS_PROJECTION = re.compile(r"^(\d+)\.(\d+)\.weight$")
_BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
_PROJECTION = re.compile(r"^lm_heads\.(\d+)\.weight$")
SHARED_HEAD = "lm_head.weight"
_TOKEN_MAP = "token_map"
_MOST_OF_A_KIND = 1 << 10


class ResidualHeads(nn.Module):
    """``num_heads`` stacks of ``num_layers`` blocks ``x + SiLU(W x + b)``, all heads in one product."""

    def __init__(self, num_heads: int, num_layers: int, hidden_size: int) -> None:
        super().__init__()
        self.num_heads, self.num_layers = num_heads, num_layers
        # Zeros: an untrained head says what the target itself says, as in the original. Of each weight
        # [in, out], as the product takes it; files have it the other way round.
        self.weight = nn.Parameter(torch.zeros(num_layers, num_heads, hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_layers, num_heads, 1, hidden_size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_rows, hidden_size]`` to ``[num_heads, num_rows, hidden_size]``."""
        states = hidden.expand(self.num_heads, *hidden.shape)
        for weight, bias in zip(self.weight, self.bias, strict=True):
            states = states + F.silu(torch.baddbmm(bias, states, weight))
        return states


class MedusaNetwork(nn.Module):
    """Heads of any form. ``projections``: none, where the target's output head is used, one for all heads
    or one for each. ``token_map``: ``[draft_vocab]`` int64, the target's id of each row of the
    projections; None: they are the same."""

    hidden_layers: tuple[int, ...] = (NORMED,)
    shapes = ()
    """No keys and values."""
    token_map: torch.Tensor | None

    def __init__(
        self,
        blocks: ResidualHeads,
        projections: nn.ModuleList,
        vocab_size: int,
        token_map: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.blocks, self.projections = blocks, projections
        self.vocab_size = vocab_size
        self.register_buffer(_TOKEN_MAP, token_map)
        # In a tuple, so that the target's module is not one of this network's own.
        self._bound: tuple[nn.Module, ...] = ()

    @property
    def num_heads(self) -> int:
        return self.blocks.num_heads

    def bind(self, embed: nn.Module, output_head: nn.Module) -> None:
        """Gives it the target's output head, for heads without a projection of their own."""
        del embed
        self._bound = (output_head,)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_rows, hidden_size]`` to what the projections read,
        ``[num_heads, num_rows, hidden_size]``."""
        states: torch.Tensor = self.blocks(hidden)
        return states

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """``[num_heads, num_rows, hidden_size]`` to logits over the target's vocabulary,
        ``[num_heads, num_rows, vocab_size]``; those of tokens that no row of a projection stands for are
        minus infinity."""
        projections = [*self.projections] or [*self._bound]
        if len(projections) == 1:
            shape = states.shape[:2]
            logits: torch.Tensor = projections[0](states.flatten(0, 1)).unflatten(0, shape)
        else:
            logits = torch.stack([own(x) for own, x in zip(projections, states, strict=True)])
        if self.token_map is None:
            return logits
        whole = logits.new_full((*logits.shape[:2], self.vocab_size), float("-inf"))
        return whole.index_copy_(2, self.token_map, logits)


def recognises(config: Mapping[str, Any]) -> bool:
    """Returns whether a folder's configuration is that of Medusa's heads, in any of the forms."""
    return config.get("model_type") == KIND or "medusa_num_heads" in config


def read_medusa(folder: DraftFolder, facts: TargetFacts) -> MedusaNetwork:
    """Returns the folder's heads, which are still to be placed and bound. How many there are is said by
    the tensors: configurations that its authors published say fewer than the files hold.

    Raises DraftRefusedError where the folder is of another method, its tensors are not those of such
    heads, or they do not fit the target.
    """
    if not recognises(folder.config):
        raise folder.refused(f"{CONFIG} is not that of Medusa heads")
    folder.check_target(facts)
    _check_config(folder, facts)
    stored = _own_names(folder)
    num_heads, num_layers = _counts(folder, stored)
    blocks = _read_blocks(folder, stored, num_heads, num_layers, facts.hidden_size)
    names = _projection_names(folder, stored, num_heads)
    token_map = _read_token_map(folder, stored, facts.vocab_size)
    if token_map is not None and not names:
        raise folder.refused(f"{_TOKEN_MAP} without an output projection of its own")
    projections = [_read_projection(folder, name, facts, token_map) for name in names]
    return MedusaNetwork(blocks, nn.ModuleList(projections), facts.vocab_size, token_map)


def _check_config(folder: DraftFolder, facts: TargetFacts) -> None:
    settings = folder.settings
    for key, wanted in {
        "hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
    }.items():
        if settings.size(key, wanted) != wanted:
            raise settings.refused(key, f"is {folder.config[key]!r}, and this model needs {wanted}")
    if folder.config.get("logit_scale", 1) != 1:
        raise settings.refused("logit_scale", "is not 1: scaled logits are not served")


def _own_names(folder: DraftFolder) -> dict[str, str]:
    """Returns the folder's name of each tensor by vLLM's name of it."""
    found: dict[str, str] = {}
    unknown = []
    for name in sorted(folder.tensors):
        own = _own_name(_PREFIX.sub("", name))
        if own is None or own in found:
            unknown.append(name)
        else:
            found[own] = name
    if unknown:
        raise folder.refused(f"unknown tensors: {', '.join(unknown[:3])}")
    return found


def _own_name(name: str) -> str | None:
    if match := _AUTHORS_BLOCK.match(name):
        return "blocks.{}.layers.{}.{}".format(*match.groups())
    if match := _AUTHORS_PROJECTION.match(name):
        return f"lm_heads.{match[1]}.weight"
    known = _BLOCK.match(name) or _PROJECTION.match(name) or name in (SHARED_HEAD, _TOKEN_MAP)
    return name if known else None


def _counts(folder: DraftFolder, stored: Mapping[str, str]) -> tuple[int, int]:
    """Returns how many heads there are, and blocks in each."""
    places = [match.groups() for match in map(_BLOCK.match, stored) if match]
    if not places:
        raise folder.refused("there are no tensors of heads")
    num_heads, num_layers = (1 + max(int(place[axis]) for place in places) for axis in (0, 1))
    if max(num_heads, num_layers) > _MOST_OF_A_KIND:
        raise folder.refused(f"tensors are numbered beyond {_MOST_OF_A_KIND}")
    settings = folder.settings
    for key in ("medusa_num_heads", "num_heads"):
        if settings.has(key) and settings.size(key) > num_heads:
            raise settings.refused(key, f"is {settings.size(key)}, and there are {num_heads}")
    for key in ("medusa_num_layers", "num_hidden_layers"):
        if settings.has(key) and settings.size(key) != num_layers:
            raise settings.refused(key, f"is {settings.size(key)}, and there are {num_layers}")
    return num_heads, num_layers


def _read_blocks(
    folder: DraftFolder, stored: Mapping[str, str], num_heads: int, num_layers: int, size: int
) -> ResidualHeads:
    """Returns the blocks, with zeros for biases that a folder has none of."""
    heads = ResidualHeads(num_heads, num_layers, size)
    has_bias = any(name.endswith(".bias") for name in stored)
    parts = [("weight", (size, size)), *([("bias", (size,))] if has_bias else [])]
    with torch.no_grad():
        for part, shape in parts:
            for layer, head, name in blocks_of(num_heads, num_layers, part):
                tensor = _read(folder, stored.get(name, name), shape)
                getattr(heads, part)[layer, head] = tensor.T if part == "weight" else tensor
    return heads


def blocks_of(num_heads: int, num_layers: int, part: str) -> Iterator[tuple[int, int, str]]:
    for head in range(num_heads):
        for layer in range(num_layers):
            yield layer, head, f"blocks.{head}.layers.{layer}.{part}"


def _projection_names(folder: DraftFolder, stored: Mapping[str, str], num_heads: int) -> list[str]:
    """Returns the folder's names of the projections: none, one for all heads, or one for each."""
    own = [f"lm_heads.{head}.weight" for head in range(num_heads)]
    extra = sorted(name for name in stored if _PROJECTION.match(name) and name not in own)
    if extra:
        raise folder.refused(f"unknown tensors: {stored[extra[0]]}")
    if not folder.settings.flag("original_lm_head", default=False):
        if SHARED_HEAD in stored:
            raise folder.refused(f"{stored[SHARED_HEAD]} where original_lm_head is not set")
        return [stored.get(name, name) for name in own]
    return [stored[name] for name in (SHARED_HEAD, own[0]) if name in stored][:1]


def _read_token_map(
    folder: DraftFolder, stored: Mapping[str, str], vocab_size: int
) -> torch.Tensor | None:
    """Returns the target's id of each row of the projections; None: the same."""
    settings = folder.settings
    size = settings.size("truncated_vocab_size", vocab_size)
    name = stored.get(_TOKEN_MAP, _TOKEN_MAP)
    if name not in folder.tensors and size == vocab_size:
        return None
    folder.check_shape(name, (size,))
    token_map = folder.read([name])[name]
    if token_map.is_floating_point() or token_map.is_complex():
        raise folder.refused(f"{name} does not hold whole numbers")
    token_map = token_map.long()
    if not 0 <= int(token_map.min()) <= int(token_map.max()) < vocab_size:
        raise folder.refused(f"{name} has ids that are not of the target's {vocab_size} tokens")
    if len(token_map.unique()) < size:
        raise folder.refused(f"{name} names a token twice")
    return token_map


def _read_projection(
    folder: DraftFolder, name: str, facts: TargetFacts, token_map: torch.Tensor | None
) -> nn.Linear:
    """Returns a projection; of one over the whole vocabulary only the rows that a map names."""
    num_rows = facts.vocab_size if token_map is None else len(token_map)
    is_whole = folder.shape(name, 2)[0] == facts.vocab_size
    weight = _read(folder, name, (facts.vocab_size if is_whole else num_rows, facts.hidden_size))
    linear = nn.Linear(facts.hidden_size, num_rows, bias=False, device="meta")
    # A copy: what is read may still lie in the file, which anybody may change.
    linear.weight = nn.Parameter(weight.clone() if len(weight) == num_rows else weight[token_map])
    return linear


def _read(folder: DraftFolder, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    folder.check_shape(name, shape)
    return folder.read([name])[name]
