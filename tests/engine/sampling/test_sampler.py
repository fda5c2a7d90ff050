"""Row-wise processing against a token-by-token twin, along every path of a tree and in any company."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from drafters.tree import chain
from engine.request.errors import RequestError
from engine.request.params import SamplingParams
from engine.sampling.sampler import target_probs
from worlds.sampled_rows import RowGroup, sample_tokens
from worlds.sampling_oracle import (
    edited_row,
    expected_token,
    new_state,
    random_tree,
    truncated_probs,
)

VOCAB_SIZE = 24


def random_params(rng: random.Random) -> SamplingParams:
    """Any subset of what there is to ask for."""
    asked = SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.3]),
        top_k=5,
        top_p=0.8,
        min_p=0.05,
        logit_bias={rng.randrange(VOCAB_SIZE): rng.uniform(-9, 9), 3: -100.0},
        presence_penalty=rng.uniform(-2, 2),
        frequency_penalty=rng.uniform(-2, 2),
        repetition_penalty=rng.choice([0.7, 1.2, 2.0]),
        min_tokens=rng.randrange(9),
        bad_words_token_ids=tuple(
            tuple(rng.randrange(4) for _ in range(rng.choice([1, 2, 2, 3]))) for _ in range(4)
        ),
        stop_token_ids=(rng.randrange(VOCAB_SIZE), 7),
        seed=rng.randrange(2**32),
        further={"top_n_sigma": rng.choice([0.5, 1.5])},
    )
    off = SamplingParams()
    names = ["top_k", "top_p", "min_p", "logit_bias", "presence_penalty", "frequency_penalty"]
    names += ["repetition_penalty", "min_tokens", "bad_words_token_ids", "further"]
    return replace(asked, **{each: getattr(off, each) for each in names if rng.random() < 0.5})


class Case:
    """A request somewhere in its life, a tree of drafts, and logits for its rows."""

    def __init__(self, rng: random.Random, dtype: torch.dtype = torch.float32) -> None:
        self.params = random_params(rng)
        # Few different tokens, so that penalties and bad words have something to find.
        self.prompt = [rng.randrange(6) for _ in range(rng.randrange(1, 8))]
        self.output = [rng.randrange(6) for _ in range(rng.randrange(8))]
        self.tree = random_tree(rng, 4, 8)
        self.state = new_state(self.params, VOCAB_SIZE, self.prompt)
        half = rng.randrange(len(self.output) + 1)
        self.state.append(self.output[:half])
        self.state.append(self.output[half:])
        generator = torch.Generator().manual_seed(rng.randrange(2**32))
        logits = torch.randn(1 + len(self.tree), VOCAB_SIZE, generator=generator) * 3
        self.logits = logits.to(dtype)

    def edited(self) -> list[Tensor]:
        texts = [[*self.output, *path] for path in self.tree.paths()]
        rows = zip(self.logits, texts, strict=True)
        return [edited_row(row, self.params, self.prompt, text) for row, text in rows]

    def expected(self) -> list[int]:
        first, tokens = len(self.prompt) + len(self.output), []
        for values, path in zip(self.edited(), self.tree.paths(), strict=True):
            position = first + len(path)
            tokens.append(expected_token(values, self.params, self.state.key, position))
        return tokens


def lay_out(cases: list[Case]) -> tuple[Tensor, list[RowGroup]]:
    groups, first = [], 0
    for case in cases:
        groups.append(RowGroup(case.state, first, case.tree))
        first += len(case.logits)
    return torch.cat([case.logits for case in cases]), groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(12))
def test_every_row_gets_what_its_own_text_and_parameters_give(
    seed: int, dtype: torch.dtype
) -> None:
    rng = random.Random(seed)
    cases = [Case(rng, dtype) for _ in range(8)]
    logits, groups = lay_out(cases)
    before = logits.clone()
    assert sample_tokens(logits, groups) == [t for case in cases for t in case.expected()]
    assert torch.equal(logits, before)
    sampled = [case for case in cases if case.params.temperature]
    logits, groups = lay_out(sampled)
    edited = [(row, case.params) for case in sampled for row in case.edited()]
    for probs, row in zip(target_probs(logits, groups).tolist(), edited, strict=True):
        assert probs == pytest.approx(truncated_probs(*row), rel=1e-4, abs=1e-9)


def test_rows_of_no_group_are_left_out() -> None:
    logits = torch.eye(6)
    state = new_state(SamplingParams(temperature=0), 6)
    groups = [RowGroup(state, 4), RowGroup(state, 1, chain([3]))]
    assert sample_tokens(logits, groups) == [-1, 1, 2, -1, 4, -1]


@pytest.mark.parametrize(("ignore_eos", "first"), [(False, 3), (True, 4)])
def test_what_ends_a_text_waits_for_min_tokens_along_the_path(ignore_eos: bool, first: int) -> None:
    """EOS, token 4, as well, unless it is an ordinary token."""
    params = SamplingParams(temperature=0, min_tokens=2, ignore_eos=ignore_eos, stop_token_ids=(5,))
    logits = torch.arange(6.0).repeat(3, 1)
    groups = [RowGroup(new_state(params, 6, eos=(4,)), 0, chain([1, 1]))]
    assert sample_tokens(logits, groups) == [first, first, 5]


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(logit_bias={10: 1.0}), "logit_bias"),
        (SamplingParams(bad_words_token_ids=((1, -1),)), "bad_words"),
        (SamplingParams(stop_token_ids=(10,)), "stop_token_ids"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(params: SamplingParams, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        new_state(params, 10)
    assert caught.value.param == name
