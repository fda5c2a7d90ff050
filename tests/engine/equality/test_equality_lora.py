"""Promise 1 with adapters: requests of three adapters and of the model as it is, in one batch, write what
each writes alone at gamma 0, whoever drafts; and that is what the model with the adapter merged into its
weights writes.

Drafters with models, layers or heads draft as for the model without adapters; what stands is the adapted
target's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from engine.request.params import GenerationRequest, SamplingParams
from worlds.engine_harness import drafting, request, tiny_hybrid, tiny_llama
from worlds.every_drafter import DRAFTERS, EveryDrafterTarget
from worlds.lora_adapters import AdaptedDriver, adapters_of, save_adapter
from worlds.situations import partly_right
from worlds.tiny_models import greedy_text

pytestmark = pytest.mark.slow

USUAL = SamplingParams(20, temperature=0.0, ignore_eos=True)
SAMPLINGS = (USUAL, replace(USUAL, temperature=0.8, top_p=0.9))
NAMES = (None, "one", "other", "third")
_SCALE = 0.4
"""Changes most texts, and leaves the target's circles in some places."""


Make = Callable[[], PreTrainedModel]
Merged = Mapping[str, tuple[Path, PreTrainedModel]]


@pytest.fixture(scope="module", params=[tiny_llama, tiny_hybrid], ids=["llama", "hybrid"])
def make(request: pytest.FixtureRequest) -> Make:
    found: Make = request.param
    return found


@pytest.fixture(scope="module")
def merged(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Merged:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: (root / name, save_adapter(root / name, make(), seed, _SCALE))
        for seed, name in enumerate(NAMES)
        if name is not None
    }


@pytest.fixture(scope="module")
def target(make: Make, tmp_path_factory: pytest.TempPathFactory) -> EveryDrafterTarget:
    return EveryDrafterTarget(tmp_path_factory.mktemp("near"), make)


def driver_of(target: EveryDrafterTarget, merged: Merged, **changes: int) -> AdaptedDriver:
    core, paths = (
        target.core(target.setup.but(**changes)),
        {name: path for name, (path, _) in merged.items()},
    )
    return AdaptedDriver(core, adapters_of(core, paths))


def asked(target: EveryDrafterTarget) -> dict[str, GenerationRequest]:
    """Each adapter's requests, of every sampling; drafts of none."""
    found = {}
    for index, name in enumerate(NAMES):
        for which, sampling in enumerate(SAMPLINGS):
            key = f"{name}-{which}"
            each = request(key, target.prompts[(index + which) % 4], replace(sampling, seed=index))
            found[key] = replace(each, adapter=name)
    return found


@pytest.fixture(scope="module")
def expected(target: EveryDrafterTarget, merged: Merged) -> dict[str, list[int]]:
    """Written alone, each by an engine that has done nothing else."""
    found = {}
    for key, each in asked(target).items():
        found[key] = driver_of(target, merged).run(each).token_ids[key]
    return found


def test_alone_they_write_what_merged_weights_write(
    target: EveryDrafterTarget,
    merged: Merged,
    expected: dict[str, list[int]],
) -> None:
    models = {name: model for name, (_, model) in merged.items()}
    for key, each in asked(target).items():
        if each.sampling.temperature == 0:
            model = target.reference if each.adapter is None else models[each.adapter]
            assert expected[key] == greedy_text(model, each.prompt_token_ids, 20)
    assert len(set(map(tuple, expected.values()))) > len(NAMES)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("width", [1, 3])
def test_in_one_batch_every_drafter_leaves_texts_as_they_are(
    target: EveryDrafterTarget,
    merged: Merged,
    expected: dict[str, list[int]],
    drafter: str,
    width: int,
) -> None:
    driver = driver_of(target, merged)
    for _ in range(2):  # then from the prefix cache, and from what was learned
        driver.run(
            *(
                replace(
                    each,
                    speculative=drafting(drafter, "fixed", 5, width),
                    prediction_token_ids=partly_right(expected[key]),
                )
                for key, each in asked(target).items()
            )
        )
        for key in asked(target):
            assert driver.token_ids[key] == expected[key]
            assert driver.finishes[key].speculative.num_failed_drafts == 0
        driver.finishes.clear()
    if drafter not in ("none", "grammar"):
        assert sum(driver.num_draft_tokens.values()) > 0


def test_preempted_and_in_chunks_texts_stay(
    target: EveryDrafterTarget,
    merged: Merged,
    expected: dict[str, list[int]],
) -> None:
    driver = driver_of(target, merged, num_blocks=14, prefill_chunk=5)
    driver.run(*(replace(each, speculative=drafting("suffix")) for each in asked(target).values()))
    assert any(each.num_preemptions for each in driver.finishes.values())
    for key, text in expected.items():
        assert driver.token_ids[key] == text
