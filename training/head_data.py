"""Texts that a model wrote (``training.written``), as heads learn from them."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_SORTED_AT_ONCE = 256
"""Texts among which those of similar length are looked for: few, so that an order of texts by length does
not become an order of steps."""


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids of a prompt and of the reply to it. ``num_prompt``: how many are the prompt's."""

    ids: tuple[int, ...]
    num_prompt: int

    @property
    def first_row(self) -> int:
        """The first row that drafts: that of the reply's first token. Row i is of token i + 1."""
        return max(0, self.num_prompt - 1)

    @property
    def num_rows(self) -> int:
        """Rows behind which the target says something that can be learnt."""
        return max(0, len(self.ids) - 1 - self.first_row)


def load_texts(path: Path, vocab_size: int) -> list[Text]:
    """Returns the texts of a file of ``training.written`` whose replies have a token to learn from.

    Raises ValueError naming the first line that is no such text, or of a larger vocabulary.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            text = Text(tuple(map(int, row["ids"])), int(row["num_prompt"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} line {number} is no text of training.written") from error
        if not all(0 <= token < vocab_size for token in text.ids):
            raise ValueError(f"{path} line {number} is of another vocabulary than the model's")
        if text.num_rows:
            found.append(text)
    return found


def draft_ids(texts: Sequence[Text], vocab_size: int, size: int) -> torch.Tensor | None:
    """Returns the ids, ascending, of the ``size`` tokens that replies use most; None: of all tokens, as
    for size 0. Where replies use fewer, the others are those of the lowest ids, which tokenizers learn
    first."""
    if not 0 < size < vocab_size:
        return None
    count = Counter(token for text in texts for token in text.ids[text.num_prompt :])
    chosen = [token for token, _ in count.most_common(size)]
    rest = (token for token in range(vocab_size) if token not in count)
    chosen += [token for token, _ in zip(rest, range(size - len(chosen)), strict=False)]
    return torch.tensor(sorted(chosen))


def unused_token(texts: Sequence[Text], vocab_size: int) -> int:
    """Returns the highest id that no text uses, else the one that is used least."""
    count = Counter(token for text in texts for token in text.ids)
    return min(reversed(range(vocab_size)), key=lambda token: count[token])


def groups(
    texts: Sequence[Text], indices: Sequence[int], rng: random.Random, num_rows: int, most: int
) -> list[list[int]]:
    """Returns all ``indices``, those of texts of similar length together, each group with about
    ``num_rows`` rows that learn. ``most``: rows of a text that learn at once."""
    order = list(indices)
    rng.shuffle(order)
    found = []
    for start in range(0, len(order), _SORTED_AT_ONCE):
        part = sorted(order[start : start + _SORTED_AT_ONCE], key=lambda each: len(texts[each].ids))
        group: list[int] = []
        held = 0
        for index in part:
            group.append(index)
            held += min(texts[index].num_rows, most)
            if held >= num_rows:
                found.append(group)
                group, held = [], 0
        if group:
            found.append(group)
    rng.shuffle(found)
    return found
