"""``stand`` draws, and rejection verifies, without changing the law of the text.

Sampled as in ``test_verification.py``, whose oracle and chi-squared test this borrows. Requests share
their table, so that most are drafted from what others were told.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.request.params import SpeculativeParams, VerificationName
from worlds.engine_harness import DictatedCost, Driver, Setup, drafting, request
from worlds.verified_streams import ALPHA, CASES, NUM_REQUESTS, PROMPT, TARGET, p_values

pytestmark = pytest.mark.slow

CHAIN = drafting("stand", num_tokens=2, share=True)
STAND: dict[str, tuple[VerificationName, SpeculativeParams]] = {
    "chain": ("rejection", CHAIN),
    "block": ("block", CHAIN),
    "tree": ("rejection", drafting("stand", num_tokens=8, width=3, share=True)),
    "goodput_tree": ("rejection", drafting("stand", "goodput", width=3, share=True)),
}


@pytest.mark.parametrize("name", STAND)
def test_texts_follow_the_target(name: str) -> None:
    verification, speculation = STAND[name]
    sampling = CASES[name][2]
    setup = Setup(
        num_blocks=512,
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        cost=DictatedCost(row_seconds=1e-4),
        prefix_cache=False,
    )
    driver = Driver(TARGET.core(setup)).run(
        *(
            request(
                f"r{seed}",
                PROMPT,
                replace(sampling, seed=seed, max_tokens=3),
                replace(speculation, verification=verification),
            )
            for seed in range(NUM_REQUESTS)
        )
    )
    assert min(p_values(name, driver)) > ALPHA
    num_accepted = sum(sum(flags) for flags in driver.drafted.values())
    assert num_accepted > NUM_REQUESTS / 2
