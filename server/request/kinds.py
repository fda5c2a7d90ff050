"""Objects that say by their ``type`` which of several models they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any

from pydantic import PlainValidator, ValidationError

from server.request.body import Body, refusal
from server.request.messages import MAX_TOOLS

Kinds = Mapping[str, type[Body]]
"""The models of objects, by their ``type``."""


def parse_as(kinds: Kinds, value: object, default: str = "", at: Sequence[int] = ()) -> Any:
    kind = value.get("type", default) if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise refusal(*at, "type", message=f"must be an object of type {', '.join(kinds)}")
    try:
        return kinds[kind].model_validate(value)
    except ValidationError as error:
        # Where a text or parts may stand, what is wrong with the parts says more.
        found = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
        place = [each for each in found["loc"] if each != "str" and "list[" not in str(each)]
        raise refusal(*at, *place, message=str(found["msg"])) from error


def parse_each(kinds: Kinds, value: object, default: str = "", most: int = MAX_TOOLS) -> Any:
    if not isinstance(value, list):
        raise ValueError("must be a list")
    if len(value) > most:
        raise ValueError(f"takes at most {most} items")
    return [parse_as(kinds, each, default, [index]) for index, each in enumerate(value)]


def any_of(kinds: Kinds) -> Any:
    """Returns the union of the models."""
    return reduce(or_, dict.fromkeys(kinds.values()))


def one_of(kinds: Kinds) -> Any:
    """Returns the type of a field that holds one of them."""
    return PlainValidator(partial(parse_as, kinds), json_schema_input_type=any_of(kinds))


def each_of(kinds: Kinds) -> Any:
    """Returns the type of a field that holds a list of them."""
    union: Any = any_of(kinds)
    return PlainValidator(partial(parse_each, kinds), json_schema_input_type=list[union])
