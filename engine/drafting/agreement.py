"""Whether drafts fit their target, asked before the first request: on text that the target writes itself.

A head of another model, or one that reads the states of wrong layers, runs as any other and is hardly
ever right; published files name layers in two ways. So every draft is asked for its first guess at each
place of some texts of the target's own, a head with each reading of its file, and the share of places at
which the guess is the target's own token is its agreement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from drafters.base import DraftRequest, DraftShape, HiddenRows
from drafters.model.protocol import DraftRows
from engine.batch import NORMED, RequestRows, build_batch
from engine.drafting.draft_model import LevelModel
from engine.drafting.head_model import HeadModel
from engine.drafting.medusa import MedusaHeads
from engine.model.runner import ModelRunner

_NUM_TEXTS = 8
_NUM_TOKENS = 16
"""Of each text: 128 places in all, so that a share of 0.6 is known to 0.05."""
_ROOM = 64
"""Slots behind each text, for heads that draft by masks."""


@dataclass(frozen=True, slots=True)
class OwnText:
    """A text of which the target wrote all from ``first`` on. ``choices[i]``: the token that it writes
    after token i; ``states``: by layer, ``[num_tokens, hidden_size]``."""

    token_ids: list[int]
    first: int
    choices: list[int]
    states: Mapping[int, Tensor]
    block_table: range


@torch.inference_mode()
def write_texts(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], layers: Sequence[int]
) -> list[OwnText]:
    """Lets the target write, greedily, behind some of ``prompts``, and keeps the states of ``layers``.
    Overwrites the store's first blocks: only while it is unused. Writes less where the store is small."""
    size = runner.store.block_size
    # Each has a block at least.
    fitting = [list(each) for each in prompts if each][: min(_NUM_TEXTS, runner.store.num_blocks)]
    most = runner.store.num_blocks // max(1, len(fitting))
    chosen = [each[: max(1, most * size - _NUM_TOKENS)] for each in fitting]
    texts = [list(each) for each in chosen]
    # Side by side: a store takes memory where it is written.
    counts = [min(most, -(-(len(each) + _NUM_TOKENS + _ROOM) // size)) for each in texts]
    tables = [range(end - own, end) for own, end in zip(counts, accumulate(counts), strict=True)]
    spare = (len(table) * size - len(each) for table, each in zip(tables, texts, strict=True))
    count = min(_NUM_TOKENS, *spare) if texts else 0
    bases = [0] * len(texts)
    for _ in range(count):
        rows = [
            _rows(text[base:], base, table, 1)
            for text, base, table in zip(texts, bases, tables, strict=True)
        ]
        logits = runner.forward(build_batch(rows, size)).logits
        bases = [len(text) for text in texts]
        for text, token in zip(texts, logits.argmax(-1).tolist(), strict=True):
            text.append(token)
    lengths = list(map(len, texts))
    every = [_rows(text, 0, table, len(text)) for text, table in zip(texts, tables, strict=True)]
    if not every:
        return []
    output = runner.forward(build_batch(every, size, tuple(layers)))
    choices = output.logits.argmax(-1).split(lengths)
    states = [each[: sum(lengths)].clone().split(lengths) for each in output.hidden]
    return [
        OwnText(
            text,
            len(chosen[at]),
            choices[at].tolist(),
            {layer: parts[at] for layer, parts in zip(layers, states, strict=True)},
            tables[at],
        )
        for at, text in enumerate(texts)
    ]


def _rows(token_ids: Sequence[int], base: int, table: range, num_logits: int) -> RequestRows:
    return RequestRows(list(token_ids), len(token_ids), base, (), table, num_logits)


@torch.inference_mode()
def agreement(model: LevelModel, texts: Sequence[OwnText]) -> float | None:
    """Returns at which share of the places that the target wrote the model's first guess is its token;
    None where there is no place. Overwrites the first blocks of the model's own store."""
    reading = [_Reading(model, number, text) for number, text in enumerate(texts)]
    num_right = num_places = 0
    try:
        for step in range(max((len(text.token_ids) - text.first for text in texts), default=0)):
            asked = [each for each in reading if each.has(step)]
            rows = [each.rows(step) for each in asked]
            found = model.read_now(partial(model.begin, [rows])).candidates[0]
            # Heads that draft by masks say nothing at the last slot of all.
            said = [
                (each.choice(step), candidates[0].token_ids[0])
                for each, candidates in zip(asked, found, strict=True)
                if candidates
            ]
            num_places += len(said)
            num_right += sum(choice == token for choice, token in said)
    finally:
        for each in reading:
            each.end()
    return num_right / num_places if num_places else None


class _Reading:
    """One text as a request that draft after draft is asked for."""

    def __init__(self, model: LevelModel, number: int, text: OwnText) -> None:
        self._model, self._text = model, text
        self._name = f"agreement-{number}"
        self._num_valid = model.first_row
        self._num_told = 0

    def has(self, step: int) -> bool:
        return self._anchor(step) < len(self._text.token_ids)

    def choice(self, step: int) -> int:
        return self._text.choices[self._anchor(step)]

    def rows(self, step: int) -> DraftRows:
        """Returns the rows that are missing up to the anchor of a step, after telling the states before
        it."""
        text, anchor = self._text, self._anchor(step)
        if isinstance(self._model, HeadModel) and anchor > self._num_told:
            self._tell(self._model, anchor)
        first = min(self._num_valid, anchor)
        self._num_valid = anchor + self._model.keeps_anchor
        ask = _ask(self._name, text, anchor)
        return DraftRows(ask, text.token_ids[first : anchor + 1], first, 1)

    def _tell(self, head: HeadModel, end: int) -> None:
        """Tells the head the states before position ``end``."""
        text, first = self._text, self._num_told
        hidden = tuple(text.states[layer][first:end] for layer in head.hidden_layers)
        head.take_hidden([HiddenRows(self._name, first, text.token_ids, hidden, text.block_table)])
        self._num_told = end

    def end(self) -> None:
        if isinstance(self._model, HeadModel):
            self._model.forget(self._name)

    def _anchor(self, step: int) -> int:
        return self._text.first + step


def best_reading(
    model: HeadModel, texts: Sequence[OwnText]
) -> tuple[tuple[int, ...], float | None]:
    """Returns the layers with which a head agrees most, the first of equals among those that its file may
    mean, and how often it does; the head reads them from then on. None: there was no place to ask."""
    shares: dict[tuple[int, ...], float] = {}
    for layers in model.candidate_layers:
        model.read_layers(layers)
        share = agreement(model, texts)
        if share is None:
            break
        shares[layers] = share
    best = max(shares, key=shares.__getitem__, default=model.candidate_layers[0])
    model.read_layers(best)
    return best, shares.get(best)


@torch.inference_mode()
def agreement_of_medusa(heads: MedusaHeads, texts: Sequence[OwnText]) -> float | None:
    """Returns the same of the first of Medusa's heads."""
    places = [(text, at) for text in texts for at in range(text.first, len(text.token_ids))]
    if not places:
        return None
    hidden = [text.states[NORMED][at - 1] for text, at in places]
    asks = [_ask("", text, at) for text, at in places]
    found = heads.read_now(partial(heads.begin, hidden, asks, 1))
    pairs = zip(found, places, strict=True)
    right = [each[0].token_ids[0] == text.choices[at] for each, (text, at) in pairs]
    return sum(right) / len(right)


def _ask(name: str, text: OwnText, anchor: int) -> DraftRequest:
    known, table = text.token_ids[: anchor + 1], text.block_table
    return DraftRequest(name, known, 1, DraftShape(1, 1), block_table=table)
