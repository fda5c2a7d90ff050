"""Medusa's heads: residual blocks on the target's hidden state, then an output projection.

Head i predicts the token i + 1 places after the one that the target itself predicts. Three forms are
read: that of its authors (``medusa_lm_head.pt`` or safetensors, each head with a projection of its own
to the vocabulary), vLLM's, and ours, which is vLLM's without a projection: the target's is used, so that
a head costs ``hidden_size`` squared and not ``hidden_size * vocab_size`` numbers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from operator import attrgetter
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from engine.batch import NORMED
from engine.drafting.facts import TargetFacts
from engine.drafting.published.folder import CONFIG, DraftFolder, Field, flag, of_target, size

KIND = "medusa"
_PREFIX = r"(?:medusa_heads?\.)?"  # of heads that were saved as a part of a model
_NAMES = {
    r"(\d+)\.(\d+)\.linear\.(weight|bias)": r"blocks.\1.layers.\2.\3",
    r"(\d+)\.\d+\.weight": r"lm_heads.\1.weight",
    r"(blocks\.\d+\.layers\.\d+\.(?:weight|bias))": r"\1",
    r"(lm_heads\.\d+\.weight|lm_head\.weight|token_map)": r"\1",
}
"""Tensors' names in vLLM's form, by patterns of the authors' and of vLLM's own."""
SHARED_HEAD = "lm_head.weight"
_TOKEN_MAP = "token_map"
_MOST_OF_A_KIND = 1 << 10


def _is_one(scale: Any, _: TargetFacts) -> str | None:
    return None if scale == 1 else "is not 1: scaled logits are not served"


_COUNTS = {"medusa_num_heads": 0, "num_heads": 0, "medusa_num_layers": 1, "num_hidden_layers": 1}
"""Keys for the number of heads (0), and of blocks in each (1)."""
_FIELDS = {
    "hidden_size": Field((size, of_target("hidden_size", "this model needs")), default=None),
    "vocab_size": Field((size, of_target("vocab_size", "this model needs")), default=None),
    "logit_scale": Field((_is_one,), default=None),
    "original_lm_head": Field((flag,), default=False),
    "truncated_vocab_size": Field((size,), default=attrgetter("vocab_size")),
} | dict.fromkeys(_COUNTS, Field((size,), default=None))


class Heads(Protocol):
    """A module of ``num_heads`` heads, whatever each of them computes: ``[num_rows, hidden_size]`` to
    ``[num_heads, num_rows, hidden_size]``."""

    num_heads: int

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor: ...


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
    shapes = ()  # no keys and values
    token_map: torch.Tensor | None

    def __init__(
        self,
        blocks: Heads,
        projections: nn.ModuleList,
        vocab_size: int,
        token_map: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.blocks, self.projections = blocks, projections
        self.num_heads, self.vocab_size = blocks.num_heads, vocab_size
        self.register_buffer(_TOKEN_MAP, token_map)
        # In a tuple, so that the target's module is not one of this network's own.
        self._bound: tuple[nn.Module, ...] = ()

    def bind(self, embed: nn.Module, output_head: nn.Module) -> None:
        """Gives it the target's output head, for heads without a projection of their own."""
        del embed
        self._bound = (output_head,)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_rows, hidden_size]`` to what the projections read,
        ``[num_heads, num_rows, hidden_size]``."""
        return self.blocks(hidden)

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


def recognised(config: Mapping[str, Any], tensor_names: Collection[str] = ()) -> str | None:
    """Returns the method of a folder, by its configuration; None: it is of another."""
    del tensor_names
    return KIND if config.get("model_type") == KIND or "medusa_num_heads" in config else None


def read(folder: DraftFolder, facts: TargetFacts) -> MedusaNetwork:
    """Returns the folder's heads, which are still to be placed and bound. How many there are is said by
    the tensors: configurations that its authors published say fewer than the files hold.

    Raises DraftRefusedError where the folder is of another method, its tensors are not those of such
    heads, or they do not fit the target.
    """
    if recognised(folder.config) is None:
        raise folder.refused(f"{CONFIG} is not that of Medusa heads")
    folder.check_target(facts)
    found = folder.settings.values(_FIELDS, facts)
    stored = _own_names(folder)
    num_heads, num_layers = _counts(folder, stored, found)
    blocks = _read_blocks(folder, stored, num_heads, num_layers, facts.hidden_size)
    names = _projection_names(folder, stored, num_heads, found["original_lm_head"])
    token_map = _read_token_map(folder, stored, found["truncated_vocab_size"], facts.vocab_size)
    if token_map is not None and not names:
        raise folder.refused(f"{_TOKEN_MAP} without an output projection of its own")
    projections = [_read_projection(folder, name, facts, token_map) for name in names]
    return MedusaNetwork(blocks, nn.ModuleList(projections), facts.vocab_size, token_map)


def _own_names(folder: DraftFolder) -> dict[str, str]:
    """Returns the folder's name of each tensor by vLLM's name of it."""
    found: dict[str, str] = {}
    # Backwards: of two names for one tensor the first is its name, and the second unknown.
    for name, (pattern, own) in product(sorted(folder.tensors, reverse=True), _NAMES.items()):
        if match := re.fullmatch(_PREFIX + pattern, name):
            found[match.expand(own)] = name
    if unknown := sorted(folder.tensors.keys() - set(found.values())):
        raise folder.refused(f"unknown tensors: {', '.join(unknown[:3])}")
    return found


def _counts(
    folder: DraftFolder, stored: Mapping[str, str], found: Mapping[str, Any]
) -> tuple[int, int]:
    """Returns how many heads there are, and blocks in each."""
    places = [name.split(".")[1::2] for name in stored if name.startswith("blocks.")]
    if not places:
        raise folder.refused("there are no tensors of heads")
    counts = tuple(1 + max(map(int, each)) for each in zip(*places, strict=True))
    if max(counts) > _MOST_OF_A_KIND:
        raise folder.refused(f"tensors are numbered beyond {_MOST_OF_A_KIND}")
    for key, axis in _COUNTS.items():
        said, count = found[key] or counts[axis], counts[axis]
        # Some authors say fewer heads than there are.
        if said > count or (said < count and axis == 1):
            raise folder.settings.refused(key, f"is {said}, and there are {count}")
    return counts[0], counts[1]


def _read_blocks(
    folder: DraftFolder, stored: Mapping[str, str], num_heads: int, num_layers: int, size: int
) -> ResidualHeads:
    """Returns the blocks, with zeros for biases that a folder has none of."""
    heads = ResidualHeads(num_heads, num_layers, size)
    with torch.no_grad():
        for layer, head, name in blocks_of(num_heads, num_layers, "weight"):
            heads.weight[layer, head] = folder.tensor(stored.get(name, name), (size, size)).T
        if any(name.endswith(".bias") for name in stored):
            for layer, head, name in blocks_of(num_heads, num_layers, "bias"):
                heads.bias[layer, head] = folder.tensor(stored.get(name, name), (size,))
    return heads


def blocks_of(num_heads: int, num_layers: int, part: str) -> Iterator[tuple[int, int, str]]:
    for head, layer in product(range(num_heads), range(num_layers)):
        yield layer, head, f"blocks.{head}.layers.{layer}.{part}"


def _projection_names(
    folder: DraftFolder, stored: Mapping[str, str], num_heads: int, is_shared: bool
) -> list[str]:
    """Returns the folder's names of the projections: none, one for all heads, or one for each."""
    own = [f"lm_heads.{head}.weight" for head in range(num_heads)]
    if extra := sorted(each for each in stored if each.startswith("lm_heads.") and each not in own):
        raise folder.refused(f"unknown tensors: {stored[extra[0]]}")
    if not is_shared:
        if SHARED_HEAD in stored:
            raise folder.refused(f"{stored[SHARED_HEAD]} where original_lm_head is not set")
        return [stored.get(name, name) for name in own]
    return [stored[name] for name in (SHARED_HEAD, own[0]) if name in stored][:1]


def _read_token_map(
    folder: DraftFolder, stored: Mapping[str, str], num_rows: int, vocab_size: int
) -> torch.Tensor | None:
    """Returns the target's id of each row of the projections; None: the same."""
    name = stored.get(_TOKEN_MAP, _TOKEN_MAP)
    if name not in folder.tensors and num_rows == vocab_size:
        return None
    token_map = folder.tensor(name, (num_rows,))
    if token_map.is_floating_point() or token_map.is_complex():
        raise folder.refused(f"{name} does not hold whole numbers")
    token_map = token_map.long()
    if not 0 <= int(token_map.min()) <= int(token_map.max()) < vocab_size:
        raise folder.refused(f"{name} has ids that are not of the target's {vocab_size} tokens")
    if len(token_map.unique()) < num_rows:
        raise folder.refused(f"{name} names a token twice")
    return token_map


def _read_projection(
    folder: DraftFolder, name: str, facts: TargetFacts, token_map: torch.Tensor | None
) -> nn.Linear:
    """Returns a projection; of one over the whole vocabulary only the rows that a map names."""
    num_rows = facts.vocab_size if token_map is None else len(token_map)
    is_whole = folder.shape(name, 2)[0] == facts.vocab_size
    weight = folder.tensor(name, (facts.vocab_size if is_whole else num_rows, facts.hidden_size))
    linear = nn.Linear(facts.hidden_size, num_rows, bias=False, device="meta")
    linear.weight = nn.Parameter(weight if len(weight) == num_rows else weight[token_map])
    return linear
