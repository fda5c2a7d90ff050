from __future__ import annotations

import math
import random

import pytest
import torch

from worlds.sampled_rows import emitted_logprobs, top_tokens


def ranked(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda v: (-row[v], v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_log_softmax_of_the_named_rows(dtype: torch.dtype) -> None:
    logits = (torch.randn(6, 300, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    rows, tokens = [4, 0, 5], [17, 299, 0]
    for row, token, got in zip(
        rows, tokens, emitted_logprobs(logits, rows, tokens, 3), strict=True
    ):
        values = logits[row].double().tolist()
        log_total = math.log(math.fsum(math.exp(v) for v in values))
        assert got.token_id == token
        assert got.logprob == pytest.approx(values[token] - log_total, abs=1e-5)
        assert [t for t, _ in got.top] == ranked(values)[:3]
        for top_token, logprob in got.top:
            assert logprob == pytest.approx(values[top_token] - log_total, abs=1e-5)


def test_chosen_token_has_the_same_logprob_among_the_top() -> None:
    logits = torch.randn(1, 50)
    best = int(logits.argmax())
    (got,) = emitted_logprobs(logits, [0], [best], 1)
    assert got.top == ((best, got.logprob),)


def test_bits_do_not_depend_on_the_company() -> None:
    rng = random.Random(0)
    for vocab_size in (37, 4099):
        logits = torch.randn(41, vocab_size, generator=torch.Generator().manual_seed(2)) * 5
        together = emitted_logprobs(logits, range(41), [3] * 41, 5)
        for size in (1, 2, 17, 40):
            picked = rng.sample(range(41), size)
            assert emitted_logprobs(logits, picked, [3] * size, 5) == [together[i] for i in picked]
            alone = emitted_logprobs(logits[picked[0]][None].clone(), [0], [3], 5)
            assert alone == [together[picked[0]]]


def test_no_alternatives_and_no_rows() -> None:
    logits = torch.zeros(2, 4)
    assert [x.top for x in emitted_logprobs(logits, [0, 1], [0, 3], 0)] == [(), ()]
    assert emitted_logprobs(logits, [], [], 5) == []
    assert top_tokens(logits, [], 5) == []
    assert top_tokens(logits, [1], 0) == [[]]


def test_a_small_vocabulary_bounds_the_alternatives() -> None:
    (got,) = emitted_logprobs(torch.tensor([[0.0, 1.0]]), [0], [0], 20)
    assert [t for t, _ in got.top] == [1, 0]
    assert top_tokens(torch.tensor([[0.0, 1.0]]), [0], 20) == [[1, 0]]


def test_ties_go_to_the_lowest_ids_even_at_the_border() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = (torch.randn(20, 700, generator=generator) * 2).round()
    for k in (1, 5, 50, 700):
        assert top_tokens(logits, range(20), k) == [ranked(row)[:k] for row in logits.tolist()]


def test_impossible_tokens_are_left_out() -> None:
    logits = torch.tensor([[float("-inf"), 2.0, float("-inf"), 3.0], [1.0, 2.0, 3.0, 4.0]])
    assert top_tokens(logits, [0, 1], 3) == [[3, 1], [3, 2, 1]]
