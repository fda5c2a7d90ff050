"""What deploy/ray/serve.yaml says, and what a replica counts."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.ray.scaling import OpenTokens, TokenScaling
from deploy.ray.settings import Arguments, read_settings
from engine.request.params import GenerationRequest, SamplingParams
from slipstream.tools.simulate.affinity import preferred
from worlds.scripted_engine import ScriptedEngine

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "ray"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_the_configuration_names_what_there_is() -> None:
    config = yaml.safe_load((FOLDER / "serve.yaml").read_text(encoding="utf-8"))
    (application,) = config["applications"]
    assert application["import_path"] == "deploy.ray.app:build"
    assert read_settings(Arguments(**application["args"]).settings).max_num_seqs == 32
    gateway, engine = application["deployments"]
    assert (gateway["name"], engine["name"]) == ("gateway", "engine")
    router = engine["request_router_config"]
    assert router["request_router_class"] == "deploy.ray.router.AffinityRouter"
    known = inspect.signature(preferred).parameters
    shown = {name: known[name].default for name in router["request_router_kwargs"]}
    assert router["request_router_kwargs"] == shown
    policy = engine["autoscaling_config"]["policy"]
    assert policy["policy_function"] == "deploy.ray.scaling.TokenScaling"
    TokenScaling(**policy["policy_kwargs"])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"port": 1}, "port: Serve decides"),
        ({"api_workers": 2, "drain_seconds": 3}, "api_workers, drain_seconds: Serve decides"),
        ({"restart_engine": True}, "restart_engine: Serve decides"),
        ({"no_such": 1}, "no_such"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
    ],
)
def test_settings_that_would_be_without_effect_are_refused(
    given: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        read_settings(given)


def test_a_variable_is_held_to_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_MAX_NUM_SEQS", "3")
    assert read_settings({}).max_num_seqs == 3
    monkeypatch.setenv("SLIPSTREAM_PORT", "8001")
    with pytest.raises(ValueError, match="port"):
        read_settings({})


def test_arguments_are_known() -> None:
    with pytest.raises(ValueError, match="prefix_characters"):
        Arguments(prefix_characters=-1)
    with pytest.raises(ValueError, match="setting"):
        Arguments(**{"setting": {}})


@pytest.mark.anyio
async def test_open_tokens_fall_as_they_are_written() -> None:
    tokens = OpenTokens()
    engine = ScriptedEngine("hello world", group_sizes=(1, 3))
    await engine.start()
    sampling = SamplingParams(max_tokens=20)
    requests = [GenerationRequest(name, (1, 2, 3, 4), sampling) for name in "ab"]
    first, second = (tokens.counted(each, engine.generate(each)) for each in requests)
    assert tokens.total == 0
    await anext(first)
    await anext(second)
    assert tokens.total == 38  # both prompts, and a token each
    await anext(first)
    assert tokens.total == 35
    await second.aclose()
    assert tokens.total == 16
    async for _ in first:
        pass
    assert tokens.total == 0
    assert engine.closed_early == ["b"]
