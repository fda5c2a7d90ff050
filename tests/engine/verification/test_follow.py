"""Where the rows of a step lie, and what they draft, of which the host has read nothing yet."""

from __future__ import annotations

import torch

from drafters.tree import chain
from engine.batch import InputBatch, RequestRows, build_batch
from engine.request.params import SamplingParams
from engine.sampling.state import SamplingState
from engine.schedule.request import Request, ScheduledRequest
from engine.verification.follow import Follower, warm_up
from worlds.device_world import no_host
from worlds.engine_harness import TINY_VOCAB, request
from worlds.interpreted import DEVICE

TABLE = [3, 0, 2, 5, 1, 4]


def started(prompt: list[int]) -> Request:
    params = request("r", prompt, SamplingParams(temperature=0.0))
    found = Request(params, SamplingState(params, (), TINY_VOCAB, 256))
    found.num_computed_tokens = len(prompt) - 1
    return found


def planned(one: Request, draft: list[int], num_unseen: int = 0) -> ScheduledRequest:
    one.sampling.num_unseen = num_unseen
    each = ScheduledRequest(one, 1)
    each.draft = chain(draft)
    ids = [*each.known_token_ids, *draft]
    each.rows = RequestRows(
        ids, 1, each.base, each.draft.parents, TABLE, len(ids), num_unsure=each.num_unsure
    )
    return each


def batch_of(each: ScheduledRequest) -> InputBatch:
    return build_batch([each.rows], 4)


def followed(
    follower: Follower, before: ScheduledRequest, chosen: list[int], num_nodes: int
) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """Returns tokens, what moved, and what was copied."""
    batch_of(before)
    tokens = torch.tensor(chosen)
    after = planned(before.request, [0] * num_nodes, 1 + len(before.draft))
    after.copies = (1, 4)
    batch = batch_of(after)
    copied = follower.follow([before], [after], batch, tokens, None)
    assert copied is not None
    assert batch.chosen is not None
    assert batch.moved is not None
    return batch.chosen.tolist(), batch.moved.tolist(), copied.tolist()


def test_rows_begin_after_what_was_accepted() -> None:
    before = planned(started([7, 8, 9, 7]), [8, 1, 1])
    tokens, moved, copied = followed(Follower(4), before, [8, 9, 5, 5], 2)
    # 7 8 9 7 8 9: the text's end occurred before, and 7 8 followed.
    assert tokens == [9, 7, 8]
    assert moved == [[5, 6, 7], [1, 2, 3], [2, 2, 2]]
    assert copied == [[-1, 7, 8], [3, 3, 3]]


def test_texts_take_in_what_the_host_has_read_since() -> None:
    follower, one = Follower(4), started([7, 8, 9, 7])
    followed(follower, planned(one, []), [8], 1)
    one.sampling.append([8, 30, 31])
    one.token_ids += [8, 30, 31]
    one.num_computed_tokens = 6
    tokens, _, copied = followed(follower, planned(one, []), [30], 3)
    assert tokens == [30, 31, 30, 31]
    assert copied[1][0] == 1


def test_places_of_those_that_are_over_serve_others() -> None:
    follower = Follower(4)
    for _ in range(3):
        one = started([7, 8, 9, 7])
        assert followed(follower, planned(one, []), [8], 1)[0] == [8, 9]
        assert follower._places == {one: 0}
        follower.forget(one)
        follower.forget(one)


def test_rows_without_drafts_need_no_text() -> None:
    follower, before = Follower(4), planned(started([7, 8, 9, 7]), [1, 1])
    assert followed(follower, before, [1, 1, 6], 0)[:2] == ([6], [[6], [2], [0]])
    assert follower._places == {}


def test_what_copies_is_compiled_before_there_are_requests() -> None:
    with no_host():
        warm_up(DEVICE)
