"""What is read off a forward for several requests at once is what each would read alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch

from drafters.tree import chain
from engine.batch import RequestRows, build_batch
from engine.outputs import (
    Part,
    begin_logprobs,
    begin_top_rows,
    hidden_rows,
    observations,
    read_step,
)
from engine.params import GenerationRequest, SamplingParams
from engine.sampling.logprobs import emitted_logprobs, top_probs, top_tokens
from engine.sampling.state import RowGroup, SamplingState
from engine.schedule.request import Draft, Request, ScheduledRequest, Wants
from engine.stats import RequestStats, StepClock
from engine.transfer import read_now
from engine.verification.match import Outcome
from engine.verification.verify import verify_step
from worlds.device_world import no_host

VOCAB = 50
Way = Callable[[], AbstractContextManager[None]]
WAYS = pytest.mark.parametrize("way", [nullcontext, no_host], ids=["host", "device"])


def part(name: str, num_nodes: int, wants: Wants, sampling: SamplingParams) -> Part:
    """A request that knows four tokens, all in this step, and of whose draft one node was accepted."""
    params = GenerationRequest(name, (1, 2, 3, 4), sampling)
    request = Request(params, SamplingState(params, (), VOCAB, 100), RequestStats())
    tree = chain([5, 6, 7][:num_nodes])
    path = (0, 1)[: 1 + num_nodes]
    rows = tuple(range(5, 6 + num_nodes))
    scheduled = ScheduledRequest(request, 4, Draft(tree, tree), wants)
    scheduled.outcome = Outcome(rows, path, rows[: len(path)], len(path) - 1)
    num_logits = 4 + num_nodes if request.wants_prompt_logprobs else 1 + num_nodes
    return Part(
        scheduled,
        RequestRows([1, 2, 3, 4, *tree.token_ids], 4, 0, tree.parents, [0, 1], num_logits),
    )


@pytest.fixture
def parts() -> list[Part]:
    plain = SamplingParams()
    asked = replace(plain, logprobs=2)
    found = [
        part("tokens", 2, Wants(num_top_tokens=3), asked),
        part("nothing", 1, Wants(), plain),
        part("probs", 3, Wants(True, 5, True), replace(plain, prompt_logprobs=4)),
        part("more", 0, Wants(True, 9, True), replace(asked, logprobs=0)),
    ]
    build_batch([each.rows for each in found], 4)
    return found


def test_top_rows_are_those_of_each_request_alone(parts: list[Part]) -> None:
    logits = torch.randn(20, VOCAB)
    read_now(lambda readback: begin_top_rows(parts, logits, readback))
    seen = [observation for _, observation in observations(parts)]
    own = [
        range(each.anchor_logit, each.anchor_logit + 1 + len(each.rows.parents)) for each in parts
    ]
    assert seen[0].top_token_ids == top_tokens(logits, own[0], 3)
    assert seen[0].top_probs is None
    assert (seen[1].top_token_ids, seen[1].top_probs) == (None, None)
    for index, k in ((2, 5), (3, 9)):
        assert (seen[index].top_token_ids, seen[index].top_probs) == top_probs(
            logits, own[index], k
        )


def test_hidden_rows_are_known_and_accepted_ones(parts: list[Part]) -> None:
    hidden = torch.arange(22.0)[:, None].expand(22, 3)
    found = hidden_rows(parts, hidden)
    assert [each.request_id for each in found] == ["probs", "more"]
    for each, own in zip(found, (parts[2], parts[3]), strict=True):
        first = own.rows.first_row
        kept = [*range(first, first + 4 + len(own.scheduled.accepted_rows))]
        assert each.hidden[:, 0].tolist() == kept
        assert each.hidden.untyped_storage().nbytes() == 4 * 3 * len(kept)
    assert hidden_rows(parts, None) == []
    assert hidden_rows(parts[:2], hidden) == []


@WAYS
def test_logprobs_go_to_those_who_asked(parts: list[Part], way: Way) -> None:
    logits = torch.randn(20, VOCAB)
    chosen = torch.full((20,), -1)
    for each in parts:
        own = each.scheduled.outcome
        assert own is not None
        first = each.anchor_logit
        chosen[first : first + len(own.row_token_ids)] = torch.tensor(own.row_token_ids)
    with way():
        read_now(lambda readback: begin_logprobs(parts, logits, chosen, readback))
        told = [each.scheduled.logprobs for each in parts]
        assert told[1] is None
        assert told[2] is None
        first = parts[0].anchor_logit
        assert list(told[0] or ()) == emitted_logprobs(logits, [first, first + 1], [5, 6], 2)
        assert list(told[3] or ()) == emitted_logprobs(logits, [parts[3].anchor_logit], [5], 0)
        start = parts[2].rows.first_logit
        prompt = parts[2].scheduled.request.prompt_logprobs
        assert sorted(prompt) == [1, 2, 3]
        expected = emitted_logprobs(logits, range(start, start + 3), [2, 3, 4], 4)
        assert [prompt[at] for at in (1, 2, 3)] == expected
        assert parts[0].scheduled.request.prompt_logprobs == {}


@WAYS
def test_a_step_is_read_at_once(parts: list[Part], way: Way) -> None:
    """What it keeps is what the readings of its own kinds find."""
    logits = torch.randn(20, VOCAB)
    for each in parts:
        each.scheduled.outcome = None
    with way():
        read_step(parts, logits, StepClock())
        groups = [
            RowGroup(each.scheduled.request.sampling, each.anchor_logit, each.scheduled.draft.tree)
            for each in parts
        ]
        expected = verify_step(logits, groups)
        assert [each.scheduled.outcome for each in parts] == expected
        emitted = expected[0].emitted_token_ids
        rows = [parts[0].anchor_logit + row for row in expected[0].path]
        assert list(parts[0].scheduled.logprobs or ()) == emitted_logprobs(logits, rows, emitted, 2)
        assert parts[0].scheduled.top.token_ids == top_tokens(
            logits, range(parts[0].anchor_logit, parts[0].anchor_logit + 3), 3
        )
