"""Known texts with what the target says before each of their tokens: food for draft templates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafters.base import GREEDY, DraftSampling
from engine.model.loader import max_position
from engine.sampling.logprobs import begin_top_tokens
from engine.sampling.noise import gumbel_list, request_key
from engine.transfer import Readback
from slipstream.tools.template.search import ReplayText

_NUMBER = (int, float)
_FIELDS: dict[str, tuple[type, ...]] = {
    "prompt": (str,),
    "completion": (str,),
    "temperature": _NUMBER,
    "top_k": (int,),
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "seed": (int,),
}


@dataclass(frozen=True, slots=True)
class LoggedText:
    """A line of a log: a completion and how it was drawn."""

    prompt: str
    completion: str
    sampling: DraftSampling


def read_log(path: Path) -> list[LoggedText]:
    """One JSON object per line: ``prompt`` and ``completion``, and for texts that this server drew
    ``seed``, ``temperature`` and ``top_k``, ``top_p``, ``min_p`` as in the request.

    Raises OSError, and ValueError naming line and field.
    """
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            texts.append(_logged(json.loads(line)))
        except ValueError as error:
            raise ValueError(f"line {number} of {path}: {error}") from error
    return texts


def _logged(record: Any) -> LoggedText:
    if not isinstance(record, dict):
        raise ValueError("an object is needed")
    for name, value in record.items():
        if name not in _FIELDS:
            raise ValueError(f"unknown field {name!r}; known: {', '.join(_FIELDS)}")
        if not isinstance(value, _FIELDS[name]) or isinstance(value, bool):
            raise ValueError(f"{name} is not of the right type")
    for name in ("prompt", "completion"):
        if name not in record:
            raise ValueError(f"{name} is missing")
        record[name].encode()  # halves of characters are nothing that a tokenizer reads
    temperature = float(record.get("temperature", 0.0))
    if temperature < 0:
        raise ValueError("temperature must not be negative")
    if temperature == 0:
        return LoggedText(record["prompt"], record["completion"], GREEDY)
    if "seed" not in record:
        raise ValueError("seed is missing: without it the noise of a drawn text is unknown")
    key = request_key(record["seed"], 0)
    sampling = DraftSampling(
        temperature,
        record.get("top_k", 0),
        float(record.get("top_p", 1.0)),
        float(record.get("min_p", 0.0)),
        partial(gumbel_list, key),
        key,
    )
    return LoggedText(record["prompt"], record["completion"], sampling)


def replay_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[LoggedText],
    num_top: int,
) -> Iterator[ReplayText]:
    """One forward of the target per text; what exceeds the model's length is cut off."""
    longest = max_position(model.config)
    for text in texts:
        prompt_ids = tokenizer(text.prompt)["input_ids"]
        token_ids = tokenizer(text.completion, add_special_tokens=False)["input_ids"]
        token_ids = token_ids[: max(0, longest - len(prompt_ids))]
        if not prompt_ids or not token_ids:
            continue
        with torch.inference_mode():
            ids = torch.tensor([[*prompt_ids, *token_ids[:-1]]], device=model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0]  # [num_tokens, vocab_size]
        rows = range(len(prompt_ids) - 1, logits.shape[0])
        readback = Readback()
        finish, _ = begin_top_tokens(logits, rows, num_top, readback, with_probs=True)
        readback.fetch()
        top_token_ids, _, top_probs = finish()
        assert top_probs is not None
        yield ReplayText(prompt_ids, token_ids, top_token_ids, top_probs, text.sampling)
