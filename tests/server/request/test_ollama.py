"""Names of models as Ollama's clients say them; requests themselves are told by the endpoints' tests."""

from __future__ import annotations

import pytest

from server.request.ollama import OllamaOptions, known_name, tagged


@pytest.mark.parametrize(
    ("name", "served", "known"),
    [
        ("smollm2", "smollm2", "smollm2"),
        ("smollm2:latest", "smollm2", "smollm2"),
        ("smollm2", "smollm2:latest", "smollm2:latest"),
        ("org/model:latest", "org/model", "org/model"),
        ("host:80/org/model", "host:80/org/model", "host:80/org/model"),
        ("smollm2:135m", "smollm2", "smollm2:135m"),
        ("other", "smollm2", "other"),
        (None, "smollm2", None),
    ],
)
def test_a_name_without_a_tag_has_the_latest(
    name: str | None, served: str, known: str | None
) -> None:
    assert known_name(name, ["first", served]) == known


def test_a_host_is_no_tag() -> None:
    assert tagged("host:80/org/model") == "host:80/org/model:latest"
    assert tagged("model:7b") == "model:7b"


def test_every_option_has_an_effect_or_is_a_hint() -> None:
    """What is neither would be ignored without a word."""
    hints = {each.path for each in OllamaOptions(num_ctx=1, repeat_last_n=2, numa=True).hints()}
    assert hints == {"num_ctx", "repeat_last_n", "numa"}
    said = OllamaOptions().for_request().keys()
    renamed = {"repeat_penalty": "repetition_penalty"}
    elsewhere = {"num_predict"}
    for name, field in OllamaOptions.model_fields.items():
        is_hint = any(type(mark).__name__ == "Hint" for mark in field.metadata)
        assert is_hint or name in elsewhere or renamed.get(name, name) in said, name
