"""Names on the hub in an engine's settings become paths, each fetched once, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.drafting.located import located
from engine.hub.choice import HubError
from engine.hub.name import called
from worlds.hub import Hub, pointed_at, running

FILES = {"a-Q8_0.gguf": b"t" * 5000, "b-F16.gguf": b"d" * 2000}
ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"w" * 2000}


def test_names_of_models_drafts_and_adapters_become_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = EngineConfig(
        "hf.co/org/repo:q8_0",
        draft=("org/repo:f16", "fast=org/repo:F16", "mtp", f"own={tmp_path}"),
        lora=("support=org/adapter", f"here={tmp_path}"),
    )
    with running(Hub({"org/repo": FILES, "org/adapter": ADAPTER})) as hub:
        pointed_at(monkeypatch, hub, tmp_path)
        found = located(given)
        assert located(found) == found, "paths stay"
    model, (first, fast, *others) = found.served_model, found.draft
    assert Path(model).read_bytes() == FILES["a-Q8_0.gguf"]
    assert Path(first).read_bytes() == FILES["b-F16.gguf"]
    assert fast == f"fast={first}"
    assert others == ["mtp", f"own={tmp_path}"]
    assert (called(model), called(first)) == ("org/repo:Q8_0", "org/repo:F16")
    support, here = found.lora
    folder = Path(support.removeprefix("support="))
    assert sorted(each.name for each in folder.iterdir()) == sorted(ADAPTER)
    assert here == f"here={tmp_path}"
    assert {name: len(times) for name, times in hub.served.items()} == dict.fromkeys(
        (*FILES, *ADAPTER), 1
    )


@pytest.mark.parametrize("name", [None, "bundled", "smollm2", "./a/b", "/a/b"])
def test_what_is_no_name_on_the_hub_stays(name: str | None, tmp_path: Path) -> None:
    given = EngineConfig(name, draft=("bundled",), lora=(f"a={tmp_path}",))
    assert located(given) == given


def test_only_a_cpus_memory_is_held_against_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.drafting.located.available_bytes", lambda: 4000)
    with running(Hub({"org/repo": FILES})) as hub:
        pointed_at(monkeypatch, hub, tmp_path)
        with pytest.raises(HubError, match=r"Q8_0 needs 0\.005 MB of memory"):
            located(EngineConfig("org/repo:Q8_0"))
        assert not hub.served
        assert located(EngineConfig("org/repo:Q8_0", device="cuda")).served_model.endswith(".gguf")
        # What is there may be served; whether it fits is seen then.
        assert located(EngineConfig("org/repo:Q8_0")).served_model.endswith(".gguf")
