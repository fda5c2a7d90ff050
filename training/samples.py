"""Turn corpus units and edits into token sequences and length-sorted batches."""

from __future__ import annotations

import difflib
import json
import random
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from training.edits import Edit, base_text, make_edit, user_content
from training.tokenizer import encode

# The loss weights of an edit's tokens; those of code have 1.  The prompt teaches less than the
# answer.  Most of an answer repeats the prompt, so what does not is weighted up: otherwise a
# model that only ever copies is nearly as good as one that does what was asked.
USER_WEIGHT = 0.4
ANSWER_WEIGHT = 2.0
CHANGED_WEIGHT = 4.0
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a coding assistant.",
    "You edit code. Answer with the code only.",
)


@dataclass(frozen=True)
class Sample:
    """One document: its tokens and the loss weight of predicting each of them."""

    ids: list[int]
    weights: list[float]
    is_edit: bool


@dataclass(frozen=True)
class Mix:
    """The samples to draw: the share of edits, their longest code and the share made random."""

    edit_share: float
    longest: int
    random_share: float
    repeat_share: float
    stutter_share: float = 0.0

    @staticmethod
    def at(progress: float, decaying: bool) -> Mix:
        """Return the mix at a point of training: short copying first, long edits later.

        While the learning rate decays, edits get the length they mostly have in use.
        """
        if decaying:
            return Mix(0.36, 1900, 0.25, 0.03, 0.35)
        if progress < 0.25:
            return Mix(0.65, 450, 0.7, 0.4)
        if progress < 0.5:
            return Mix(0.3, 1100, 0.4, 0.05)
        return Mix(0.36, 1900, 0.35, 0.03, 0.1)


def load_rows(path: Path) -> list[dict[str, str]]:
    """Read a corpus file written by `training.corpus`: text, path and package of each unit."""
    with open(path) as handle:
        return [json.loads(line) for line in handle]


def load_units(path: Path) -> list[str]:
    """Read only the texts of a corpus file."""
    return [row["text"] for row in load_rows(path)]


def is_plain(text: str) -> bool:
    """Return whether a unit is short, reads like a stand-alone piece and repeats little.

    Code that repeats itself, line after line, teaches a small model to loop.
    """
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 4]
    head = text.lstrip().split("\n", 1)[0]
    if len(text) > 1600 or max(Counter(lines).values(), default=0) > 2:
        return False
    if head.startswith("@") or "(self" in head or "(cls" in head:
        return False
    return len(zlib.compress(text.encode())) > 0.36 * len(text)


def code_sample(tok: PreTrainedTokenizerBase, text: str) -> Sample:
    """Wrap one unit as BOS text EOS, so that a completion ends by itself."""
    ids = [tok.bos_token_id, *encode(tok, text.rstrip("\n") + "\n"), tok.eos_token_id]
    return Sample(ids, [0.0] + [1.0] * (len(ids) - 1), False)


def stutter(rng: random.Random, sample: Sample, line_end: int) -> Sample:
    """Repeat a line or a few tokens of a code sample several times, without loss on the copies.

    What remains to be learnt is how real code goes on after a repetition: a small model that
    never saw one keeps repeating.  `line_end` is the token that ends a line.
    """
    ids, weights = sample.ids, sample.weights
    ends = [i + 1 for i, token in enumerate(ids[:-2]) if token == line_end]
    if len(ends) > 2 and rng.random() < 0.6:
        last = rng.randrange(1, len(ends))
        start, stop = ends[max(0, last - rng.choice((1, 1, 1, 2)))], ends[last]
    else:
        stop = rng.randrange(8, max(9, len(ids) - 1))
        start = stop - rng.randint(1, 6)
    copies = rng.randint(1, 5)
    block = ids[start:stop] * copies
    return Sample(
        ids[:stop] + block + ids[stop:],
        weights[:stop] + [0.0] * len(block) + weights[stop:],
        False,
    )


def answer_weights(before: list[int], after: list[int]) -> list[float]:
    """Return the loss weight of each token of an answer that edits `before` into `after`.

    Tokens that are not copied count more, and so does the first one after each change or gap,
    where copying has to find its place again.
    """
    weights = [ANSWER_WEIGHT] * len(after)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for tag, _, _, start, stop in matcher.get_opcodes():
        if tag != "equal":
            stop = min(stop + 1, len(after))
            weights[start:stop] = [CHANGED_WEIGHT] * (stop - start)
    return weights


def edit_sample(
    tok: PreTrainedTokenizerBase, rng: random.Random, units: list[str], mix: Mix
) -> Sample:
    """Build a conversation of one or two edits in the chat format."""
    ids, weights = [tok.bos_token_id], [0.0]

    def turn(role: str, content: str, before: str | None = None) -> None:
        body = [*encode(tok, content), tok.eos_token_id]
        ids.extend((tok.convert_tokens_to_ids(f"<|{role}|>"), *body))
        if before is None:
            body_weights = [USER_WEIGHT] * len(body)
        else:
            body_weights = answer_weights([*encode(tok, before), tok.eos_token_id], body)
        weights.extend((0.0, *body_weights))

    def request(edit: Edit, content: str) -> None:
        turn("user", content)
        turn("assistant", edit.after.strip("\n"), edit.before.strip("\n"))

    if rng.random() < 0.04:
        turn("system", rng.choice(SYSTEM_PROMPTS))
    text = base_text(rng, units, mix.longest, mix.random_share)
    edit = make_edit(rng, text, mix.repeat_share)
    request(edit, user_content(rng, edit))
    if len(text) < 600 and rng.random() < 0.06:
        # A follow-up request without the code: the last answer is what gets edited.
        edit = make_edit(rng, edit.after.strip("\n") + "\n")
        request(edit, edit.instruction)
    return Sample(ids, weights, True)


def draw(
    tok: PreTrainedTokenizerBase,
    rng: random.Random,
    code: list[str],
    to_edit: list[str],
    mix: Mix,
    limit: int,
) -> Sample:
    """Draw one training document, a unit of code or an edit, no longer than `limit` tokens."""
    while True:
        if rng.random() < mix.edit_share:
            sample = edit_sample(tok, rng, to_edit, mix)
        else:
            sample = code_sample(tok, rng.choice(code))
            if len(sample.ids) > 16 and rng.random() < mix.stutter_share:
                sample = stutter(rng, sample, encode(tok, "\n")[0])
        if len(sample.ids) <= limit:
            return sample


def pad(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-pad samples into (ids, weights).  With a causal mask padding needs no mask."""
    # One more than a round length, since the last token is only ever predicted.
    longest = _rounded(max(len(s.ids) for s in samples) - 1) + 1
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    weights = torch.zeros(len(samples), longest)
    for row, s in enumerate(samples):
        ids[row, : len(s.ids)] = torch.tensor(s.ids)
        weights[row, : len(s.ids)] = torch.tensor(s.weights)
    return ids, weights


def _rounded(length: int) -> int:
    """Round a length up to one of few sizes: every new shape costs memory and set-up time."""
    step = 32 if length <= 512 else 64 if length <= 1024 else 128
    return -(-length // step) * step


def group(
    samples: list[Sample], rng: random.Random, tokens: int, keep_rest: bool = False
) -> Iterator[list[Sample]]:
    """Split samples into groups of similar length and about `tokens` padded tokens each.

    The last group, when it stays short, is dropped unless `keep_rest` is set.
    """
    ordered = sorted(samples, key=lambda s: -len(s.ids))
    groups: list[list[Sample]] = []
    while ordered:
        rows = max(1, tokens // _rounded(len(ordered[0].ids) - 1))
        if keep_rest or len(ordered) >= rows:
            groups.append(ordered[:rows])
        ordered = ordered[rows:]
    rng.shuffle(groups)
    yield from groups
