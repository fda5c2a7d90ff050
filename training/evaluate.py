"""Measure a saved model on held-out code and held-out edits, and show sample completions."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoTokenizer, LlamaForCausalLM

from training.tokenizer import encode

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
        self.model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.model.train(False)

    @torch.inference_mode()
    def answer_scores(self, prompt: list[int], answer: list[int]) -> tuple[float, int]:
        """Return the summed loss of an answer and how many tokens argmax gets right."""
        ids = torch.tensor([prompt + answer])
        logits = self.model(input_ids=ids[:, :-1]).logits[0, len(prompt) - 1 :].float()
        target = ids[0, len(prompt) :]
        loss = functional.cross_entropy(logits, target, reduction="sum").item()
        return loss, int((logits.argmax(-1) == target).sum())

    @torch.inference_mode()
    def complete(self, prompt: list[int], limit: int, temperature: float = 0.0) -> str:
        """Continue a prompt until the stop token or the limit."""
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
        return str(self.tok.decode(out[0, len(prompt) :], skip_special_tokens=True))

    def code_prompt(self, text: str) -> list[int]:
        """Return the tokens of a plain completion prompt."""
        return [self.tok.bos_token_id, *encode(self.tok, text)]

    def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the tokens of a conversation, ready for the answer."""
        text = self.tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return encode(self.tok, text)


def loops(text: str) -> bool:
    """Return whether the end of a text repeats one line or one short phrase again and again."""
    lines = [ln.strip() for ln in text.splitlines() if ln.strip()]
    if lines and max(Counter(lines).values()) > max(4, 0.4 * len(lines)):
        return True
    words = text.split()
    grams = Counter(tuple(words[i : i + 4]) for i in range(len(words) - 3))
    return bool(grams) and max(grams.values()) > max(4, 0.15 * len(words))


def read_lines(path: Path, count: int) -> list[dict[str, Any]]:
    """Read the first lines of a benchmark file."""
    with open(path) as handle:
        return [json.loads(line) for line in handle][:count]


def evaluate(ev: Evaluator, data: Path, count: int) -> dict[str, Any]:
    """Return losses, edit exactness, copy accuracy and the share of looping completions."""
    result: dict[str, Any] = {}
    total, right, tokens = 0.0, 0, 0
    looping = {0.0: 0, 0.8: 0}
    code = read_lines(data / "heldout_code.jsonl", count)
    for row in code:
        prompt = ev.code_prompt(row["prompt"])
        answer = [*encode(ev.tok, row["completion"]), ev.tok.eos_token_id]
        loss, hits = ev.answer_scores(prompt, answer)
        total, right, tokens = total + loss, right + hits, tokens + len(answer)
        for temperature in looping:
            looping[temperature] += loops(ev.complete(prompt, 120, temperature))
    result["code_loss"] = round(total / tokens, 4)
    result["code_perplexity"] = round(math.exp(total / tokens), 2)
    result["code_top1"] = round(right / tokens, 4)
    result["looping_greedy"] = round(looping[0.0] / len(code), 3)
    result["looping_t0.8"] = round(looping[0.8] / len(code), 3)
    total, right, tokens, exact = 0.0, 0, 0, 0
    kinds: dict[str, list[int]] = {}
    edits = read_lines(data / "heldout_edits.jsonl", count)
    for row in edits:
        prompt = ev.chat_prompt(row["messages"])
        answer = [*encode(ev.tok, row["completion"]), ev.tok.eos_token_id]
        loss, hits = ev.answer_scores(prompt, answer)
        total, right, tokens = total + loss, right + hits, tokens + len(answer)
        good = ev.complete(prompt, len(answer) + 40) == row["completion"]
        exact += good
        kinds.setdefault(row["kind"], []).append(int(good))
    result["edit_loss"] = round(total / tokens, 4)
    result["edit_token_accuracy"] = round(right / tokens, 4)
    result["edit_exact"] = round(exact / len(edits), 4)
    result["edit_exact_by_kind"] = {k: f"{sum(v)}/{len(v)}" for k, v in sorted(kinds.items())}
    return result


def main() -> None:
    """Print the measurements as JSON, then sample completions."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, default=Path("bench/data"))
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--json", type=Path, help="also write the measurements here")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    random.seed(0)
    ev = Evaluator(args.model)
    result = evaluate(ev, args.data, args.count)
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    for prefix in PREFIXES:
        for temperature in (0.0, 0.8):
            text = ev.complete(ev.code_prompt(prefix), 160, temperature)
            print(f"--- temperature {temperature}\n{prefix}{text}")


if __name__ == "__main__":
    main()
