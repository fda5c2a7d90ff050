"""Fields of a translated request by the names of the client's API, in errors, whoever reads the body."""

from __future__ import annotations

import pickle

import pytest

from server.errors import ApiError, bad_request, from_validation, refused
from server.request.own_names import SAME, OwnNames

NAMES = OwnNames(
    {
        "stop": "stop_sequences",
        "format": "text.format",
        "format.schema": "text",
        "messages": "input",
        "messages.*": "input",
    }
)


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("stop", "stop_sequences"),
        ("stop.0", "stop_sequences.0"),
        ("stopped", "stopped"),
        ("a.stop", "a.stop"),
        ("format.name", "text.format.name"),
        ("format.schema.type", "text.type"),
        ("messages", "input"),
        ("messages.3.content.0", "input"),
        ("", ""),
    ],
)
def test_the_longest_known_path_says_the_clients(path: str, own: str) -> None:
    assert NAMES.of(path) == own
    assert SAME.of(path) == path


def test_a_refusal_names_the_clients_fields_in_its_message_too() -> None:
    error = from_validation(
        [
            {"loc": ("stop", 0), "type": "value_error", "msg": "Value error, Is stop too long"},
            {"loc": ("colour",), "type": "extra_forbidden", "msg": ""},
        ]
    )
    with pytest.raises(ApiError) as caught, NAMES.in_refusals():
        raise error
    for found in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (found.status, found.code, found.param) == (
            400,
            "invalid_value",
            "stop_sequences.0",
        )
        said = "stop_sequences.0: is stop too long; colour: this server knows no such field"
        assert found.message == said


@pytest.mark.parametrize(
    ("error", "param", "message"),
    [
        (refused("format", "needs 'a'", "odd"), "text.format", "text.format needs 'a'"),
        (refused("messages.0", ": no"), "input", "input: no"),
        (bad_request("messages", "no messages here"), "input", "no messages here"),
        (bad_request(None, "no"), None, "no"),
    ],
)
def test_what_a_message_says_beside_the_path_stays(
    error: ApiError, param: str | None, message: str
) -> None:
    found = error.renamed(NAMES.of)
    assert (found.param, found.message, found.code) == (param, message, error.code)
