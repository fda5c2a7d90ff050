"""From a body's bytes to one of the models of this folder: the same for small bodies and large ones,
whichever process reads them. Every refusal says what is wrong, and where.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from server.errors import SAME, ApiError, OwnNames, bad_request, clip, from_validation
from server.request.body import DROPS_UNKNOWN

MAX_CONTENT_TYPE_CHARS = 60
Model = TypeVar("Model", bound=BaseModel)

# In text that is UTF-8 itself, only an escape can say half a character.
_HALF_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_HALF = re.compile("[\ud800-\udfff]")
_KIND = re.compile(r"bool|int|float|str|list|dict|none|constrained-\w+|function-.*|[\w-]+\[.*")
_MOST_DEPTH = 200
_Path = tuple[str, ...]


def check_content_type(content_type: str) -> None:
    """Raises ApiError 400 for anything but JSON."""
    essence = content_type.partition(";")[0].strip().lower()
    kind, _, sub = essence.partition("/")
    if kind.strip() == "application" and (sub.strip() == "json" or sub.endswith("+json")):
        return
    got = f"not as '{clip(essence, MAX_CONTENT_TYPE_CHARS)}'" if essence else "and it names none"
    raise _unreadable(f"The body must be sent with 'Content-Type: application/json', {got}.")


def parse(kind: type[Model], content: bytes, *, drops_unknown: bool = False) -> Model:
    """The body as a ``kind``. ``drops_unknown``: unknown fields are left out, and among its ``hints``.
    Raises ApiError 400 naming the fields at fault."""
    before = DROPS_UNKNOWN.set(drops_unknown)
    try:
        return check(kind, _read_json(content))
    finally:
        DROPS_UNKNOWN.reset(before)


def check(kind: type[Model], data: dict[str, Any], names: OwnNames = SAME) -> Model:
    """The same of what was read already. Raises ApiError 400 with these names of the fields at fault."""
    with names.in_refusals():
        try:
            return kind.model_validate(data)
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)
            findings = [{**each, "loc": _way(data, each["loc"])} for each in found]
            raise from_validation(findings) from error


def _way(data: Any, place: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The way to what is at fault, without pydantic's names of the types that a field may have."""
    way: list[int | str] = []
    for step in place:
        try:
            data = data[step]
        except (LookupError, TypeError):
            if _KIND.fullmatch(str(step)):
                continue
        way.append(step)
    return tuple(way)


def _read_json(content: bytes) -> dict[str, Any]:
    """Raises ApiError 400."""
    if not content:
        raise _unreadable("The body is empty; it must be a JSON object.")
    try:
        # Some clients begin with a byte order mark.
        text = content.decode("utf-8-sig")
        data = json.loads(text, parse_float=read_float)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        place = f"byte {error.start} (0x{byte:02x})"
        raise _unreadable(f"The body is not UTF-8: {place}: {error.reason}.") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno} (character {error.pos})"
        reason = error.msg[:1].lower() + error.msg[1:].removesuffix(" at")
        raise _unreadable(f"The body is not valid JSON: {place}: {reason}.") from error
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:  # Python bounds the digits of integers
        raise _unreadable("The body has a number of too many digits.") from error
    if not isinstance(data, dict):
        raise _unreadable(f"The body must be a JSON object, not {_JSON_NAMES[type(data)]}.")
    if _is_too_deep(data):
        raise _too_deep()
    if _HALF_ESCAPE.search(text):
        _refuse_half_characters(data)
    return data


def read_float(text: str) -> float:
    """A number that no double reaches is an integer, which has no more digits than Python allows."""
    number = float(text)
    is_beyond = math.isinf(number) and Decimal(text).adjusted() < sys.get_int_max_str_digits()
    return int(Decimal(text)) if is_beyond else number


_JSON_NAMES: dict[type, str] = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


def _unreadable(message: str) -> ApiError:
    return bad_request(None, message, code="unreadable_body")


def _too_deep() -> ApiError:
    return _unreadable("The body is nested too deeply.")


def _is_too_deep(data: Any) -> bool:
    """Whether more is within each other than can be checked, and be sent back where it is repeated."""
    level = [data]
    for _ in range(_MOST_DEPTH):
        within = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for values in within for each in values if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def _refuse_half_characters(data: dict[str, Any]) -> None:
    """Text with a lone surrogate is no Unicode: no tokenizer takes it, and no reply can hold it."""
    for path, text in _texts(data):
        if found := _HALF.search(text):
            field = ".".join(path) or None
            half = f"half a character, the lone surrogate \\u{ord(found[0]):04x}"
            raise bad_request(field, f"{field or 'the body'}: {half}")


def _texts(data: dict[str, Any]) -> Iterator[tuple[_Path, str]]:
    """Every string with the way to it, in order; an object's keys with the way to the object."""
    waiting: list[tuple[_Path, Any]] = [((), data)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str):
            yield path, value
        elif isinstance(value, dict):
            yield from ((path, key) for key in value)
            waiting += [((*path, key), each) for key, each in reversed(value.items())]
        elif isinstance(value, list):
            waiting += [((*path, str(at)), value[at]) for at in reversed(range(len(value)))]
