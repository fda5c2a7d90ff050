"""Drafts yield before requests do."""

from __future__ import annotations

import pytest

from engine.request.errors import QueueFullError
from engine.request.params import SamplingParams
from engine.request.stats import SpeculativeStats
from worlds.engine_harness import Driver, drafting, request
from worlds.gated_engine import Engine

MAX_RUNNING, MAX_WAITING, SHED_QUEUE = 2, 6, 3


def test_with_a_full_queue_no_draft_row_is_granted_before_a_request_is_refused() -> None:
    """From half of the queue to the refusal nobody drafts, and once fewer wait everybody does again."""
    engine = Engine(
        max_num_open=MAX_RUNNING + MAX_WAITING,
        max_num_seqs=MAX_RUNNING,
        shed="unpaid",
        shed_queue=SHED_QUEUE,
    )
    driver = Driver(engine.core)
    seen: dict[int, SpeculativeStats] = {}

    def step() -> None:
        driver.step()
        stats = driver.stats[-1]
        account = stats.by_drafter.get("ngram", SpeculativeStats())
        seen[stats.num_waiting] = seen.get(stats.num_waiting, SpeculativeStats()) + account

    params = SamplingParams(max_tokens=24, temperature=0.0)
    asking = [
        request(f"r{index}", [1, 2, 3] * 4, params, drafting("ngram", num_tokens=4))
        for index in range(MAX_RUNNING + MAX_WAITING + 1)
    ]
    *admitted, refused = asking
    for each in admitted:
        engine.runtime.admit(each)
        driver.submit(each)
        step()
    with pytest.raises(QueueFullError):
        engine.runtime.admit(refused)
    while engine.core.has_work:
        step()
    assert len(driver.finishes) == len(admitted)
    for num_waiting, account in seen.items():
        if num_waiting >= SHED_QUEUE:
            assert account.num_draft_tokens == 0
            # Nobody drafts for its last token.
            assert account.disabled["shed"] >= account.num_steps - MAX_RUNNING > 0
        else:
            assert account.disabled["shed"] == 0
    assert {MAX_WAITING, SHED_QUEUE} < seen.keys()
    assert seen[0].num_draft_tokens
