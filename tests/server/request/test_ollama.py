"""Names of models as Ollama's clients say them; requests themselves are told by the endpoints' tests."""

from __future__ import annotations

import pytest

from server.request.ollama import OllamaOptions, known_name, tagged
from server.request.protocol import ChatRequest


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


def test_every_option_is_a_field_of_chats() -> None:
    said = OllamaOptions().for_request({}).keys()
    assert set(OllamaOptions.model_fields) - said == {"num_predict"}
    assert said <= {*ChatRequest.model_fields, *ChatRequest.synonyms}
