"""What all parts of a request's body share: strict types, no unknown fields, refusals that say why.

A field of OpenAI's API that this server does not implement is known by name, so that sending it
gives a 400 with a reason and leaving it out (or null) is fine: nothing is accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 512
MAX_SEED = 2**63 - 1
Model = TypeVar("Model", bound=BaseModel)


class Body(BaseModel):
    """``unsupported``: fields known from OpenAI or vLLM and refused, with the reason.

    ``fixed``: fields of which only these values mean what this server does anyway.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    unsupported: ClassVar[dict[str, str]] = {}
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        findings: list[InitErrorDetails] = []
        kept = dict(data)
        for name, value in data.items():
            if name in cls.unsupported and name not in cls.model_fields:
                kept.pop(name)
                if value is not None:
                    findings.append(_detail(name, f"is not supported: {cls.unsupported[name]}"))
            elif name in cls.fixed:
                kept.pop(name)
                # bool is an int to Python: ``0 in (False,)`` must not pass for false.
                allowed = cls.fixed[name]
                if value is not None and not any(
                    type(value) is type(each) and value == each for each in allowed
                ):
                    findings.append(_detail(name, f"only {_either(allowed)} is supported"))
        if findings:
            raise ValidationError.from_exception_data(cls.__name__, findings)
        return kept


def described_by(
    kind: type, types: Mapping[str, Any] | None = None, *, optional: bool = False
) -> Callable[[type[Model]], type[Model]]:
    """Gives a model the fields of a dataclass, whose metadata says what is to be said of them:
    ``description``, and ``bounds`` by pydantic's names. Those without words are left out, as are
    those that the model has, but for the ones whose types ``types`` replaces. ``optional``: None
    stands for what is not given, instead of the dataclass's default.
    """

    def describe(model: type[Model]) -> type[Model]:
        has = set(model.model_fields) - set(types or ())
        described: Any = {
            name: found
            for name, found in _described(kind, types or {}, optional)
            if name not in has
        }
        return with_fields(model, described)

    return describe


def with_fields(model: type[Model], added: Mapping[str, Any]) -> type[Model]:
    """The model and further fields: by name, type and ``Field``."""
    fields: Any = dict(added)
    return create_model(
        model.__name__,
        __base__=model,
        __doc__=model.__doc__,
        __module__=model.__module__,
        **fields,
    )


def _described(
    kind: type, types: Mapping[str, Any], optional: bool
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    hints = get_type_hints(kind) | dict(types)
    for each in fields(kind):
        if "description" not in each.metadata:
            continue
        default = each.default if each.default_factory is MISSING else each.default_factory()
        about = Field(
            default=None if optional else default,
            description=each.metadata.get("description"),
            **each.metadata.get("bounds", {}),
        )
        yield each.name, (hints[each.name] | None if optional else hints[each.name], about)


def _detail(name: str, message: str) -> InitErrorDetails:
    # Braces would be read as placeholders by PydanticCustomError's template.
    return InitErrorDetails(
        type=PydanticCustomError("unsupported", "{message}", {"message": message}),
        loc=(name,),
        input=None,
    )


def _either(values: tuple[Any, ...]) -> str:
    return " or ".join(repr(value) for value in values)


def _parse_prompt(value: object) -> list[str] | list[list[int]]:
    """One prompt or a batch of them, as text or as token ids: always returned as a batch."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, token ids, or a non-empty list of either")
    if all(isinstance(item, str) for item in value):
        return value
    if all(type(item) is int for item in value):
        return [value]
    if all(isinstance(item, list) and item for item in value) and all(
        type(token_id) is int for item in value for token_id in item
    ):
        return value
    raise ValueError("must hold strings only, token ids only, or non-empty lists of token ids only")


def _parse_stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"takes at most {MAX_STOP_STRINGS} strings")
    if any(not 1 <= len(item) <= MAX_STOP_CHARS for item in stops):
        raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


_TEXTS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
PromptField = Annotated[
    Any,
    PlainValidator(_parse_prompt),
    WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS}]}),
]
StopField = Annotated[
    Any,
    PlainValidator(_parse_stop),
    WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS, {"type": "null"}]}),
]
