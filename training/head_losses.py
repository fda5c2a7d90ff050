"""What heads learn: the target's own distribution at the position they predict."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from engine.drafting.eagle import FeatureLayer, eagle_config
from engine.drafting.medusa import ResidualHeads, medusa_config

STATE_WEIGHT = 0.5
"""How much the distance of the states counts beside the distributions that follow from them."""
BLANK_SHARE = 0.15
"""How many sequences begin with tokens whose states are not shown, as after a cached prefix."""
NUM_DEPTHS = 4
DEPTH_DISCOUNT = 0.8
"""How much less each further depth counts, as in Medusa's training."""


@dataclass(frozen=True)
class Batch:
    """Sequences with the target's view of them. ``lengths`` are without the padding."""

    ids: torch.Tensor  # [num_sequences, width]
    lengths: list[int]
    hidden: torch.Tensor  # [num_sequences, width, hidden_size], what the output head reads


class Target:
    """A frozen causal LM in parts: body, embeddings, output head."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.embed = model.get_input_embeddings()
        self.head = model.get_output_embeddings()

    @torch.no_grad()
    def read(self, sequences: Sequence[Sequence[int]]) -> Batch:
        """Run the sequences, padded on the right: with a causal mask padding needs no mask."""
        lengths = [len(sequence) for sequence in sequences]
        ids = torch.zeros(len(sequences), max(lengths), dtype=torch.long)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(sequence)
        ids = ids.to(self.model.device)
        body = self.model.base_model(input_ids=ids, use_cache=False)
        return Batch(ids, lengths, body.last_hidden_state)

    @torch.no_grad()
    def log_probs(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_rows, hidden_size]`` to ``[num_rows, vocab_size]``, float32."""
        return self.logits(hidden).log_softmax(-1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same before the softmax, with gradients for the hidden states."""
        logits: torch.Tensor = self.head(hidden.to(self.head.weight.dtype))
        return logits.float()


@dataclass(frozen=True)
class Result:
    """A batch's loss, and per depth how often the likeliest token was the target's likeliest."""

    loss: torch.Tensor
    num_hits: list[int]
    num_rows: int


class Learner(Protocol):
    """One kind of heads in training. ``reach``: how many tokens after a row it looks at."""

    module: nn.Module
    reach: int

    def run(self, target: Target, batch: Batch, rng: random.Random, positions: int) -> Result:
        """Loss and hits over up to ``positions`` rows of every sequence."""

    def config(self) -> dict[str, Any]:
        """What the engine has to know to load the heads."""


def windows(
    batch: Batch, first: int, reach: int, rng: random.Random, positions: int
) -> list[tuple[int, int, int]]:
    """(sequence, first row, end): rows from ``first`` on that have ``reach`` rows after them."""
    found = []
    for row, length in enumerate(batch.lengths):
        room = length - reach - first
        if room > 0:
            size = min(room, positions)
            start = first + rng.randint(0, room - size)
            found.append((row, start, start + size))
    return found


def gather(
    values: torch.Tensor, parts: Sequence[tuple[int, int, int]], offset: int
) -> torch.Tensor:
    """Rows of all windows, ``offset`` rows later: ``[num_rows, ...]``."""
    return torch.cat([values[row, start + offset : end + offset] for row, start, end in parts])


def soft_loss(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy with the target's log-probabilities."""
    return functional.cross_entropy(logits, teacher.exp())


class MedusaLearner:
    """Heads that each predict one more token ahead; see ``engine.drafting.medusa``."""

    def __init__(self, hidden_size: int, num_heads: int, num_layers: int) -> None:
        self.module = ResidualHeads(num_heads, num_layers, hidden_size)
        self.reach = num_heads

    def run(self, target: Target, batch: Batch, rng: random.Random, positions: int) -> Result:
        parts = windows(batch, 0, self.reach, rng, positions)
        states = self.module(gather(batch.hidden, parts, 0).float())
        loss = torch.zeros((), device=batch.hidden.device)
        hits = []
        for index, state in enumerate(states):
            teacher = target.log_probs(gather(batch.hidden, parts, index + 1))
            logits = target.logits(state)
            loss = loss + DEPTH_DISCOUNT**index * soft_loss(logits, teacher)
            hits.append(int((logits.argmax(-1) == teacher.argmax(-1)).sum()))
        return Result(loss, hits, len(states[0]))

    def config(self) -> dict[str, Any]:
        return medusa_config(self.module)


class EagleLearner:
    """A layer that goes on from the target's states by itself; see ``engine.drafting.eagle``.

    In serving, the deeper a drafted token is, the more of what it reads is the layer's own. So each
    batch is passed several times: in pass ``d`` the rows read what pass ``d - 1`` expected (HASS, arXiv
    2408.15766, without its attention masks: keys of earlier rows are of the same pass here).
    """

    def __init__(self, hidden_size: int, sizes: Sequence[int]) -> None:
        self.module = FeatureLayer(hidden_size, sizes, "sdpa")
        self.reach = NUM_DEPTHS + 1

    def run(self, target: Target, batch: Batch, rng: random.Random, positions: int) -> Result:
        parts = windows(batch, NUM_DEPTHS, 1, rng, positions)
        with torch.no_grad():
            embeddings = target.embed(batch.ids).float()
        states = batch.hidden.float()
        teacher = target.log_probs(gather(batch.hidden, parts, 0))
        wanted = gather(states, parts, 0)
        scale = wanted.pow(2).mean().sqrt()
        read = _shown(states, batch.lengths, rng)
        loss = torch.zeros((), device=states.device)
        hits = []
        for depth in range(NUM_DEPTHS):
            # Row i reads token i and the state of token i - 1, and expects the state of token i.
            before = functional.pad(read, (0, 0, 1, 0))[:, :-1]
            expected = self.module(embeddings, before)
            chosen = gather(expected, parts, 0)
            logits = target.logits(chosen)
            near = functional.smooth_l1_loss(chosen / scale, wanted / scale)
            part = soft_loss(logits, teacher) + STATE_WEIGHT * near
            loss = loss + DEPTH_DISCOUNT**depth * part
            hits.append(int((logits.argmax(-1) == teacher.argmax(-1)).sum()))
            read = expected
        return Result(loss, hits, len(wanted))

    def config(self) -> dict[str, Any]:
        return eagle_config(self.module)


def _shown(states: torch.Tensor, lengths: Sequence[int], rng: random.Random) -> torch.Tensor:
    """The states, in some sequences with zeros up to a random place."""
    shown = states.clone()
    for row, length in enumerate(lengths):
        if rng.random() < BLANK_SHARE:
            shown[row, : rng.randrange(length)] = 0
    return shown
