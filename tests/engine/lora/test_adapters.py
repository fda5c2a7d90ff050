"""Adapters come and go while requests run, and nothing that was kept under one serves another."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.capture import captures
from engine.core import EngineCore
from engine.lora.adapters import Adapters, load_all
from engine.lora.names import parse_adapters
from engine.request.errors import AdapterError, UnknownAdapterError
from engine.request.params import GenerationRequest, SamplingParams
from engine.request.salts import salt_of
from worlds.engine_harness import Setup, TinyTarget, drafting, request, tiny_llama
from worlds.lora_adapters import AdaptedDriver, adapters_of, save_adapter

NAMES = ("one", "other", "third")
PROMPT = tuple(range(8, 40))
USUAL = SamplingParams(20, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> TinyTarget:
    return TinyTarget()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        save_adapter(root / name, tiny_llama(), seed)
    return {name: root / name for name in NAMES}


def world(
    target: TinyTarget, folders: Mapping[str, Path] | None = None, **changes: Any
) -> tuple[EngineCore, Adapters, AdaptedDriver]:
    core = target.core(Setup().but(**changes))
    adapters = adapters_of(core, folders)
    return core, adapters, AdaptedDriver(core, adapters)


def asking(
    name: str, adapter: str | None, drafter: str = "none", **changes: Any
) -> GenerationRequest:
    found = request(name, PROMPT, USUAL, drafting(drafter))
    return replace(found, adapter=adapter, **changes)


def test_texts_are_the_adapters_and_the_cache_is_kept_by_them(
    target: TinyTarget, folders: Mapping[str, Path]
) -> None:
    _, _, driver = world(target, folders)
    names = [None, *NAMES]
    driver.run(*(asking(f"first-{name}", name) for name in names))
    texts = [driver.token_ids[f"first-{name}"] for name in names]
    assert len(set(map(tuple, texts))) == len(texts)
    for name, text in zip(names, texts, strict=True):
        assert driver.finishes[f"first-{name}"].num_cached_tokens == 0
        driver.run(asking(f"again-{name}", name))
        assert driver.token_ids[f"again-{name}"] == text
        assert driver.finishes[f"again-{name}"].num_cached_tokens >= len(PROMPT) - 16


def test_other_weights_under_a_name_find_no_block_and_the_same_ones_do(
    target: TinyTarget, folders: Mapping[str, Path]
) -> None:
    _, adapters, driver = world(target)
    texts: dict[str, list[int]] = {}
    for turn, name in enumerate(("one", "other", "one")):
        adapters.load("it", str(folders[name]), may_replace=True)
        each = f"turn-{turn}"
        driver.run(asking(each, "it"))
        has_blocks = turn == 2
        assert (driver.finishes[each].num_cached_tokens > 0) == has_blocks
        assert texts.setdefault(name, driver.token_ids[each]) == driver.token_ids[each]
    assert texts["one"] != texts["other"]


def test_what_drafters_learn_is_kept_by_adapter(
    target: TinyTarget, folders: Mapping[str, Path]
) -> None:
    core, _, driver = world(target, folders)
    share = {"speculative": drafting("suffix", share=True)}
    for turn in range(2):
        for name in (None, *NAMES):
            driver.run(asking(f"{name}-{turn}", name, **share))
    suffix: Any = core.speculation.drafters["suffix"]
    salts = [salt_of(each) for each in suffix._histories._by_salt]
    assert [each.adapter for each in salts] == ["", *NAMES]
    for name in (None, *NAMES):
        first, again = (driver.finishes[f"{name}-{turn}"].speculative for turn in range(2))
        assert again.num_accepted_tokens > first.num_accepted_tokens
        assert driver.token_ids[f"{name}-0"] == driver.token_ids[f"{name}-1"]


def test_requests_keep_the_adapter_that_they_were_admitted_with(
    target: TinyTarget, folders: Mapping[str, Path]
) -> None:
    """One is unloaded under its requests, one replaced; one of them is preempted meanwhile."""
    _, _, undisturbed = world(target, folders)
    undisturbed.run(*(asking(name, name) for name in NAMES))
    _, adapters, driver = world(target, folders, num_blocks=16, block_size=4)
    for name in NAMES:
        driver.submit(asking(name, name))
    for _ in range(4):
        driver.step()
    adapters.unload("one")
    adapters.load("other", str(folders["third"]), may_replace=True)
    with pytest.raises(UnknownAdapterError, match="no adapter 'one' is loaded"):
        driver.submit(asking("late", "one"))
    driver.run(asking("new", "other"))
    assert any(each.num_preemptions for each in driver.finishes.values())
    for name in NAMES:
        assert driver.token_ids[name] == undisturbed.token_ids[name]
    assert driver.token_ids["new"] == undisturbed.token_ids["third"]


def test_a_hundred_loads_and_unloads_leave_nothing(
    target: TinyTarget, folders: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "_OFTEN", 2)
    core, adapters, driver = world(target)
    runner: Any = core.runner
    alive: list[weakref.ref[Any]] = []
    num_recordings = 0
    for turn in range(100):
        name = f"adapter-{turn}"
        adapters.load(name, str(folders[NAMES[turn % 3]]))
        short = replace(USUAL, max_tokens=3)
        driver.run(replace(asking(f"request-{turn}", name), sampling=short))
        _, packed = adapters.applied_to(asking("look", name))
        alive.append(weakref.ref(packed))
        adapters.unload(name)
        del packed
        recorded = sum(each.recording is not None for each in runner._replays._captures.values())
        if turn == 50:
            num_recordings = recorded
    gc.collect()
    assert adapters.infos == ()
    assert all(each() is None for each in alive)
    assert recorded == num_recordings > 0
    assert sum(core.pool.counts()[state] for state in ("draft", "committed")) == 0


def test_a_load_that_is_refused_changes_nothing(
    target: TinyTarget, folders: Mapping[str, Path], tmp_path: Path
) -> None:
    _, adapters, driver = world(target, folders)
    before = adapters.infos
    for name, path, expected in (
        ("new", tmp_path / "absent", "no such folder"),
        ("one", tmp_path / "absent", "'one' is loaded; unload it first, or replace it"),
        ("one", folders["other"], "'one' is loaded"),
        ("a name", folders["other"], "'a name' is no name of an adapter"),
        ("", folders["other"], "'' is no name"),
    ):
        with pytest.raises(AdapterError, match=expected):
            adapters.load(name, str(path))
    with pytest.raises(AdapterError, match="no such folder"):
        adapters.load("one", str(tmp_path / "absent"), may_replace=True)
    with pytest.raises(UnknownAdapterError):
        adapters.unload("new")
    assert adapters.infos == before
    driver.run(asking("still", "one"))


def test_what_is_loaded_is_told(
    target: TinyTarget, folders: Mapping[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "engine.lora.adapters"):
        _, adapters, _ = world(target, {"one": folders["one"]})
    (info,) = adapters.infos
    assert (info.name, info.path, info.rank) == ("one", str(folders["one"]), 4)
    assert info.num_layers == 2 * 7
    assert info.num_bytes >= 4 * info.num_parameters > 0
    assert "adapter one: rank 4 in 14 layers" in caplog.text


def test_settings_name_folders() -> None:
    assert parse_adapters(["a=/x/y", "org/b:1=c=d"]) == {"a": "/x/y", "org/b:1": "c=d"}
    for wanted, expected in (
        (["a"], "'a' is not NAME=PATH"),
        (["a="], "'a=' is not NAME=PATH"),
        (["=b"], "'' is no name"),
        (["a b=c"], "'a b' is no name"),
        (["a=b", "a=c"], "two adapters of the name 'a'"),
    ):
        with pytest.raises(ValueError, match=f"lora: .*{expected}"):
            parse_adapters(wanted)


def test_a_start_names_the_adapter_at_fault(target: TinyTarget, tmp_path: Path) -> None:
    _, adapters, _ = world(target)
    with pytest.raises(AdapterError, match="lora: adapter bad: .*: there is no such folder"):
        load_all(adapters, {"bad": str(tmp_path / "absent")})
