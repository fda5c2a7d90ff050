"""Messages and tools of a chat: what requests may say of them, and what chat templates are given."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import MinLen
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import from_json

from server.errors import refused
from server.request.body import (
    Body,
    GivenHint,
    Hint,
    WithoutEffect,
    in_case,
    optional,
    part_of,
    refusal,
)
from server.request.foreign_parts import ForeignPart, find_foreign_part

TEXT_ONLY = "text only"
MAX_TOOLS = 128
NAME_PATTERN = "^[A-Za-z0-9_-]{1,64}$"
_MODES = ("none", "auto", "required")


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


CACHED: WithoutEffect = {"cache_control": None}
"""Marks of where others cut their prefix caches; this server's holds every full block of itself."""


class Tool(Body):
    without_effect: ClassVar[WithoutEffect] = CACHED

    type: Literal["function"] = "function"
    function: FunctionDefinition


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

    unsupported: ClassVar[dict[str, str]] = {"custom": "functions only"}

    type: Literal["function"]
    function: _NamedFunction


class _AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedTools(Body):
    """Those of the tools that may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


def _parse_tool_choice(value: object) -> str | NamedTool | AllowedTools:
    if isinstance(value, str) and value in _MODES:
        return value
    if isinstance(value, dict):
        is_several = value.get("type") == "allowed_tools"
        return (AllowedTools if is_several else NamedTool).model_validate(value)
    raise ValueError("must be 'none', 'auto', 'required' or an object that names a function")


ToolChoiceField = Annotated[
    Any,
    PlainValidator(
        _parse_tool_choice,
        json_schema_input_type=Literal["none", "auto", "required"]
        | NamedTool
        | AllowedTools
        | None,
    ),
]


class ToolFields(Body):
    """The fields of a chat on tools and on reasoning."""

    tools: ToolsField | None = optional("Functions that may be called.", max_length=MAX_TOOLS)
    tool_choice: ToolChoiceField = optional(
        "auto (the default with tools), none, required, a function, or allowed_tools."
    )
    parallel_tool_calls: bool | None = optional(
        "Whether a reply may have several calls; default: true."
    )
    include_reasoning: bool = optional("Show reasoning that is split off.", default=True)

    @property
    def must_call(self) -> bool:
        """Whether there is a call, and no text."""
        choice = self.tool_choice
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
        return mode not in (None, "auto", "none")

    @property
    def named(self) -> dict[str, str]:
        """The functions that the choice names, and the field that does; none: it is of all."""
        if isinstance(self.tool_choice, NamedTool):
            return {self.tool_choice.function.name: "tool_choice.function.name"}
        if not isinstance(self.tool_choice, AllowedTools):
            return {}
        names = [each.function.name for each in self.tool_choice.allowed_tools.tools]
        field = "tool_choice.allowed_tools.tools"
        return {name: f"{field}.{place}.function.name" for place, name in enumerate(names)}

    @property
    def shown_tools(self) -> Sequence[Tool]:
        """Those that the model is shown: none where it is to call none."""
        if self.tool_choice == "none":
            return []
        allowed = self.named if isinstance(self.tool_choice, AllowedTools) else {}
        return [each for each in self.tools or [] if not allowed or each.function.name in allowed]


def _as_text(value: object) -> object:
    """Returns the text of a value that clients may leave out or write as the object itself."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


ArgumentsField = Annotated[
    str, BeforeValidator(_as_text, json_schema_input_type=str | JsonValue), Field(default="")
]
"""The text of a call's arguments, whatever it is: a call that was cut off is sent back as it came."""


class CalledFunction(Body):
    without_effect: ClassVar[WithoutEffect] = {"parsed_arguments": (), "index": None}

    name: str = Field(min_length=1, max_length=128)
    arguments: ArgumentsField


class MessageToolCall(Body):
    """A call that the assistant made before."""

    unsupported: ClassVar[dict[str, str]] = {"custom": "functions only"}
    # The place in the list says the same.
    without_effect: ClassVar[WithoutEffect] = {"index": None}

    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction

    @classmethod
    def to(cls, name: str, arguments: str, call_id: str) -> MessageToolCall:
        return cls.of(id=call_id, function=CalledFunction.of(name=name, arguments=arguments))


class TextPart(Body):
    without_effect: ClassVar[WithoutEffect] = {
        **CACHED,
        **dict.fromkeys(("annotations", "citations", "logprobs"), ([],)),
        **dict.fromkeys(("id", "index", "parsed_output"), ()),
    }

    type: Literal["text"]
    text: str


def _parse_content(value: object) -> str | ForeignPart | list[TextPart]:
    """Text, or text parts; who knows the model refuses other parts."""
    if isinstance(value, str):
        return value
    if (foreign := find_foreign_part(value)) is not None:
        return foreign
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a non-empty list of text parts")
    return [part_of(TextPart, index, part) for index, part in enumerate(value)]


def text_of(content: str | list[Any] | None) -> str:
    """The text of a content whose parts all have a ``text``, joined with line breaks."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(each.text for each in content)


_Parts = Annotated[list[TextPart], MinLen(1)]
ContentField = Annotated[Any, PlainValidator(_parse_content, json_schema_input_type=str | _Parts)]


_TEXT: JsonDict = {"type": ["string", "array"]}
_SOME: JsonDict = {"type": "string", "minLength": 1}
_SEVERAL: JsonDict = {"type": "array", "minItems": 1}
_OWN_FIELDS = {
    "tool": ("tool_call_id",),
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
        "images": TEXT_ONLY,
        "refusal": "send the text as 'content'",
    }
    without_effect: ClassVar[WithoutEffect] = {
        **CACHED,
        **dict.fromkeys(("annotations", "reasoning_details", "thinking_blocks"), ([],)),
        **dict.fromkeys(("id", "parsed", "weight"), ()),
        "provider_specific_fields": ({},),
    }

    synonyms: ClassVar[dict[str, str]] = {"reasoning": "reasoning_content"}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: ContentField | None = None
    name: Annotated[str | None, Hint()] = optional(
        "Of a tool's message: its function; else the author, for chat templates that read it."
    )
    tool_calls: list[MessageToolCall] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_call_id: str | None = Field(default=None, max_length=256)
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _suits_its_role(self) -> Self:
        if (num := len(self.tool_calls or ())) > MAX_TOOLS:  # of several of a client's messages
            message = f"list should have at most {MAX_TOOLS} items after validation, not {num}"
            raise refusal("tool_calls", message=message)
        for name in _foreign_to(self.role):
            if getattr(self, name, None):
                raise refusal(name, message=f"messages of {self.role!r} have no place for it")
        missing = [[name for name in form if not self._has(name)] for form in _FORMS[self.role]]
        if all(missing):
            raise refusal(missing[0][0], message="is missing")
        return self

    def hints(self) -> Iterator[GivenHint]:
        return (each for each in super().hints() if each.path != "name" or self.role != "tool")

    def _has(self, name: str) -> bool:
        if name == "content":
            return self.content is not None
        return bool(getattr(self, name))


def template_messages(messages: Sequence[ChatMessage], takes_text: bool) -> list[dict[str, Any]]:
    """The messages as chat templates take them: ``developer`` is ``system``; arguments of calls are
    objects, or as they came where they are none and the template ``takes_text``; a tool's message has its
    function's name. A field that a message has not is not there.

    Raises ApiError 400 where a tool answers to a call that was not made.
    """
    names: dict[str, str] = {}
    found = []
    for index, message in enumerate(messages):
        told: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            # Templates join contents to other text, and null to none.
            "content": text_of(message.content),
        }
        if message.name:
            told["name"] = message.name
        if message.reasoning_content:
            told["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            told["tool_calls"] = [template_call(call, takes_text) for call in message.tool_calls]
            names |= {call.id: call.function.name for call in message.tool_calls}
        if message.role == "tool":
            told |= _answered(message, names, f"messages.{index}")
        found.append(told)
    return found


def template_call(call: MessageToolCall, takes_text: bool) -> dict[str, Any]:
    text = call.function.arguments
    try:
        # Clients write no arguments as no text, or null.
        arguments = {} if text.strip() in ("", "null") else from_json(text)
    except ValueError:
        arguments = text
    if not isinstance(arguments, dict):
        # A model that was cut off sees what it wrote; a template for objects alone would break on that.
        arguments = text if takes_text else {"arguments": text}
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
