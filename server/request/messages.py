"""Messages and tools of a chat: what requests may say of them, and what chat templates are given."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, NotRequired, Self

from annotated_types import MinLen
from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.config import JsonDict
from typing_extensions import TypedDict

from server.errors import refused
from server.request.body import Body, Hint, in_case, optional, refusal
from server.request.foreign_parts import ForeignPart, find_foreign_part

TEXT_ONLY = "text only"
MAX_TOOLS = 128
NAME_PATTERN = "^[A-Za-z0-9_-]{1,64}$"
_MODES = ("none", "auto", "required")


CACHED = Hint("the prefix cache holds every full block of itself")
"""What comes of marks of where others cut their prefix caches."""


class CacheControl(Body):
    """Where others cut their prefix caches; this server's holds every full block."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


def _check_parameters(schema: dict[str, JsonValue]) -> dict[str, JsonValue]:
    if schema.get("type", "object") != "object":
        raise ValueError("arguments are an object, so the schema's 'type' is 'object'")
    if not isinstance(schema.get("properties", {}), dict):
        raise ValueError("'properties' is an object of schemas")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        raise ValueError("'required' is a list of names")
    return schema


ParametersField = Annotated[
    dict[str, JsonValue],
    AfterValidator(_check_parameters),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"const": "object"},
                "properties": {"type": "object"},
                "required": {"type": "array", "items": {"type": "string"}},
            },
        }
    ),
]


class FunctionDefinition(Body):
    """``strict``: whenever the function is called, its arguments match the schema."""

    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    parameters: ParametersField | None = optional(
        "JSON schema of the arguments; default: any object."
    )
    strict: bool | None = None

    def schema_of_arguments(self) -> dict[str, JsonValue]:
        return {"type": "object", **(self.parameters or {"properties": {}})}

    def for_template(self) -> dict[str, JsonValue]:
        """As chat templates expect it."""
        told: dict[str, JsonValue] = {
            "name": self.name,
            "parameters": self.schema_of_arguments(),
        }
        return told if self.description is None else told | {"description": self.description}


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Annotated[CacheControl | None, CACHED] = None


def _check_names(tools: list[Tool]) -> list[Tool]:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in seen:
            name = tool.function.name
            raise refusal(index, "function", "name", message=f"{name!r} is there twice")
        seen.add(tool.function.name)
    return tools


ToolsField = Annotated[list[Tool], AfterValidator(_check_names)]


class _NamedFunction(Body):
    name: str


class NamedTool(Body):
    """The one function to call."""

    unsupported: ClassVar[dict[str, str]] = {
        "allowed_tools": "send only the tools that may be called",
        "custom": "functions only",
    }

    type: Literal["function"]
    function: _NamedFunction


def _parse_tool_choice(value: object) -> str | NamedTool:
    if isinstance(value, str) and value in _MODES:
        return value
    if isinstance(value, dict):
        return NamedTool.model_validate(value)
    raise ValueError("must be 'none', 'auto', 'required' or an object that names a function")


ToolChoiceField = Annotated[
    Any,
    PlainValidator(
        _parse_tool_choice,
        json_schema_input_type=Literal["none", "auto", "required"] | NamedTool | None,
    ),
]


class ToolFields(Body):
    """The fields of a chat on tools and on reasoning."""

    tools: ToolsField | None = optional(
        "Functions that may be called.", min_length=1, max_length=MAX_TOOLS
    )
    tool_choice: ToolChoiceField = optional(
        "auto (the default with tools), none, required, or a function."
    )
    parallel_tool_calls: bool | None = optional(
        "Whether a reply may have several calls; default: true."
    )
    include_reasoning: bool = optional("Show reasoning that is split off.", default=True)

    @property
    def must_call(self) -> bool:
        """Whether there is a call, and no text."""
        return self.tool_choice not in (None, "auto", "none")

    @property
    def shown_tools(self) -> Sequence[Tool]:
        """Those that the model is shown: none where it is to call none."""
        return [] if self.tool_choice == "none" else self.tools or []


class _CalledFunction(Body):
    name: str = Field(min_length=1, max_length=128)
    arguments: str = Field(description="JSON text of an object.")


class MessageToolCall(Body):
    """A call that the assistant made before."""

    unsupported: ClassVar[dict[str, str]] = {"custom": "functions only"}

    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: _CalledFunction


def _parse_content(value: object) -> str | ForeignPart:
    """Text, or text parts joined with line breaks; who knows the model refuses other parts."""
    if isinstance(value, str):
        return value
    if (foreign := find_foreign_part(value)) is not None:
        return foreign
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a non-empty list of text parts")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ValueError("a part is an object with a 'type'")
        if part["type"] != "text":
            raise ValueError("only parts of type 'text' are supported")
        if part.keys() - {"cache_control"} != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(
                "a text part has a string 'text', and nothing else but 'cache_control'"
            )
        _check_cache_mark(index, part.get("cache_control"))
        texts.append(part["text"])
    return "\n".join(texts)


def _check_cache_mark(index: int, mark: object) -> None:
    if mark is None:
        return
    try:
        CacheControl.model_validate(mark)
    except ValidationError as error:
        message = "is an object of type 'ephemeral', whose 'ttl' is '5m' or '1h'"
        raise refusal(index, "cache_control", message=message) from error


class TextPart(TypedDict, closed=True):
    type: Literal["text"]
    text: str
    cache_control: NotRequired[CacheControl | None]


_Parts = Annotated[list[TextPart], MinLen(1)]
ContentField = Annotated[Any, PlainValidator(_parse_content, json_schema_input_type=str | _Parts)]


_TEXT: JsonDict = {"type": ["string", "array"]}
_SOME: JsonDict = {"type": "string", "minLength": 1}
_SEVERAL: JsonDict = {"type": "array", "minItems": 1}
_OWN_FIELDS = {
    "tool": ("name", "tool_call_id"),
    "assistant": ("tool_calls", "reasoning_content", "reasoning"),
}
_FORMS: dict[str, list[dict[str, JsonDict]]] = {
    **dict.fromkeys(("system", "developer", "user"), [{"content": _TEXT}]),
    "assistant": [{"content": _TEXT}, {"tool_calls": _SEVERAL}, {"reasoning_content": _SOME}],
    "tool": [{"tool_call_id": _SOME, "content": _TEXT}],
}
"""The fields that messages hold at least, by role: all of one of these."""


def _foreign_to(role: str) -> tuple[str, ...]:
    """Returns the fields that messages of this role have no place for."""
    return tuple(chain(*(names for owner, names in _OWN_FIELDS.items() if owner != role)))


_MESSAGES: JsonDict = {
    "anyOf": [
        in_case({"role": {"const": role}, **form}, _foreign_to(role))
        for role, forms in _FORMS.items()
        for form in forms
    ]
}


class ChatMessage(Body):
    """``developer`` is handed to the chat template as ``system``. Only the assistant has tool calls and
    reasoning, and then it needs no content; only a tool has ``tool_call_id``, and needs it.
    """

    model_config = ConfigDict(json_schema_extra=_MESSAGES)

    unsupported: ClassVar[dict[str, str]] = {
        "function_call": "use 'tool_calls'",
        "audio": TEXT_ONLY,
        "refusal": "send the text as 'content'",
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: ContentField | None = None
    name: str | None = optional("Of a tool's message: its function.")
    tool_calls: list[MessageToolCall] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_call_id: str | None = Field(default=None, max_length=256)
    reasoning_content: str | None = None
    reasoning: str | None = optional("The same as 'reasoning_content'.")
    cache_control: Annotated[CacheControl | None, CACHED] = optional(
        "In text parts and tools, too."
    )
    annotations: Annotated[list[JsonValue] | None, Hint(does=([],))] = optional(
        "Of a reply that is sent back: its text says all."
    )
    id: Annotated[str | None, Hint()] = optional("Of a reply that is sent back.")
    provider_specific_fields: Annotated[dict[str, JsonValue] | None, Hint(does=({},))] = optional(
        "What gateways add to replies."
    )

    @property
    def thoughts(self) -> str:
        return self.reasoning_content or self.reasoning or ""

    @model_validator(mode="after")
    def _suits_its_role(self) -> Self:
        for name in _foreign_to(self.role):
            if getattr(self, name):
                raise refusal(name, message=f"messages of {self.role!r} have no place for it")
        if self.reasoning and self.reasoning_content not in (None, self.reasoning):
            raise refusal("reasoning", message="contradicts 'reasoning_content'")
        missing = [[name for name in form if not self._has(name)] for form in _FORMS[self.role]]
        if all(missing):
            raise refusal(missing[0][0], message="is missing")
        return self

    def _has(self, name: str) -> bool:
        if name == "content":
            return self.content is not None
        return bool(self.thoughts if name == "reasoning_content" else getattr(self, name))


def refuse_foreign_parts(messages: Sequence[ChatMessage], unserved: Collection[str]) -> None:
    """Raises ApiError 400 for the first content that is not text alone. ``unserved``: the model's parts
    besides text."""
    for index, message in enumerate(messages):
        if isinstance(message.content, ForeignPart):
            raise message.content.refusal(f"messages.{index}.content", unserved)


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools as chat templates take them."""
    return [{"type": "function", "function": each.function.for_template()} for each in tools]


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as chat templates take them: ``developer`` is ``system``; arguments of calls are
    objects; a tool's message has its function's name. A field that a message has not is not there.

    Raises ApiError 400 where arguments are no object, or a tool answers to a call that was not made.
    """
    names: dict[str, str] = {}
    found = []
    for index, message in enumerate(messages):
        field = f"messages.{index}"
        told: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            # Templates join contents to other text, and null to none.
            "content": message.content or "",
        }
        if message.thoughts:
            told["reasoning_content"] = message.thoughts
        if message.tool_calls:
            told["tool_calls"] = [
                _template_call(call, f"{field}.tool_calls.{place}.function.arguments")
                for place, call in enumerate(message.tool_calls)
            ]
            names |= {call.id: call.function.name for call in message.tool_calls}
        if message.role == "tool":
            told |= _answered(message, names, field)
        found.append(told)
    return found


def _template_call(call: MessageToolCall, field: str) -> dict[str, Any]:
    text = call.function.arguments
    try:
        # Clients write no arguments as no text.
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise refused(field, "is not the text of a JSON object") from error
    if not isinstance(arguments, dict):
        raise refused(field, "is not the text of a JSON object")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _answered(message: ChatMessage, names: dict[str, str], field: str) -> dict[str, Any]:
    called = message.tool_call_id or ""
    if called not in names:
        reason = ": no message before this one has a tool call of this id"
        raise refused(f"{field}.tool_call_id", reason)
    if message.name not in (None, names[called]):
        raise refused(f"{field}.name", f": the call was of {names[called]!r}")
    return {"tool_call_id": called, "name": names[called]}
