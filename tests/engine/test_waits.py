"""How often a step makes the host wait for its device, counted on a CPU that passes for one.

Everything that a step reads is read once, whatever its requests ask for; and what is written that way is
what the host's own kernels write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from drafters.registry import build_drafters
from drafters.tree import DraftTree
from engine.request.params import PLAIN, GenerationRequest, SamplingParams, VerificationName
from engine.schedule.request import Plan
from engine.transfer import Readback
from worlds.device_world import Looks, WatchedDriver
from worlds.engine_harness import Driver, Setup, TinyTarget, circle_prompt, drafting, request
from worlds.every_drafter import DRAFTERS, EveryDrafterTarget
from worlds.grammar_world import EOS, json_grammar, random_schema, tiny_compiler

GREEDY = SamplingParams(max_tokens=16, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=16, temperature=0.8, seed=5)
SETUP = Setup(
    num_blocks=320,
    max_num_seqs=32,
    max_num_batched_tokens=256,
    prefill_chunk=20,
    eos_token_ids=(EOS,),
    constrain=tiny_compiler().constraint,
)
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "truncated": replace(SAMPLED, top_k=9, top_p=0.8, min_p=0.02),
    "penalised": replace(
        GREEDY, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2
    ),
    "biased": replace(
        SAMPLED, logit_bias={13: -100.0, 46: 2.0}, bad_words_token_ids=((9,), (10, 11))
    ),
    "held": replace(
        SAMPLED, min_tokens=9, further={"top_n_sigma": 1.5, "allowed_token_ids": tuple(range(40))}
    ),
    "scored": replace(SAMPLED, logprobs=3, top_p=0.9, logprob_token_ids=(5, 40)),
    "prompt scored": replace(GREEDY, logprobs=0, prompt_logprobs=2),
    "constrained": replace(SAMPLED, max_tokens=60, grammar=json_grammar(random_schema(3))),
}
DRAFTINGS = {
    "none": PLAIN,
    "chain": drafting("ngram", ngram_min=1),
    "tree": drafting("nasd", num_tokens=12, width=4, filler_top_k=3),
    "probabilities": drafting("stand", num_tokens=12, width=3),
    "top tokens": drafting("recycling", num_tokens=12, width=3),
    "many": drafting("auto", num_tokens=6),
}


def every_kind() -> list[GenerationRequest]:
    """All samplings with all draftings."""
    kinds = [(sampling, way) for sampling in SAMPLINGS for way in DRAFTINGS]
    return [
        request(f"{sampling}, {way}", circle_prompt(index % 4), SAMPLINGS[sampling], DRAFTINGS[way])
        for index, (sampling, way) in enumerate(kinds)
    ]


def assert_equal_texts(watched: Driver, usual: Driver) -> None:
    assert watched.token_ids == usual.token_ids
    for name, logprobs in usual.logprobs.items():
        found = watched.logprobs[name]
        assert [each.token_id for each in found] == [each.token_id for each in logprobs]
        assert [each.logprob for each in found] == pytest.approx(
            [each.logprob for each in logprobs], abs=1e-5
        )
        named = [[[token for token, _ in each.named] for each in run] for run in (found, logprobs)]
        assert named[0] == named[1]
        tops = [[[token for token, _ in each.top] for each in run] for run in (found, logprobs)]
        assert tops[0] == tops[1]


def watched(target: TinyTarget, *requests: GenerationRequest) -> WatchedDriver:
    driver = WatchedDriver(target.core(SETUP))
    driver.run(*requests)
    return driver


def test_a_step_waits_once(tiny_target: TinyTarget) -> None:
    requests = every_kind()
    driver = watched(tiny_target, *requests)
    assert driver.looks.looks == {}
    assert set(driver.waits) <= {0, 1}
    assert 1 in driver.waits
    usual = Driver(tiny_target.core(SETUP)).run(*requests)
    assert_equal_texts(driver, usual)
    accounts = [finish.speculative for finish in driver.finishes.values()]
    assert any(account.num_accepted_tokens for account in accounts)
    assert any(account.num_accepted_tokens < account.num_draft_tokens for account in accounts)


def test_steps_that_run_ahead_read_nothing_more(tiny_target: TinyTarget) -> None:
    requests = [
        request(name, circle_prompt(index), SAMPLINGS[name])
        for index, name in enumerate(("greedy", "sampled", "truncated"))
    ]
    driver = WatchedDriver(tiny_target.core(SETUP.but(runs_ahead=True)))
    driver.run(*requests)
    assert driver.looks.looks == {}
    assert set(driver.waits) <= {0, 1}
    assert_equal_texts(driver, Driver(tiny_target.core(SETUP)).run(*requests))


def test_a_step_of_prompts_alone_reads_nothing(tiny_target: TinyTarget) -> None:
    long = request("long", circle_prompt(0) * 3, replace(GREEDY, max_tokens=1))
    driver = watched(tiny_target, long)
    assert driver.waits == [0, 0, 0, 1]


DRAFT_MODELS = [name for name in DRAFTERS if name not in {*build_drafters()}]
AT_ONCE = {"medusa", "p_eagle", "dflash", "dflash_plain"}
"""Those that draft all positions in one forward."""
LEVEL_BY_LEVEL = set(DRAFT_MODELS) - AT_ONCE
SHORT = {name: replace(each, max_tokens=8) for name, each in SAMPLINGS.items()}
NO_LIMIT = {"min_confidence": 0.0}


def drafts_of_models(
    width: int, verification: VerificationName = "match"
) -> list[GenerationRequest]:
    """Returns requests for drafts of every model, of different depths in one batch."""
    return [
        request(
            f"{drafter}, {depth}, {sampling}",
            circle_prompt(depth),
            SHORT[sampling],
            replace(
                drafting(drafter, "fixed", 2 * depth, width, **options),
                tree_strategy="tree",
                tree_width=width,
                tree_depth=depth,
                verification=verification,
            ),
        )
        for drafter in DRAFT_MODELS
        for depth, sampling, options in (
            (2, "greedy", {}),
            (5, "truncated", NO_LIMIT if drafter != "medusa" else {}),
            (6, "sampled", {}),
        )
    ]


class Drafts:
    """Records what a core's drafters propose from now on, by step and request, and how often they
    wait."""

    def __init__(self, driver: Driver) -> None:
        self.steps: list[dict[str, DraftTree]] = []
        self.waits: list[int] = []
        self._looks = driver.looks if isinstance(driver, WatchedDriver) else Looks()
        self._draft = driver.core.speculation.draft
        driver.core.speculation.draft = self._watched  # type: ignore[method-assign]

    def _watched(self, plan: Plan, readback: Readback) -> None:
        before = self._looks.num_waits
        self._draft(plan, readback)
        self.waits.append(self._looks.num_waits - before)
        self.steps.append(
            {each.request.request_id: each.proposal for each in plan.scheduled if each.proposal}
        )


def drafts_on_both(
    target: EveryDrafterTarget, requests: Sequence[GenerationRequest]
) -> tuple[WatchedDriver, Drafts]:
    """On a device, where nothing but the texts and drafts of a host may come out."""
    usual = Driver(target.core(SETUP))
    wanted = Drafts(usual)
    usual.run(*requests)
    driver = WatchedDriver(target.core(SETUP))
    found = Drafts(driver)
    driver.run(*requests)
    assert driver.looks.looks == {}
    assert_equal_texts(driver, usual)
    assert len(found.steps) == len(wanted.steps)
    for mine, theirs in zip(found.steps, wanted.steps, strict=True):
        assert mine.keys() == theirs.keys()
        for name, tree in theirs.items():
            assert_equal_trees(mine[name], tree)
    return driver, found


def assert_equal_trees(mine: DraftTree, tree: DraftTree) -> None:
    assert list(mine.token_ids) == list(tree.token_ids)
    assert list(mine.parents) == list(tree.parents)
    assert list(mine.features) == list(tree.features)
    assert mine.draft_probs.keys() == tree.draft_probs.keys()
    for node, probs in tree.draft_probs.items():
        torch.testing.assert_close(mine.draft_probs[node], probs, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("verification", ["match", "rejection"])
def test_chains_of_all_models_wait_once_together(
    verification: VerificationName, target: EveryDrafterTarget
) -> None:
    driver, drafts = drafts_on_both(target, drafts_of_models(1, verification))
    assert max(drafts.waits) == 1
    if verification == "match":
        assert max(driver.waits) == 2
    lengths = {len(tree) for step in drafts.steps for tree in step.values()}
    assert lengths >= set(range(1, 7))


@pytest.mark.parametrize("verification", ["match", "rejection"])
def test_trees_of_all_models_wait_once_per_level(
    verification: VerificationName, target: EveryDrafterTarget
) -> None:
    _, drafts = drafts_on_both(target, drafts_of_models(3, verification))
    assert max(drafts.waits) > 1
    # Once together, and each later level of the deepest request by itself.
    assert max(drafts.waits) <= 1 + len(LEVEL_BY_LEVEL) * 5
    assert any(not tree.is_chain() for step in drafts.steps for tree in step.values())


def rejecting(verification: str, width: int) -> Sequence[GenerationRequest]:
    wanted = replace(drafting("stand", num_tokens=6, width=width), verification=verification)
    return [
        request(f"{index}", circle_prompt(index), replace(SAMPLED, seed=index), wanted)
        for index in range(3)
    ]


@pytest.mark.parametrize(("verification", "width"), [("rejection", 1), ("block", 1)])
def test_chains_that_are_rejected_wait_twice_more(
    tiny_target: TinyTarget, verification: str, width: int
) -> None:
    """For what a refused draft leaves, and for the last tokens."""
    requests = rejecting(verification, width)
    driver = watched(tiny_target, *requests)
    assert driver.looks.looks == {}
    assert max(driver.waits) == 3
    assert_equal_texts(driver, Driver(tiny_target.core(SETUP)).run(*requests))


def test_trees_that_are_rejected_wait_once_more_for_every_sibling(tiny_target: TinyTarget) -> None:
    requests = rejecting("rejection", 3)
    driver = watched(tiny_target, *requests)
    assert driver.looks.looks == {}
    assert max(driver.waits) > 1
    assert_equal_texts(driver, Driver(tiny_target.core(SETUP)).run(*requests))
