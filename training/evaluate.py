"""Measure a saved model on held-out code and held-out edits, and show sample completions.

With `--against` also how well it guesses another model's tokens, which is what a draft model is
for.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.samples import CHANGED_WEIGHT, answer_weights
from training.tokenizer import encode

LOOP_TOKENS, LOOP_TAIL, LOOP_PERIOD = 120, 30, 15
PREFIXES = (
    "def read_config(path):\n",
    "class Stack:\n    def __init__(self):\n",
    'def count_words(text):\n    """Count the words of a text."""\n',
    "import os\n\n\ndef find_files(folder, suffix):\n",
)


class Evaluator:
    """A model with its tokenizer, run on one thread by default."""

    def __init__(self, folder: Path) -> None:
        self.tok: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.model.train(False)

    @torch.inference_mode()
    def answer_logits(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """Return what the model expects at every token of an answer.  # [num_tokens, vocab]"""
        ids = torch.tensor([prompt + answer])
        logits: torch.Tensor = self.model(input_ids=ids[:, :-1]).logits[0, len(prompt) - 1 :]
        return logits.float()

    @torch.inference_mode()
    def complete(self, prompt: list[int], limit: int, temperature: float = 0.0) -> list[int]:
        """Return how a prompt goes on, until the stop token or the limit."""
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=limit,
            pad_token_id=self.tok.pad_token_id,
            eos_token_id=self.tok.eos_token_id,
            **sampling,
        )
        return [int(token) for token in out[0, len(prompt) :]]

    def text(self, token_ids: list[int]) -> str:
        """Return tokens as text, without special ones."""
        return str(self.tok.decode(token_ids, skip_special_tokens=True))

    def code_case(self, row: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Return prompt and continuation of a line of heldout_code.jsonl."""
        answer = [*encode(self.tok, row["completion"]), self.tok.eos_token_id]
        return self.code_prompt(row["prompt"]), answer

    def edit_case(self, row: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Return prompt and answer of a line of heldout_edits.jsonl."""
        answer = [*encode(self.tok, row["completion"]), self.tok.eos_token_id]
        return self.chat_prompt(row["messages"]), answer

    def code_prompt(self, text: str) -> list[int]:
        """Return the tokens of a plain completion prompt."""
        return [self.tok.bos_token_id, *encode(self.tok, text)]

    def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the tokens of a conversation, ready for the answer."""
        text = self.tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return encode(self.tok, text)


def repeats(token_ids: list[int]) -> bool:
    """Return whether a whole completion ends in a loop: its last 30 tokens have a short period."""
    tail = token_ids[-LOOP_TAIL:]
    return len(token_ids) == LOOP_TOKENS and any(
        tail[period:] == tail[:-period] for period in range(1, LOOP_PERIOD + 1)
    )


def read_lines(path: Path, count: int) -> list[dict[str, Any]]:
    """Read the first lines of a benchmark file."""
    with open(path) as handle:
        return [json.loads(line) for line in handle][:count]


class Tally:
    """Sums over the tokens of many answers."""

    def __init__(self) -> None:
        self.loss, self.right, self.tokens = 0.0, 0, 0

    def add(self, logits: torch.Tensor, answer: list[int]) -> torch.Tensor:
        """Count one answer; returns which of its tokens were expected most.  # [num_tokens]"""
        wanted = torch.tensor(answer)
        hits = logits.argmax(-1) == wanted
        self.loss += functional.cross_entropy(logits, wanted, reduction="sum").item()
        self.right += int(hits.sum())
        self.tokens += len(answer)
        return hits


def evaluate_code(ev: Evaluator, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the loss on real continuations, and how many of the model's own end in a loop."""
    tally, looping = Tally(), {0.0: 0, 0.8: 0}
    for row in rows:
        prompt, answer = ev.code_case(row)
        tally.add(ev.answer_logits(prompt, answer), answer)
        for temperature in looping:
            looping[temperature] += repeats(ev.complete(prompt, LOOP_TOKENS, temperature))
    return {
        "code_loss": round(tally.loss / tally.tokens, 4),
        "code_perplexity": round(math.exp(tally.loss / tally.tokens), 2),
        "code_top1": round(tally.right / tally.tokens, 4),
        "code_completions": len(rows),
        "repeating_greedy": looping[0.0],
        "repeating_t08": looping[0.8],
    }


def evaluate_edits(ev: Evaluator, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the loss on right answers, and how many of the model's own are right."""
    tally, num_changed, changed_right = Tally(), 0, 0
    kinds: dict[str, list[int]] = {}
    for row in rows:
        prompt, answer = ev.edit_case(row)
        hits = tally.add(ev.answer_logits(prompt, answer), answer)
        before = encode(ev.tok, row["messages"][-1]["content"].split("\n\n", 1)[1])
        weights = torch.tensor(answer_weights([*before, ev.tok.eos_token_id], answer))
        changed = weights == CHANGED_WEIGHT
        num_changed += int(changed.sum())
        changed_right += int(hits[changed].sum())
        good = ev.text(ev.complete(prompt, len(answer) + 40)) == row["completion"]
        kinds.setdefault(row["kind"], []).append(int(good))
    return {
        "edit_loss": round(tally.loss / tally.tokens, 4),
        "edit_token_accuracy": round(tally.right / tally.tokens, 4),
        "edit_changed_accuracy": round(changed_right / num_changed, 4),
        "edits": len(rows),
        "edits_exact": sum(map(sum, kinds.values())),
        "edits_exact_by_kind": {k: f"{sum(v)}/{len(v)}" for k, v in sorted(kinds.items())},
    }


def compare(ev: Evaluator, target: Evaluator, data: Path, count: int) -> dict[str, Any]:
    """Return how often a draft and its target agree on the tokens of held-out answers.

    `agree` is the share of tokens both find most likely; `accept` the expected acceptance of a
    token sampled at temperature 1, the sum over the vocabulary of the smaller probability
    (Leviathan et al. 2023).
    """
    result: dict[str, Any] = {}
    for name, case in (("code", ev.code_case), ("edit", ev.edit_case)):
        agree, accept, tokens = 0, 0.0, 0
        for row in read_lines(data / f"heldout_{name}{'s' * (name == 'edit')}.jsonl", count):
            prompt, answer = case(row)
            draft, true = ev.answer_logits(prompt, answer), target.answer_logits(prompt, answer)
            agree += int((draft.argmax(-1) == true.argmax(-1)).sum())
            accept += torch.minimum(draft.softmax(-1), true.softmax(-1)).sum().item()
            tokens += len(answer)
        result[f"{name}_agree"] = round(agree / tokens, 4)
        result[f"{name}_accept"] = round(accept / tokens, 4)
    return result


def evaluate(ev: Evaluator, data: Path, count: int) -> dict[str, Any]:
    """Return what both benchmark files say about a model."""
    return evaluate_code(ev, read_lines(data / "heldout_code.jsonl", count)) | evaluate_edits(
        ev, read_lines(data / "heldout_edits.jsonl", count)
    )


def main() -> None:
    """Print the measurements as JSON, then sample completions."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, default=Path("bench/data"))
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--against", type=Path, help="a target model to compare a draft with")
    parser.add_argument("--json", type=Path, help="also write the measurements here")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    random.seed(0)
    ev = Evaluator(args.model)
    result = evaluate(ev, args.data, args.count)
    if args.against:
        result |= compare(ev, Evaluator(args.against), args.data, args.count)
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    for prefix in PREFIXES:
        for temperature in (0.0, 0.8):
            text = ev.text(ev.complete(ev.code_prompt(prefix), 160, temperature))
            print(f"--- temperature {temperature}\n{prefix}{text}")


if __name__ == "__main__":
    main()
