"""Names of models as Ollama's clients say them."""

from __future__ import annotations

import pytest

from server.request.wish import known_name, tagged


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
