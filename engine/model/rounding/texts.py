"""Text to calibrate on that a model writes itself, where nobody names one.

A model's own text is what it has to go on writing; that it calibrates as well as a corpus is known from
Liu et al., "LLM-QAT: Data-Free Quantization Aware Training for Large Language Models", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.model.loader import max_position

CALIBRATION_TOKENS = 16384
"""So many are enough: with more, text that was held back is written no better (docs/quantization.md)."""
_LENGTH = 512
"""Tokens of a piece of text: each is read behind those before it."""
_AT_ONCE = 16
"""More of them would keep more keys and values than some models have weights."""
_BEGINNINGS = (
    "The",
    "In the year",
    "A short history of",
    "Once upon a time",
    "Dear",
    '"I do not think so," said',
    "# Introduction\n\n",
    "1. First,",
    "Question:",
    "def ",
    "import ",
    "class ",
    "#include <",
    "function ",
    "SELECT ",
    '{\n  "name": "',
    "<html>",
    "$ git",
    "Let x be",
    "Der",
    "Le",
    "El",
)
_REQUESTS = (
    "Explain how rain forms.",
    "Write a function that reverses a list.",
    "Translate to French: good morning, my friends.",
    "What is 17 times 24? Think step by step.",
    "Summarise the plot of a novel that you like.",
    "List five kinds of trees.",
    "Fix this code: for i in range(10) print(i)",
    "Write a letter to a landlord about a broken window.",
    "Give a JSON object with a name and an age.",
    "Who are you?",
)


def calibration_texts(
    model: PreTrainedModel, tokenizer: Any, text: str | None, most_tokens: int, seed: int = 0
) -> torch.Tensor:
    """Returns ids ``[texts, tokens]`` of ``most_tokens`` at most: pieces spread evenly over ``text``, or,
    where there is none, what the model writes itself.

    Raises ValueError for a text that is shorter than one piece.
    """
    length = min(_LENGTH, max_position(model.config), most_tokens)
    count = most_tokens // length
    if text is None:
        return write_texts(model, beginnings(tokenizer), count, length, seed)
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
    pieces = ids[: len(ids) // length * length].view(-1, length)
    if not len(pieces):
        raise ValueError(f"the text to calibrate on has {len(ids)} tokens, fewer than {length}")
    if len(pieces) <= count:
        return pieces
    return pieces[torch.linspace(0, len(pieces) - 1, count).long()]


def beginnings(tokenizer: Any) -> list[list[int]]:
    """Returns the ids of first words of texts of many kinds and, where the model has a chat template,
    of requests to it."""
    requests = _REQUESTS if getattr(tokenizer, "chat_template", None) else ()
    found: list[list[int]] = []
    # In turn, so that few texts are of both kinds.
    for text, request in zip_longest(_BEGINNINGS, requests):
        found.append(list(tokenizer.encode(text)))
        if request is not None:
            said = tokenizer.apply_chat_template(
                [{"role": "user", "content": request}], add_generation_prompt=True, tokenize=False
            )
            found.append(list(tokenizer.encode(said, add_special_tokens=False)))
    return [ids for ids in found if ids]


@torch.inference_mode()
def write_texts(
    model: PreTrainedModel,
    firsts: Sequence[Sequence[int]],
    num_texts: int,
    length: int,
    seed: int = 0,
) -> torch.Tensor:
    """Returns ids ``[num_texts, length]`` that the model draws at temperature 1 behind ``firsts``, taken
    in turn. Text behind an end goes on, as it does in training."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(num_texts, length, dtype=torch.long)
    known = torch.zeros(num_texts, dtype=torch.long)
    for number, row in enumerate(ids):
        first = torch.tensor(firsts[number % len(firsts)][: max(1, length // 2)])
        row[: len(first)] = first
        known[number] = len(first)
    for rows, lengths in zip(ids.split(_AT_ONCE), known.split(_AT_ONCE), strict=True):
        _write(model, rows, lengths, generator)
    return ids


def _write(
    model: PreTrainedModel, ids: torch.Tensor, known: torch.Tensor, generator: torch.Generator
) -> None:
    """Fills rows ``[texts, tokens]`` behind their first ``known`` tokens."""
    cache, read = None, 0
    for end in range(int(known.min()), ids.shape[1]):
        found = model(
            input_ids=ids[:, read:end].to(model.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, read = found.past_key_values, end
        weights = found.logits[:, -1].float().cpu().softmax(-1)
        drawn = torch.multinomial(weights, 1, generator=generator)[:, 0]
        ids[:, end] = torch.where(known <= end, drawn, ids[:, end])
