"""The base of all parts of a request's body: strict types, no unknown fields, refusals that say why.

A field of OpenAI's API that this server does not implement is known by name, so that sending it
gives a 400 with a reason and leaving it out (or null) is fine. Fields that change no text are hints, and
those that known clients send in their usual course are in tables (``without_effect``): they are accepted,
and the reply names those without effect. Nothing is accepted and ignored without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args, get_type_hints

from annotated_types import MaxLen, MinLen
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
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
DRAWN_SEEDS = 2**53
"""Seeds below it are drawn: JavaScript reads larger numbers as others, and could not send them back."""
Model = TypeVar("Model", bound=BaseModel)
WithoutEffect = dict[str, tuple[Any, ...] | None]
DROPS_UNKNOWN = ContextVar("drops_unknown", default=False)
"""Whether the body that is being read may have unknown fields, which are then left out and listed."""
SWITCHES = frozenset({"enable_thinking", "thinking"})
"""How chat templates call the switch of reasoning."""


@dataclass(frozen=True, slots=True)
class Hint:
    """Marks a field, in its annotation, that says nothing of what the text is to be: it is taken, and
    told where nothing comes of it.

    ``variable``: the chat template's that it is handed to, where the
    template reads it; ``switches``: those that are handed whether to think. ``does``: values that mean
    what this server does anyway.
    """

    variable: str = ""
    switches: Set[str] = frozenset()
    does: tuple[Any, ...] = ()

    @property
    def is_for_template(self) -> bool:
        return bool(self.variable or self.switches)

    @staticmethod
    def is_on(value: Any) -> bool:
        """Whether the value says to think: an effort, a boolean, or an object's ``type``."""
        said = value.get("type") if isinstance(value, dict) else value
        return said is not False and said not in ("none", "disabled")

    def needs_telling(self, value: Any) -> bool:
        """Whether nothing comes of the value, unless a template reads it."""
        return not _is_one_of(value, self.does)


@dataclass(frozen=True, slots=True)
class GivenHint:
    """``path``: the field's, dotted, as the client wrote it."""

    path: str
    hint: Hint
    value: Any


class Body(BaseModel):
    """``unsupported``: fields known from OpenAI or vLLM and refused, with the reason; empty ones are not.
    ``fixed``: fields of which only these values mean what this server does anyway.

    ``without_effect``: fields that known clients send and that have no effect. They are accepted, and
    listed in the reply's header unless the value is one of these, which mean what this server does
    anyway (None: whatever it is). A field annotated with a ``Hint`` is listed where it is without effect.

    ``synonyms``: other names of fields. Null is the same as leaving a field out, for all that may be left
    out. A float that is integral is an integer.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    unsupported: ClassVar[dict[str, str]] = {}
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {}
    without_effect: ClassVar[WithoutEffect] = {}
    synonyms: ClassVar[dict[str, str]] = {}
    _left_out: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _read_what_is_known(cls, data: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return read(data)
        own, integers = cls._fields_by_name(), cls._integer_fields()
        drops = DROPS_UNKNOWN.get() and cls.model_config.get("extra") == "forbid"
        known = {*own, *cls.unsupported, *cls.fixed, *cls.without_effect}
        kept: dict[Any, Any] = {}
        left_out: dict[str, Any] = {}
        findings: list[InitErrorDetails] = []
        for given, value in data.items():
            name = str(cls.synonyms.get(given, given))
            field = own.get(name)
            if value is None and name in known and not (field is not None and field.is_required()):
                continue
            if name != given and data.get(name) not in (None, value):
                findings.append(_detail(given, message=f"contradicts {name!r}"))
            elif field is not None:
                kept[name] = integral(value) if name in integers else value
            elif name in cls.unsupported or name in cls.fixed:
                if (message := cls._refusal(name, value)) is not None:
                    findings.append(_detail(name, message=message))
            elif name in cls.without_effect or drops:
                left_out[name] = value
            else:
                kept[name] = value
        if findings:
            raise ValidationError.from_exception_data(cls.__name__, findings)
        body = read(kept)
        body._left_out = left_out
        return body

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """Returns one of fields that another model has checked; None stands for what is not given."""
        given = {name: value for name, value in fields.items() if value is not None}
        return cls.model_construct(**given)

    def hints(self) -> Iterator[GivenHint]:
        """Yields the hints that were given here and in the parts within, and fields without effect. The
        paths of a list's parts have no place in them: a thousand messages would fill the header."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Body):
                    within = part.hints()
                    yield from (replace(each, path=f"{name}.{each.path}") for each in within)
            if value is not None:
                marks = (each for each in field.metadata if isinstance(each, Hint))
                yield from (GivenHint(name, each, value) for each in marks)
        for name, value in self._left_out.items():
            if (does := self.without_effect.get(name, ())) is not None:
                yield GivenHint(name, Hint(does=does), value)

    def ignored(self) -> Iterator[str]:
        """Yields the paths of fields that have no effect, but for those that a chat template may read."""
        for each in self.hints():
            if each.hint.needs_telling(each.value) and not each.hint.is_for_template:
                yield each.path

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
    @cache
    def _integer_fields(cls) -> frozenset[str]:
        """Returns the names of fields that hold integers and no other numbers."""
        kinds = {name: [*_kinds(each.annotation)] for name, each in cls._fields_by_name().items()}
        return frozenset(name for name in kinds if int in kinds[name] and float not in kinds[name])

    @classmethod
    def _refusal(cls, name: str, value: Any) -> str | None:
        """Returns what rules out a value of an unsupported or fixed field."""
        if name in cls.unsupported:
            return f"is not supported: {cls.unsupported[name]}" if value else None
        allowed = cls.fixed[name]
        if _is_one_of(value, allowed):
            return None
        return f"only {' or '.join(map(repr, allowed))} is supported"

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        described = handler(schema)
        properties = handler.resolve_ref_schema(described).setdefault("properties", {})
        for name, field in cls._fields_by_name().items():
            if name in properties and not field.is_required():
                properties[name] = _or_null(properties[name])
        for name in cls.without_effect.keys() - cls._fields_by_name().keys():
            properties[name] = {"description": "Accepted; has no effect."}
        properties |= {name: properties[own] for name, own in cls.synonyms.items()}
        return described


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yields what a type is made of, however deep."""
    yield annotation
    for each in get_args(annotation):
        yield from _kinds(each)


def _is_one_of(value: Any, allowed: Iterable[Any]) -> bool:
    # bool is an int to Python: ``0 in (False,)`` must not pass for false.
    return any(type(value) is type(each) and value == each for each in allowed)


def integral(value: Any) -> Any:
    """The value, or a list's values, with integers in the place of floats such as 8.0."""
    if isinstance(value, list):
        return [integral(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def part_of(kind: type[Model], index: int, value: object) -> Model:
    """The part of a list at this index, in a validator of our own. Raises ValidationError."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        raise refusal(index, *found["loc"], message=str(found["msg"])) from error


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
        return with_fields(added)(model)

    return describe


def optional(description: str, default: Any = None, **bounds: Any) -> Any:
    """Returns a field that may be left out. ``bounds``: by pydantic's names."""
    return Field(default=default, description=description, **bounds)


def with_fields(added: Mapping[str, Any]) -> Callable[[type[Model]], type[Model]]:
    """Gives a model further fields: by name, type and ``Field``."""

    def add(model: type[Model]) -> type[Model]:
        about: dict[str, Any] = {"__doc__": model.__doc__, "__module__": model.__module__}
        return create_model(model.__name__, __base__=model, **about, **added)

    return add


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
    value = integral(value)
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
StopString = Annotated[str, MinLen(1), MaxLen(MAX_STOP_CHARS)]
StopField = Annotated[
    Any,
    PlainValidator(
        _parse_stop,
        json_schema_input_type=StopString | Annotated[list[StopString], MaxLen(MAX_STOP_STRINGS)],
    ),
]
