"""An engine checks its drafts when it starts, and tells the outcome in its information, in the log, and
by refusing."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import build_engine_for
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model.loader import prepare_model
from engine.process.threaded import AsyncEngine
from engine.request.errors import UnsupportedModelError
from engine.request.params import PLAIN, SamplingParams
from worlds.engine_harness import Driver, drafting, request
from worlds.taught_heads import (
    LAYERS,
    NUM_LAYERS,
    counting_target,
    prompts,
    save_target,
    taught_dflash,
    taught_eagle,
    taught_medusa,
)

SAID = "engine.drafting.checked"


def built(*drafts: str, seed: int = 1, **settings: Any) -> AsyncEngine:
    model = prepare_model(copy.deepcopy(counting_target(seed)), torch.device("cpu"))
    sizes = {"num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    config = EngineConfig(model="x", draft=drafts, determinism="fast", **(sizes | settings))
    return build_engine_for(model, None, config)


def log_of(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [
        record.message
        for record in caplog.records
        if record.name == SAID and record.levelno == level
    ]


def accepted(core: EngineCore, drafter: str) -> float:
    """The share of drafted tokens that were accepted, of texts that are the same without drafts."""
    sampling = SamplingParams(max_tokens=24, temperature=0.0)
    wanted = drafting(drafter, num_tokens=1, min_confidence=0.0)
    driver = Driver(core)
    for at, prompt in enumerate(prompts(90, 3)):
        driver.run(request(f"plain{at}", prompt, sampling, PLAIN))
        driver.run(request(f"r{at}", prompt, sampling, wanted))
        assert driver.token_ids[f"r{at}"] == driver.token_ids[f"plain{at}"]
    found = [driver.finishes[f"r{at}"].speculative for at in range(3)]
    return sum(each.num_accepted_tokens for each in found) / sum(
        each.num_draft_tokens for each in found
    )


def test_each_draft_is_said_with_what_it_reads_and_how_often_it_agrees(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Several beside each other, some of whose files count layers wrongly."""
    folders = {
        "right": taught_eagle(tmp_path / "a", 1),
        "early": taught_eagle(tmp_path / "b", 1, -1),
        "late": taught_dflash(tmp_path / "c", 1, 1),
        "pupil": taught_medusa(tmp_path / "d", 1),
        "self": save_target(tmp_path / "e", 1),
    }
    with caplog.at_level(logging.INFO, SAID):
        engine = built(*(f"{name}={path}" for name, path in folders.items()))
    found = engine.info.drafts
    assert {name: (each.method, each.note, each.hidden_layers) for name, each in found.items()} == {
        "right": ("eagle3", "", LAYERS),
        "early": ("eagle3", "its file names [1, 3, 5]", LAYERS),
        "late": ("dflash", "its file names [3, 5, 7]", LAYERS),
        "pupil": ("medusa", "", (-1,)),
        "self": ("small_model", "", ()),
    }
    assert {name: Path(each.path) for name, each in found.items()} == folders
    assert found["self"].agreement == 1
    assert min(each.agreement or 0 for each in found.values()) > 0.7
    drafters = engine.core.speculation.drafters
    heads = ("right", "early", "late")
    assert {tuple(drafters[name].hidden_layers) for name in heads} == {LAYERS}
    lines = log_of(caplog, logging.INFO)
    assert [line.split(":")[0] for line in lines] == [f"draft {name}" for name in folders]
    early = found["early"]
    assert lines[1] == (
        f"draft early: eagle3 of {early.num_parameters / 1e6:.1f} million parameters, "
        f"{early.agreement:.0%} agreement, reads layers [2, 4, 6] (its file names [1, 3, 5])"
    )
    assert not log_of(caplog, logging.WARNING)
    for name in (*heads, "pupil"):
        assert accepted(engine.core, name) > 0.5


def test_a_head_of_another_model_is_warned_of_and_writes_the_same_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, SAID):
        engine = built(f"other={taught_eagle(tmp_path, 2)}")
    share = engine.info.drafts["other"].agreement
    assert share is not None
    assert share < 0.2
    assert log_of(caplog, logging.WARNING) == [
        f"draft other: on the target's own text its first guess is right in {share:.0%} of all "
        "places; is it another model's?"
    ]
    assert accepted(engine.core, "other") < 0.3


@pytest.mark.parametrize("write", [taught_eagle, taught_dflash, taught_medusa])
def test_a_head_below_the_setting_is_refused(write: Any, tmp_path: Path) -> None:
    path = write(tmp_path, 2)
    told = r"draft h: .*is it another model's\? \(min_draft_agreement is 0\.3\)$"
    with pytest.raises(UnsupportedModelError, match=told) as refused:
        built(f"h={path}", min_draft_agreement=0.3)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("seed", "least"), [(1, 0.6), (2, 0.0)], ids=["right", "another model's"])
def test_a_head_above_the_setting_serves_without_a_warning(
    seed: int, least: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = built(str(taught_eagle(tmp_path, seed, 1)), min_draft_agreement=least)
    assert "eagle3" in engine.info.drafters
    assert not log_of(caplog, logging.WARNING)


@pytest.mark.parametrize("setting", [None, 1.0])
def test_a_store_without_room_to_ask_says_so_and_refuses_nothing(
    setting: float | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, SAID):
        engine = built(
            f"h={taught_eagle(tmp_path, 1, 1)}",
            num_blocks=1,
            block_size=1,
            min_draft_agreement=setting,
        )
    found = engine.info.drafts["h"]
    assert (found.agreement, found.note, found.hidden_layers) == (None, "", (3, 5, 7))
    (line,) = log_of(caplog, logging.INFO)
    assert line.endswith("million parameters, not checked, reads layers [3, 5, 7]")


@pytest.mark.parametrize("num_blocks", [1, 2, 5, 9])
def test_stores_of_any_size_are_built(num_blocks: int, tmp_path: Path) -> None:
    drafts = (
        f"a={taught_eagle(tmp_path / 'a', 1)}",
        f"b={taught_dflash(tmp_path / 'b', 1)}",
        f"c={save_target(tmp_path / 'c', 1)}",
    )
    engine = built(*drafts, num_blocks=num_blocks)
    assert all(each.agreement is not None for each in engine.info.drafts.values())


def test_without_drafts_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, SAID):
        assert built().info.drafts == {}
    assert not log_of(caplog, logging.INFO)


def test_the_last_layer_of_all_can_be_read(tmp_path: Path) -> None:
    """A file that names it leaves one way less to count."""
    path = taught_eagle(tmp_path, 1, eagle_aux_hidden_state_layer_ids=[4, 6, NUM_LAYERS])
    found = built(str(path)).info.drafts["eagle3"]
    assert found.hidden_layers in ((4, 6, NUM_LAYERS), (3, 5, NUM_LAYERS - 1))
