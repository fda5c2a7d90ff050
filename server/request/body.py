"""The base of all parts of a request's body: strict types, no unknown fields, refusals that say why.

A field of OpenAI's API that this server does not implement is known by name, so that sending it
gives a 400 with a reason and leaving it out (or null) is fine. Fields that change no text are hints:
they are taken, and the reply names those without effect. Nothing is accepted and ignored without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_type_hints

from annotated_types import MaxLen, MinLen
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 512
MAX_SEED = 2**63 - 1
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Hint:
    """Marks a field, in its annotation, that says nothing of what the text is to be: it is taken, and
    told where nothing comes of it.

    ``effect``: what always comes of it. ``variable``: the chat template's that it is handed to, where the
    template reads it; ``switch``: one that is handed whether the value is more than "none". ``does``:
    values that mean what this server does anyway.
    """

    effect: str = ""
    variable: str = ""
    switch: str = ""
    does: tuple[Any, ...] = ()

    def needs_telling(self, value: Any) -> bool:
        """Whether nothing comes of the value, unless a template reads it."""
        return not self.effect and not _is_one_of(value, self.does)


@dataclass(frozen=True, slots=True)
class GivenHint:
    """``path``: the field's, dotted, as the client wrote it."""

    path: str
    hint: Hint
    value: Any


class Body(BaseModel):
    """``unsupported``: fields known from OpenAI or vLLM and refused, with the reason.

    ``fixed``: fields of which only these values mean what this server does anyway. Null is the same as
    leaving a field out, for all that may be left out. A field annotated with a ``Hint`` is taken, and
    told where it is without effect.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    unsupported: ClassVar[dict[str, str]] = {}
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_left_out(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        own = cls._fields_by_name()
        kept: dict[Any, Any] = {}
        findings: list[InitErrorDetails] = []
        for name, value in data.items():
            field = own.get(name)
            is_known = field is not None or name in cls.unsupported or name in cls.fixed
            if value is None and is_known and not (field is not None and field.is_required()):
                continue
            if field is not None or not is_known:
                kept[name] = value
            elif (message := cls._refusal(name, value)) is not None:
                findings.append(_detail(name, message=message))
        if findings:
            raise ValidationError.from_exception_data(cls.__name__, findings)
        return kept

    def hints(self) -> Iterator[GivenHint]:
        """Yields the hints that were given here and in the parts within. The paths of a list's parts
        have no place in them: a thousand messages would fill the reply's header."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Body):
                    within = part.hints()
                    yield from (replace(each, path=f"{name}.{each.path}") for each in within)
            if value is not None:
                marks = (each for each in field.metadata if isinstance(each, Hint))
                yield from (GivenHint(name, each, value) for each in marks)

    @classmethod
    def hint_fields(cls) -> Iterator[tuple[str, FieldInfo, Hint]]:
        """Yields the hints that may be given here and in the parts within, by their paths."""
        for name, field in cls.model_fields.items():
            for kind in _kinds(field.annotation):
                if isinstance(kind, type) and issubclass(kind, Body):
                    within = kind.hint_fields()
                    yield from ((f"{name}.{path}", each, hint) for path, each, hint in within)
            yield from ((name, field, each) for each in field.metadata if isinstance(each, Hint))

    @classmethod
    @cache
    def _fields_by_name(cls) -> dict[str, FieldInfo]:
        """Returns the fields as clients name them."""
        return {each.alias or name: each for name, each in cls.model_fields.items()}

    @classmethod
    def _refusal(cls, name: str, value: Any) -> str | None:
        """Returns what rules out a value of an unsupported or fixed field."""
        if name in cls.unsupported:
            return f"is not supported: {cls.unsupported[name]}"
        allowed = cls.fixed[name]
        if _is_one_of(value, allowed):
            return None
        return f"only {' or '.join(map(repr, allowed))} is supported"

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        described = handler(schema)
        properties = handler.resolve_ref_schema(described).get("properties", {})
        for name, field in cls._fields_by_name().items():
            if name in properties and not field.is_required():
                properties[name] = _or_null(properties[name])
        return described


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yields what a type is made of, however deep."""
    yield annotation
    for each in get_args(annotation):
        yield from _kinds(each)


def _is_one_of(value: Any, allowed: Iterable[Any]) -> bool:
    # bool is an int to Python: ``0 in (False,)`` must not pass for false.
    return any(type(value) is type(each) and value == each for each in allowed)


NOTHING: JsonDict = {"type": "null"}
"""The schema of what is left out."""
_ABOUT_FIELDS = ("title", "description", "default")


def _or_null(schema: JsonSchemaValue) -> JsonSchemaValue:
    """A field's schema in which null stands for its absence."""
    if NOTHING in schema.get("anyOf", []):
        return schema
    about = {name: schema[name] for name in _ABOUT_FIELDS if name in schema}
    value = {name: each for name, each in schema.items() if name not in about}
    return {
        "anyOf": [*(value["anyOf"] if value.keys() == {"anyOf"} else [value]), NOTHING],
        **about,
    }


def described_by(
    kind: type, types: Mapping[str, Any] | None = None, *, optional: bool = False
) -> Callable[[type[Model]], type[Model]]:
    """Gives a model the fields of a dataclass, whose metadata says what is to be said of them:
    ``description``, and ``bounds`` by pydantic's names. Those without words are left out, as are
    those that the model has, but for the ones whose types ``types`` replaces. ``optional``: None
    stands for what is not given, instead of the dataclass's default.
    """

    def describe(model: type[Model]) -> type[Model]:
        hints = get_type_hints(kind) | dict(types or {})
        has = set(model.model_fields) - set(types or ())
        added = {}
        for each in fields(kind):
            if each.name in has or "description" not in each.metadata:
                continue
            default = each.default if each.default_factory is MISSING else each.default_factory()
            about = Field(
                default=None if optional else default,
                description=each.metadata["description"],
                **each.metadata.get("bounds", {}),
            )
            hint = hints[each.name]
            added[each.name] = (hint | None if optional else hint, about)
        return with_fields(model, added)

    return describe


def optional(description: str, default: Any = None, **bounds: Any) -> Any:
    """Returns a field that may be left out. ``bounds``: by pydantic's names."""
    return Field(default=default, description=description, **bounds)


def with_fields(model: type[Model], added: dict[str, Any]) -> type[Model]:
    """The model and further fields: by name, type and ``Field``."""
    about: dict[str, Any] = {"__doc__": model.__doc__, "__module__": model.__module__}
    return create_model(model.__name__, __base__=model, **about, **added)


def in_case(needed: Mapping[str, JsonDict], barred: Iterable[str] = ()) -> JsonDict:
    """For a model's schema, a case of what its own checks let through: with these fields, of which this
    is true, and without those."""
    without = dict.fromkeys(barred, NOTHING)
    return {"properties": {**needed, **without}, "required": [*needed]}


def _detail(*place: int | str, message: str) -> InitErrorDetails:
    # Braces would be read as placeholders by PydanticCustomError's template.
    return InitErrorDetails(
        type=PydanticCustomError("unsupported", "{message}", {"message": message}),
        loc=place,
        input=None,
    )


def refusal(*place: int | str, message: str) -> ValidationError:
    """Returns an error for a check of our own to raise; ``place`` is the way to the field at fault."""
    return ValidationError.from_exception_data("body", [_detail(*place, message=message)])


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
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"takes at most {MAX_STOP_STRINGS} strings")
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise ValueError("must be a string or a list of strings")
    if any(not 1 <= len(item) <= MAX_STOP_CHARS for item in stops):
        raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


TokenId = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]
"""How many there are depends on the model; whether it is one is seen when the request is translated."""
_Ids = Annotated[list[TokenId], MinLen(1)]
_Texts = Annotated[list[str], MinLen(1)]
PromptField = Annotated[
    Any,
    PlainValidator(
        _parse_prompt,
        json_schema_input_type=str | _Texts | _Ids | Annotated[list[_Ids], MinLen(1)],
    ),
]
_Stop = Annotated[str, MinLen(1), MaxLen(MAX_STOP_CHARS)]
StopField = Annotated[
    Any,
    PlainValidator(
        _parse_stop,
        json_schema_input_type=_Stop | Annotated[list[_Stop], MaxLen(MAX_STOP_STRINGS)],
    ),
]
