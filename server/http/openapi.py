"""Answers in the OpenAPI schema: every status that an endpoint has, with the shape of errors,
and what the events of a stream hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from server.errors import ErrorReply

Answers = dict[int | str, dict[str, Any]]
REFUSED_BODY = (400, 401, 408, 413, 414, 431)
_DONE = "[DONE]"
_REFS = "#/components/schemas/{model}"
_MEANINGS = {
    400: "The request is at fault; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The server's settings do not allow it.",
    404: "There is no such model, or nothing at this path.",
    408: "The request did not come whole in time; the connection is closed.",
    413: "The body is larger than the server accepts.",
    414: "The URL is longer than the server accepts; the connection is closed.",
    429: "Too many requests wait, or the key's limits are reached; `Retry-After` says when to come back.",
    431: "The headers are more than the server accepts; the connection is closed.",
    500: "The server is at fault; its log says how.",
    503: "The engine has stopped, or the server is shutting down.",
    504: "The request was not done by its deadline.",
}


def errors(*statuses: int, shape: Any = ErrorReply) -> Answers:
    """Answers of an endpoint's ``responses``. ``shape``: that of the API it belongs to."""
    return {each: {"model": shape, "description": _MEANINGS[each]} for each in statuses}


def generated(
    whole: Any, chunk: Any, *, ends_with_done: bool = True, shape: Any = ErrorReply
) -> Answers:
    """The answers of an endpoint that has the engine write: whole replies, streams, all errors.
    ``ends_with_done``: a stream's last event is no JSON. ``shape``: of errors."""
    event = TypeAdapter(chunk | shape).json_schema(mode="serialization", ref_template=_REFS)
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": event,
    }
    last = "The last event has the whole response, or says that it has ended."
    if ends_with_done:
        data = {"anyOf": [data, {"const": _DONE}]}
        last = f"The last event's data is `{_DONE}`."
    stream = {
        "itemSchema": {
            "type": "object",
            "description": last,
            "properties": {"data": data},
            "required": ["data"],
        }
    }
    answer = {
        "model": whole,
        "description": "The whole reply; or with `stream` its events.",
        "content": {"text/event-stream": stream},
    }
    return {200: answer, **errors(*REFUSED_BODY, 404, 429, 500, 503, 504, shape=shape)}


def written_in_lines(whole: Any, shape: Any) -> Answers:
    """The same for endpoints whose streams are lines of JSON of one shape."""
    line = TypeAdapter(whole | shape).json_schema(mode="serialization", ref_template=_REFS)
    answer = {
        "model": whole,
        "description": "Lines of JSON, the last one with `done`; or without `stream` the whole reply.",
        "content": {"application/x-ndjson": {"itemSchema": line}},
    }
    return {200: answer, **errors(*REFUSED_BODY, 404, 429, 500, 503, 504, shape=shape)}


def describe_as_it_is(app: FastAPI, drafters: Iterable[str]) -> None:
    """Has the application's schema leave out FastAPI's own 422, which is a 400 here, hold what the
    schemas of events refer to, and name the drafters that are loaded."""
    usual = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = usual()
            _correct(schema)
            _name_drafters(schema, list(drafters))
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _correct(schema: dict[str, Any]) -> None:
    known = schema["components"]["schemas"]
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            for answer in operation["responses"].values():
                for told in answer.get("content", {}).values():
                    for piece in _pieces(told.get("itemSchema", {})):
                        for name, each in piece.pop("$defs", {}).items():
                            known.setdefault(name, each)
    for name in ("HTTPValidationError", "ValidationError"):
        known.pop(name, None)


def _pieces(item: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Returns the schemas of the JSON in a stream's items: of lines, or of the data of events."""
    data = item.get("properties", {}).get("data", {})
    return [item, *(each.get("contentSchema", {}) for each in data.get("anyOf", [data]))]


def _name_drafters(schema: dict[str, Any], names: list[str]) -> None:
    field = schema["components"]["schemas"]["SpeculativeField"]["properties"]["draft_strategy"]
    (text,) = (each for each in field["anyOf"] if each["type"] == "string")
    text["enum"] = names
