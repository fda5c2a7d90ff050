"""Slow and obvious twins of the sampling code, and a toy language model to run it on."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.tree import EMPTY, ROOT, DraftTree
from engine.request.outcome import Outcome
from engine.request.params import GenerationRequest, SamplingParams
from engine.sampling.state import SamplingState
from worlds.sampled_rows import RowGroup, gumbel_scalar, sample_tokens, verify_all


def new_state(
    params: SamplingParams,
    vocab_size: int,
    prompt: Sequence[int] = (0, 1, 2),
    eos: Sequence[int] = (),
    max_model_len: int = 10**6,
) -> SamplingState:
    request = GenerationRequest("r", tuple(prompt), params)
    return SamplingState(request, eos, vocab_size, max_model_len)


def edited_row(row: Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> Tensor:
    """Penalties, biases, bad words, min_tokens and top_n_sigma as the field defines them, token by
    token. Stop tokens are those of ``params``."""
    values = row.float().clone()
    text = prompt + output
    one = torch.tensor(1.0)
    for token_id in range(len(values)):
        value = values[token_id]
        if token_id in text and params.repetition_penalty != 1:
            penalty = one * params.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        if token_id in output:
            value = value - one * params.frequency_penalty * output.count(token_id)
            value = value - one * params.presence_penalty
        if token_id in params.logit_bias:
            value = value + one * params.logit_bias[token_id]
        values[token_id] = value
    for word in params.bad_words_token_ids:
        if text[len(text) - len(word) + 1 :] == list(word[:-1]):
            values[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        values[list(params.stop_token_ids)] = -math.inf
    num_deviations = params.further.get("top_n_sigma", 0)
    possible = [each for each in values.tolist() if each > -math.inf]
    if num_deviations and possible:
        least = max(possible) - num_deviations * statistics.pstdev(possible)
        values[values < least] = -math.inf
    return values


def survivors(row: Tensor, params: SamplingParams) -> list[int]:
    """Token ids that top-k, then top-p, then min-p keep, by sorting."""
    values = row.tolist()
    order = sorted(range(len(values)), key=lambda v: -values[v])
    kept = [v for v in order if values[v] > -math.inf]
    if params.top_k:
        least = values[order[min(params.top_k, len(order)) - 1]]
        kept = [v for v in kept if values[v] >= least]
    weights = {v: math.exp((values[v] - values[kept[0]]) / params.temperature) for v in kept}
    if params.top_p < 1:
        total, summed = math.fsum(weights.values()), 0.0
        above: dict[float, float] = {}
        for v in kept:
            above.setdefault(values[v], summed)  # the mass of strictly larger logits
            summed += weights[v]
        kept = [v for v in kept if above[values[v]] < params.top_p * total]
    return [v for v in kept if weights[v] >= params.min_p]


def truncated_probs(row: Tensor, params: SamplingParams) -> list[float]:
    """The distribution that sampling from the row must follow."""
    values, kept = row.tolist(), set(survivors(row, params))
    best = max(values)
    weights = [
        math.exp((value - best) / params.temperature) if v in kept else 0.0
        for v, value in enumerate(values)
    ]
    return [weight / math.fsum(weights) for weight in weights]


def expected_token(row: Tensor, params: SamplingParams, key: int, position: int) -> int:
    """Returns the token that an edited row must give, by looking at every one."""
    values = row.tolist()
    if params.temperature == 0:
        return min(range(len(values)), key=lambda v: (-values[v], v))
    scores = {
        v: values[v] / params.temperature + gumbel_scalar(key, position, v)
        for v in survivors(row, params)
    }
    return min(scores, key=lambda v: (-scores[v], v))


def random_row(rng: random.Random, vocab_size: int) -> Tensor:
    """Flat or peaked, with ties, with impossible tokens; one token at least is possible."""
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    row = torch.randn(vocab_size, generator=generator) * rng.choice([0.0, 0.3, 2.0, 8.0])
    if rng.random() < 0.4:
        row = (row * 2).round() / 2
    if rng.random() < 0.4:
        mask = torch.rand(vocab_size, generator=generator) < rng.choice([0.1, 0.9])
        mask[rng.randrange(vocab_size)] = False
        row = row.masked_fill(mask, float("-inf"))
    return row


def random_truncation(rng: random.Random, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.05, 0.7, 1.0, 1.3, 5.0]),
        top_k=rng.choice([0, 0, 1, 3, 50, vocab_size, 2 * vocab_size]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.9, 0.5, 0.01]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
        seed=rng.randrange(2**64),
    )


def random_tree(rng: random.Random, vocab_size: int, max_nodes: int) -> DraftTree:
    token_ids: list[int] = []
    parents: list[int] = []
    for _ in range(rng.randrange(max_nodes + 1)):
        pair = (rng.randrange(vocab_size), rng.choice([ROOT, *range(len(parents))]))
        if pair not in zip(token_ids, parents, strict=True):
            token_ids.append(pair[0])
            parents.append(pair[1])
    return DraftTree(token_ids, parents, [0] * len(parents))


class ToyModel:
    """A language model whose logits depend on the last token: ``table[last]``."""

    def __init__(self, vocab_size: int, seed: int, scale: float = 2.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(vocab_size, vocab_size, generator=generator) * scale
        self.vocab_size = vocab_size

    def logits(self, text: Sequence[int], tree: DraftTree) -> Tensor:
        """Rows of the anchor and the nodes: ``[1 + num_nodes, vocab_size]``."""
        return self.table[[text[-1], *tree.token_ids]]

    def likely_tree(self, rng: random.Random, last: int, max_nodes: int) -> DraftTree:
        """A random tree that often guesses right: children come from the model's best four."""
        token_ids: list[int] = []
        parents: list[int] = []
        best = self.table.topk(min(4, self.vocab_size)).indices.tolist()
        for _ in range(rng.randrange(max_nodes + 1)):
            parent = rng.choice([ROOT, *range(len(parents))])
            token_id = rng.choice(best[last if parent == ROOT else token_ids[parent]])
            if (token_id, parent) not in zip(token_ids, parents, strict=True):
                token_ids.append(token_id)
                parents.append(parent)
        return DraftTree(token_ids, parents, [0] * len(parents))

    def step(self, state: SamplingState, text: list[int], tree: DraftTree = EMPTY) -> Outcome:
        """One step of one request; the emitted tokens go to ``text`` and ``state``."""
        groups = [RowGroup(state, 0, tree)]
        (outcome,) = verify_all(groups, sample_tokens(self.logits(text, tree), groups))
        state.append(outcome.emitted_token_ids)
        text += outcome.emitted_token_ids
        return outcome
