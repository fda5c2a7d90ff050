"""Where requests go under Ray Serve, and how many replicas they get: functions of what is known."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.ray.affinity import affinity_key
from deploy.ray.scaling import TokenScaling

PATH = "/v1/chat/completions"


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


def test_a_key_is_of_a_tenant_and_salt() -> None:
    mine = {"authorization": "Bearer mine"}
    found = {key(prompt="x"), key(mine, prompt="x"), key(mine, prompt="x", cache_salt="s")}
    assert len(found) == 3
    assert key({"Authorization": "Bearer mine"}, prompt="x") in found
    assert not any("mine" in str(each) for each in found)
    # What belongs to the one is no part of the other.
    assert key({"authorization": "a"}, cache_salt="b") != key(
        {"authorization": "ab"}, cache_salt=""
    )


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
    context: Any = SimpleNamespace(
        aggregated_metrics={"open_tokens": by_replica}, target_num_replicas=3
    )
    assert TokenScaling(target_tokens=1000)(context)[0] == wanted


def test_nothing_known_changes_nothing() -> None:
    context: Any = SimpleNamespace(aggregated_metrics=None, target_num_replicas=3)
    assert TokenScaling()(context)[0] == 3
    with pytest.raises(ValueError, match="target_tokens"):
        TokenScaling(target_tokens=0)
