"""Settings of deploy/ray/serve.yaml: where requests go, what replicas count, how many there are to be."""

from __future__ import annotations

import inspect
import json
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from deploy.ray.affinity import affinity_key
from deploy.ray.scaling import OpenTokens, TokenScaling
from deploy.ray.settings import Arguments, read_settings
from engine.request.params import GenerationRequest, SamplingParams
from slipstream.tools.simulate.affinity import preferred
from worlds.scripted_engine import ScriptedEngine

PATH = "/v1/chat/completions"
FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "ray"


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


async def test_open_tokens_fall_as_they_are_written() -> None:
    tokens = OpenTokens()
    engine = ScriptedEngine("hello world", group_sizes=(1, 3))
    await engine.start()
    sampling = SamplingParams(max_tokens=20)
    requests = [GenerationRequest(name, (1, 2, 3, 4), sampling) for name in "ab"]
    assert tokens.total == 0
    async with aclosing(engine.generate(requests[0])) as events:
        with tokens.counted(requests[0]) as count:
            with tokens.counted(requests[1]) as count_another:
                count(await anext(events))
                async with aclosing(engine.generate(requests[1])) as others:
                    count_another(await anext(others))
                assert tokens.total == 38  # both prompts, and a token each
                count(await anext(events))
                assert tokens.total == 35
            assert tokens.total == 16
            async for event in events:
                count(event)
    assert tokens.total == 0


def key(headers: dict[str, str] | None = None, characters: int = 16, **fields: Any) -> str | None:
    pairs = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return affinity_key(PATH, pairs, json.dumps(fields).encode(), characters)


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def test_a_key_is_of_the_beginning() -> None:
    assert key(messages=chat("a question that is long")) == key(
        messages=chat("a question that is longer", "an answer"), temperature=1.0
    )
    assert key(messages=chat("one")) != key(messages=chat("two"))
    assert key(messages=chat("one"), characters=0) == key(messages=chat("two"), characters=0)
    assert key(prompt=[1, 2, 3] * 10) == key(prompt=[1, 2, 3] * 12)
    assert key(prompt=[1, 2, 3] * 10) != key(prompt=[1, 23] * 15)
    assert key(prompt="x", instructions="be brief, and to the point") == key(
        prompt="y", instructions="be brief, and to the point"
    )
    system = [{"type": "text", "text": "be brief, and to the point"}]
    assert key(messages=chat("x"), system=system) == key(messages=chat("y"), system=system)


def test_a_key_is_of_a_tenant_and_salt() -> None:
    mine = {"authorization": "Bearer mine"}
    found = {key(prompt="x"), key(mine, prompt="x"), key(mine, prompt="x", cache_salt="s")}
    assert len(found) == 3
    assert key({"Authorization": "Bearer mine"}, prompt="x") in found
    assert key({"x-api-key": "mine"}, prompt="x") not in (key(prompt="x"), key(mine, prompt="x"))
    assert not any("mine" in str(each) for each in found)
    # What belongs to the one is no part of the other.
    other = key({"authorization": "ab"}, cache_salt="")
    assert key({"authorization": "a"}, cache_salt="b") != other


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff"])
def test_what_cannot_be_read_belongs_nowhere(body: bytes) -> None:
    assert affinity_key(PATH, (), body, 16) is None
    assert affinity_key("/v1/models", (), b'{"prompt": "x"}', 16) is None


def test_of_a_long_body_the_start_counts() -> None:
    short = key(cache_salt="s", prompt="\u00e9" * 100)
    assert key(cache_salt="s", prompt="\u00e9" * 100_000) == short
    # Also where the cut falls within a character, or an escape.
    for shift in range(8):
        text = "x" * shift + "\u00e9" * 100_000
        raw = json.dumps({"prompt": text}, ensure_ascii=False).encode()
        assert affinity_key(PATH, (), raw, 16) == key(prompt=text[:100])
        assert key(prompt=text) == key(prompt=text[:100])


def test_a_cache_key_takes_the_place_of_the_beginning() -> None:
    """Agents begin all their conversations alike and name each. Of no other tenant's requests, though."""
    one = key(prompt_cache_key="k", messages=chat("one"))
    assert key(prompt_cache_key="k", messages=chat("two"), characters=0) == one
    assert key(prompt_cache_key="other", messages=chat("one")) != one
    assert key({"authorization": "Bearer x"}, prompt_cache_key="k") != one
    assert key(prompt_cache_key="k", cache_salt="s") != one
    assert key(prompt="k") != key(prompt_cache_key="k") == one
    assert key(prompt="a", prompt_cache_key=None) == key(prompt="a")


def test_a_cache_key_is_found_behind_a_long_conversation() -> None:
    short = key(prompt_cache_key="k\u00e9y", cache_salt="s", prompt="a")
    text = 'x"prompt_cache_key": "of a text"' * 10_000
    raw = json.dumps(
        {"messages": chat(text), "prompt_cache_key": "k\u00e9y", "cache_salt": "s"},
        ensure_ascii=False,
    )
    assert affinity_key(PATH, (), raw.encode(), 16) == short
    # A text that looks like a field is none, and what is no text is no key.
    assert key(messages=chat(text)) == key(messages=chat(text[:100]))
    broken = json.dumps({"prompt": text, "prompt_cache_key": 7}).encode()
    assert affinity_key(PATH, (), broken, 16) == key(prompt=text[:100])


def test_a_deep_body_is_no_trouble() -> None:
    assert affinity_key(PATH, (), b'{"prompt":' + b"[" * 150 + b"]" * 150 + b"}", 16)
    assert key(prompt=[[1] * 100_000] * 3, characters=1000)


@pytest.mark.parametrize(
    ("by_replica", "wanted"),
    [
        ({"a": 100.0}, 1.0),
        ({"a": 2500.0}, 2.5),
        ({"a": 1500.0, "b": 500.0}, 2.0),
        ({"a": 0.0}, 1.0),
    ],
)
def test_replicas_are_wanted_by_tokens(by_replica: dict[str, float], wanted: float) -> None:
    metrics = {"open_tokens": by_replica}
    context: Any = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=3)
    assert TokenScaling(target_tokens=1000)(context)[0] == wanted


def test_nothing_known_changes_nothing() -> None:
    context: Any = SimpleNamespace(aggregated_metrics=None, target_num_replicas=3)
    assert TokenScaling()(context)[0] == 3
    with pytest.raises(ValueError, match="target_tokens"):
        TokenScaling(target_tokens=0)
