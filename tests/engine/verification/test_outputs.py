"""Several requests read off a forward at once what each would read alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from drafters.tree import chain
from engine.batch import NORMED, RequestRows, build_batch
from engine.request.outcome import Outcome
from engine.request.params import GenerationRequest, SamplingParams
from engine.request.stats import StepClock
from engine.sampling.state import SamplingState, rows_of
from engine.schedule.request import Request, ScheduledRequest
from engine.transfer import Readback, read_now
from engine.verification.verify import begin_logprobs, begin_reading, begin_top_rows
from worlds.device_world import no_host
from worlds.sampled_rows import emitted_logprobs, top_probs, top_tokens, verify_step

VOCAB = 50
Way = Callable[[], AbstractContextManager[None]]
WAYS = pytest.mark.parametrize("way", [nullcontext, no_host], ids=["host", "device"])


def scheduled(
    name: str, num_nodes: int, sampling: SamplingParams, **wants: object
) -> ScheduledRequest:
    """A request that knows four tokens, all in this step, and of whose draft one node was accepted."""
    params = GenerationRequest(name, (1, 2, 3, 4), sampling)
    request = Request(params, SamplingState(params, (), VOCAB, 100))
    found = ScheduledRequest(request, 4, draft=chain([5, 6, 7][:num_nodes]), **wants)  # type: ignore[arg-type]
    path = (0, 1)[: 1 + num_nodes]
    rows = tuple(range(5, 6 + num_nodes))
    found.outcome = Outcome(rows, path, rows[: len(path)], len(path) - 1)
    num_logits = 4 + num_nodes if request.wants_prompt_logprobs else 1 + num_nodes
    token_ids = [1, 2, 3, 4, *found.draft.token_ids]
    found.rows = RequestRows(token_ids, 4, 0, found.draft.parents, [0, 1], num_logits)
    return found


@pytest.fixture
def parts() -> list[ScheduledRequest]:
    return several_parts(temperature=1.0)


def several_parts(temperature: float, with_probs: bool = True) -> list[ScheduledRequest]:
    plain = SamplingParams(temperature=temperature)
    asked = replace(plain, logprobs=2)
    probs = {"wants_top_probs": with_probs}
    found = [
        scheduled("tokens", 2, asked, num_top_tokens=3),
        scheduled("nothing", 1, plain),
        scheduled(
            "probs",
            3,
            replace(plain, prompt_logprobs=4),
            num_top_tokens=5,
            hidden_layers=(3,),
            **probs,
        ),
        scheduled(
            "more",
            0,
            replace(asked, logprobs=0),
            num_top_tokens=9,
            hidden_layers=(NORMED, 1),
            **probs,
        ),
    ]
    build_batch([each.rows for each in found], 4)
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_rows", [13, 20, 100])
def test_top_rows_are_those_of_each_request_alone(num_rows: int, temperature: float) -> None:
    """Where rows are greedy and many are asked for, the likeliest of all come with them."""
    parts, logits = several_parts(temperature, with_probs=False), torch.randn(num_rows, VOCAB)
    likeliest: list[Any] = []

    def begin(readback: Readback) -> Callable[[], None]:
        finish, tokens = begin_top_rows(parts, logits, readback)
        likeliest.append(tokens)
        return finish

    read_now(begin)
    if temperature == 0.0 and num_rows < 100:
        assert likeliest[0].tolist() == logits.argmax(-1).tolist()
    else:
        assert likeliest == [None]
    for each, k in ((parts[0], 3), (parts[2], 5), (parts[3], 9)):
        assert each.top_token_ids == top_tokens(logits, rows_of(each), k)


def test_top_rows_with_probabilities_are_those_of_each_request_alone(
    parts: list[ScheduledRequest],
) -> None:
    logits = torch.randn(13, VOCAB)
    read_now(lambda readback: begin_top_rows(parts, logits, readback)[0])
    assert parts[0].top_token_ids == top_tokens(logits, rows_of(parts[0]), 3)
    assert parts[0].top_probs is None
    assert (parts[1].top_token_ids, parts[1].top_probs) == (None, None)
    for each, k in ((parts[2], 5), (parts[3], 9)):
        assert (each.top_token_ids, each.top_probs) == top_probs(logits, rows_of(each), k)


@WAYS
def test_logprobs_go_to_those_who_asked(parts: list[ScheduledRequest], way: Way) -> None:
    logits = torch.randn(20, VOCAB)
    chosen = torch.full((20,), -1)
    for each in parts:
        assert each.outcome is not None
        chosen[[*rows_of(each)]] = torch.tensor(each.outcome.row_token_ids)
    with way():
        read_now(lambda readback: begin_logprobs(parts, logits, chosen, readback))
        told = [each.logprobs for each in parts]
        assert told[1] is None
        assert told[2] is None
        first = parts[0].anchor_logit
        assert list(told[0] or ()) == emitted_logprobs(logits, [first, first + 1], [5, 6], 2)
        assert list(told[3] or ()) == emitted_logprobs(logits, [parts[3].anchor_logit], [5], 0)
        start = parts[2].rows.first_logit
        prompt = parts[2].request.prompt_logprobs
        assert sorted(prompt) == [1, 2, 3]
        expected = emitted_logprobs(logits, range(start, start + 3), [2, 3, 4], 4)
        assert [prompt[at] for at in (1, 2, 3)] == expected
        assert parts[0].request.prompt_logprobs == {}


@WAYS
def test_a_step_is_read_at_once(parts: list[ScheduledRequest], way: Way) -> None:
    """It keeps what the readings of its own kinds find."""
    logits = torch.randn(20, VOCAB)
    for each in parts:
        each.outcome = None
    with way():
        begin_reading(parts, logits, StepClock()).finish()
        expected = verify_step(logits, parts)
        assert [each.outcome for each in parts] == expected
        emitted = expected[0].emitted_token_ids
        rows = [parts[0].anchor_logit + row for row in expected[0].path]
        assert list(parts[0].logprobs or ()) == emitted_logprobs(logits, rows, emitted, 2)
        assert parts[0].top_token_ids == top_tokens(logits, rows_of(parts[0]), 3)
