"""The kinds of heads that can be trained: what each is made of, what it reads and how it is written."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from engine.drafting.published.eagle3_network import Eagle3Network
from engine.drafting.published.medusa import ResidualHeads
from engine.drafting.published.networks import place
from training.eagle3 import (
    Eagle3Chain,
    PEagleChain,
    TrainedChain,
    begin_from,
    llama_config,
    make_network,
)
from training.folders import write_eagle3, write_medusa, write_peagle
from training.head_losses import Rows
from training.target_states import Batch, Target

EAGLE3, P_EAGLE, MEDUSA = KINDS = ("eagle3", "p_eagle", "medusa")


class Shape(NamedTuple):
    """The shape of a learner's weights. ``num_steps``: tokens that it guesses after a row; ``draft_ids``:
    the target's ids of the rows of its output head, None: all of them; ``mask_token_id``: P-EAGLE's."""

    num_steps: int
    num_layers: int
    draft_ids: Tensor | None = None
    mask_token_id: int | None = None


class Learner(Protocol):
    """One kind of heads in training."""

    module: nn.Module
    shape: Shape

    def read(self, target: Target, batch: Batch, rows: Rows) -> list[Tensor]:
        """Returns what the output head reads, per step, of the rows of ``Rows.of_step``."""

    def head(self) -> Tensor:
        """Returns the weight of the output head, ``[draft_vocab_size, hidden_size]``."""

    def write(self, path: Path, notes: Mapping[str, Any]) -> None:
        """Writes a folder that the engine loads. ``notes``: more of its configuration."""


class ChainLearner:
    """EAGLE-3 or P-EAGLE, by its ``chain``. ``facts`` and ``name`` are the target's."""

    def __init__(self, chain: TrainedChain, shape: Shape, target: Target, name: str) -> None:
        self.module: nn.Module = chain
        self.shape = shape
        self._chain, self._facts, self._name = chain, target.facts, name
        self._architectures = list(target.model.config.architectures or [])
        self._dtype = target.dtype

    def read(self, target: Target, batch: Batch, rows: Rows) -> list[Tensor]:
        embeddings = target.embed(batch.ids.roll(-1, 1))
        found: list[Tensor] = self._chain(embeddings, batch.states, rows, self.shape.num_steps)
        return found

    def head(self) -> Tensor:
        weight: Tensor = self._chain.network.lm_head.weight
        return weight

    def write(self, path: Path, notes: Mapping[str, Any]) -> None:
        network = Eagle3Network(self._chain.network.spec, self.shape.draft_ids)
        network.load_state_dict(self._chain.network.state_dict())
        place(network, torch.device("cpu"), self._dtype)
        fingerprint = self._facts.fingerprint
        if network.num_parallel > 1:
            write_peagle(path, network, self._name, self._architectures, fingerprint, notes)
        else:
            write_eagle3(path, network, fingerprint, notes)


class MedusaLearner:
    """Residual heads over the target's own output head, which is written with them where
    ``writes_head``."""

    def __init__(self, target: Target, shape: Shape, writes_head: bool = False) -> None:
        self._heads = ResidualHeads(shape.num_steps, shape.num_layers, target.facts.hidden_size)
        self.module: nn.Module = self._heads
        self.shape = shape
        self._facts, self._head = target.facts, target.head
        self._writes_head = writes_head

    def read(self, target: Target, batch: Batch, rows: Rows) -> list[Tensor]:
        del target
        at = rows.at.to(batch.normed.device)
        # The row that wrote token i + 1 is that of token i.
        states = batch.normed.gather(1, at[:, :, None].expand(-1, -1, batch.normed.shape[2]))
        found = self._heads(states.flatten(0, 1).to(self._heads.weight.dtype))
        width = batch.ids.shape[1]
        learning = [rows.of_step(step, width)[0] for step in range(self.shape.num_steps)]
        return [each[part.to(each.device)] for each, part in zip(found, learning, strict=True)]

    def head(self) -> Tensor:
        return self._head

    def write(self, path: Path, notes: Mapping[str, Any]) -> None:
        head = self._head if self._writes_head else None
        write_medusa(path, self._heads, self._facts, notes, head)


def make_learner(kind: str, target: Target, shape: Shape, args: argparse.Namespace) -> Learner:
    """Returns a learner of a kind that begins with what it can take from the target."""
    if kind == MEDUSA:
        return MedusaLearner(target, shape, args.with_output_head)
    ids, mask, count = shape.draft_ids, shape.mask_token_id, shape.num_layers
    num_parallel = 1 if mask is None else shape.num_steps
    config = llama_config(target.config, count)
    network = make_network(config, target.layers, ids, num_parallel, mask)
    first = target.facts.num_layers - count
    layers = [target.decoder_layer(max(0, first + index)) for index in range(count)]
    head = target.head if ids is None else target.head[ids.to(target.device)]
    begin_from(network, layers, target.final_norm(), head)
    if mask is None:
        return ChainLearner(Eagle3Chain(network), shape, target, args.model)
    embedding = target.embed(torch.tensor(mask, device=target.device)).clone()
    return ChainLearner(PEagleChain(network, embedding), shape, target, args.model)
