"""Token sequences to train heads on: texts, and what the target itself writes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training.samples import Mix, draw, load_units

MAX_TOKENS = 1024
PROMPT_SHARE = (0.2, 0.6)
"""Where a text is cut for the target to go on, as a share of its tokens."""
ROLES = ("<|user|>", "<|assistant|>")


@dataclass(frozen=True)
class Texts:
    """Sources of token sequences. ``edits``: the tokenizer has the roles that edit samples use."""

    tok: Any
    units: list[str]
    prompts: list[list[int]]

    @property
    def edits(self) -> bool:
        known = self.tok.get_vocab()
        return all(role in known for role in ROLES)

    def sequence(self, rng: random.Random) -> list[int]:
        """A document: code or an edit where the tokenizer knows edits, else a unit of the corpus."""
        if self.edits:
            mix = Mix(0.5, 1900, 0.25, 0.03)
            return draw(self.tok, rng, self.units, self.units, mix, MAX_TOKENS).ids
        ids = list(self.tok(rng.choice(self.units))["input_ids"])
        eos = self.tok.eos_token_id
        return [*ids, *([] if eos is None else [eos])][:MAX_TOKENS]

    def prompt(self, rng: random.Random) -> list[int]:
        """Something for the target to continue: a prompt from the file, else the head of a document."""
        if self.prompts:
            return rng.choice(self.prompts)[-MAX_TOKENS:]
        ids = self.sequence(rng)
        if self.edits:
            answer = self.tok.convert_tokens_to_ids(ROLES[1])
            if answer in ids:
                return ids[: ids.index(answer) + 1]
        return ids[: max(1, int(len(ids) * rng.uniform(*PROMPT_SHARE)))]


def read_prompts(tok: Any, path: Path | None) -> list[list[int]]:
    """Token ids of a file of JSON lines with ``prompt`` (text) or ``messages`` (a chat).

    Raises ValueError naming the first line that has neither.
    """
    if path is None:
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        row = json.loads(line)
        if "messages" in row:
            text = tok.apply_chat_template(
                row["messages"], tokenize=False, add_generation_prompt=True
            )
            found.append(list(tok(text, add_special_tokens=False)["input_ids"]))
        elif "prompt" in row:
            found.append(list(tok(row["prompt"])["input_ids"]))
        else:
            raise ValueError(f"{path} line {number}: neither prompt nor messages")
    return found


def load_texts(tok: Any, corpus: Path | None, prompts: Path | None, name: str) -> Texts:
    """``name``: train.jsonl or heldout.jsonl of the corpus folder; files of JSON lines with ``text``."""
    units = [] if corpus is None else load_units(corpus / name)
    return Texts(tok, units, read_prompts(tok, prompts))


@torch.inference_mode()
def write_samples(
    model: Any, texts: Texts, rng: random.Random, count: int, new_tokens: int, path: Path
) -> list[list[int]]:
    """What the target writes after ``count`` prompts, half of it greedy, half at temperature 0.8.

    Kept in ``path`` as JSON lines; a run that is started again goes on from there.
    """
    done = [] if not path.exists() else path.read_text(encoding="utf-8").splitlines()
    sequences: list[list[int]] = [json.loads(line) for line in done]
    while len(sequences) < count:
        prompts = sorted((texts.prompt(rng) for _ in range(32)), key=len)[:16]
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        sampling: dict[str, Any] = {"do_sample": False}
        if len(sequences) // len(prompts) % 2:
            sampling = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0}
        out = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=new_tokens,
            pad_token_id=texts.tok.pad_token_id or 0,
            **sampling,
        ).tolist()
        ends = set(_as_list(model.generation_config.eos_token_id))
        with open(path, "a") as handle:
            for row, prompt in enumerate(prompts):
                written = out[row][longest:]
                stop = next((i + 1 for i, token in enumerate(written) if token in ends), None)
                sequences.append([*prompt, *written[:stop]])
                handle.write(json.dumps(sequences[-1]) + "\n")
        print(f"{len(sequences)} of {count} texts written by the target", flush=True)
    return sequences


def _as_list(value: Any) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def batches(
    texts: Texts,
    written: Sequence[list[int]],
    rng: random.Random,
    tokens: int,
    shortest: int,
) -> Iterator[list[list[int]]]:
    """Endless groups of sequences of similar length, about ``tokens`` tokens each; half of them the
    target's own, where there are any. Sequences below ``shortest`` tokens are left out."""
    while True:
        pool: list[list[int]] = []
        while len(pool) < 64:
            own = written and (not texts.units or rng.random() < 0.5)
            sequence = rng.choice(written) if own else texts.sequence(rng)
            if len(sequence) >= shortest:
                pool.append(sequence)
        pool.sort(key=len)
        groups: list[list[list[int]]] = []
        while pool:
            rows = max(1, tokens // len(pool[-1]))
            groups.append(pool[-rows:])
            del pool[-rows:]
        rng.shuffle(groups)
        yield from groups
