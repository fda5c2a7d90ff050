"""``POST /v1/responses``: its fields, and the chat request that says the same.

Nothing is stored, so a conversation is sent whole: what came out of one request goes into the next as
it is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import MaxLen, MinLen
from pydantic import (
    ConfigDict,
    Field,
    JsonValue,
    PlainValidator,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.config import JsonDict

from engine.request.params import SamplingParams
from server.errors import ApiError, refused
from server.plan import RequestPlan
from server.request.body import Body, WithoutEffect, in_case, optional, refusal
from server.request.foreign_parts import ForeignPart, find_foreign_part
from server.request.grammars import Schema
from server.request.messages import (
    MAX_TOOLS,
    NAME_PATTERN,
    ArgumentsField,
    FunctionDefinition,
    text_of,
)
from server.request.parsing import check
from server.request.protocol import (
    TOKEN_LIMIT,
    VERBOSITY,
    WITHOUT_EFFECT,
    ChatRequest,
    CommonFields,
    EventOptions,
    ReasoningOptions,
    Verbosity,
)
from server.request.translate import SERVICE_TIER, Translator

MAX_ITEMS = 1 << 14
_STATELESS = "nothing is stored here; send the items themselves"


class InputTextPart(Body):
    """Text; ``annotations`` and ``logprobs`` come with parts of replies and say nothing to the model."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[JsonValue] | None = Field(default=None, max_length=0)
    logprobs: list[JsonValue] | None = Field(default=None, max_length=0)


def _parse_parts(value: object, parse: ValidatorFunctionWrapHandler) -> Any:
    """Parts that are no text are refused by those who know the model."""
    return find_foreign_part(value) or parse(value)


_Content = Annotated[str | list[InputTextPart], WrapValidator(_parse_parts)]


class InputReasoningPart(Body):
    type: Literal["reasoning_text"]
    text: str


class _Item(Body):
    """The fields of all items. ``for_chat`` returns the message of a chat that says the same."""

    unsupported: ClassVar[dict[str, str]] = {"phase": "the model is not told of it"}
    without_effect: ClassVar[WithoutEffect] = {"name": ()}

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    def for_chat(self) -> dict[str, Any]:
        raise NotImplementedError


class InputMessage(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content

    def for_chat(self) -> dict[str, Any]:
        return {"role": self.role, "content": text_of(self.content)}


class InputCall(_Item):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=128)
    arguments: ArgumentsField

    def for_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}


class InputCallOutput(_Item):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=256)
    output: _Content

    def for_chat(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": text_of(self.output)}


class InputReasoning(_Item):
    unsupported: ClassVar[dict[str, str]] = {"encrypted_content": "send it as 'content'"}

    type: Literal["reasoning"]
    summary: list[JsonValue] | None = Field(default=None, max_length=0)
    content: list[InputReasoningPart] | None = None

    def for_chat(self) -> dict[str, Any]:
        text = "\n".join(part.text for part in self.content or [])
        return {"role": "assistant", "reasoning_content": text} if text else {"role": "assistant"}


_ITEMS: dict[object, type[_Item]] = {
    "message": InputMessage,
    "function_call": InputCall,
    "function_call_output": InputCallOutput,
    "reasoning": InputReasoning,
}


def _parse_input(value: object) -> list[_Item]:
    """A text is a message of the user."""
    if isinstance(value, str):
        return [InputMessage(role="user", content=value)]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text or a non-empty list of items")
    if len(value) > MAX_ITEMS:
        raise ValueError(f"takes at most {MAX_ITEMS} items")
    return [_parse_item(index, item) for index, item in enumerate(value)]


def _parse_item(index: int, item: object) -> _Item:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if not isinstance(kind, str) or kind not in _ITEMS:
        message = f"must be an object of type {', '.join(str(each) for each in _ITEMS)}"
        if kind == "item_reference":
            message = f"is not supported: {_STATELESS}"
        raise refusal(index, "type", message=message)
    try:
        return _ITEMS[kind].model_validate(item)
    except ValidationError as error:
        # Where a text or parts may stand, what is wrong with the parts says more.
        found = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
        place = [each for each in found["loc"] if each != "str" and "list[" not in str(each)]
        raise refusal(index, *place, message=str(found["msg"])) from error


_Items = Annotated[
    list[InputMessage | InputCall | InputCallOutput | InputReasoning],
    MinLen(1),
    MaxLen(MAX_ITEMS),
]
InputField = Annotated[Any, PlainValidator(_parse_input, json_schema_input_type=str | _Items)]


class FunctionTool(FunctionDefinition):
    """A function that may be called."""

    type: Literal["function"]


class _NamedFunction(Body):
    type: Literal["function"]
    name: str = Field(pattern=NAME_PATTERN)

    def for_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name}}


class _AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[_NamedFunction] = Field(min_length=1, max_length=MAX_TOOLS)

    def for_chat(self) -> dict[str, Any]:
        allowed = {"mode": self.mode, "tools": [each.for_chat() for each in self.tools]}
        return {"type": self.type, "allowed_tools": allowed}


_OF_SCHEMAS = ("name", "schema", "description", "strict")
_FORMATS: JsonDict = {
    "anyOf": [
        in_case({"type": {"enum": ["text", "json_object"]}}, _OF_SCHEMAS),
        in_case(
            {
                "type": {"const": "json_schema"},
                "name": {"type": "string"},
                "schema": {"type": ["object", "boolean"]},
            }
        ),
    ]
}


class TextFormat(Body):
    """``name``, ``schema``, ``strict`` and ``description`` belong to ``json_schema``."""

    model_config = ConfigDict(json_schema_extra=_FORMATS)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, pattern=NAME_PATTERN)
    description: str | None = Field(default=None, max_length=4096)
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _suits_its_type(self) -> Self:
        given = self.model_dump(by_alias=True, exclude_none=True)
        for name in _OF_SCHEMAS:
            if self.type != "json_schema" and name in given:
                raise refusal(name, message=f"has no effect with type {self.type!r}")
            if self.type == "json_schema" and name in ("name", "schema") and name not in given:
                raise refusal(name, message="is missing")
        return self

    def for_chat(self) -> dict[str, Any]:
        given = self.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        return {"type": self.type, "json_schema": given} if given else {"type": self.type}


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Annotated[Verbosity | None, VERBOSITY] = optional("For chat templates that read it.")


class ResponsesRequest(CommonFields):
    """``POST /v1/responses``."""

    unsupported: ClassVar[dict[str, str]] = {
        "previous_response_id": _STATELESS,
        "conversation": _STATELESS,
        "prompt": _STATELESS,
        "top_logprobs": "use /v1/chat/completions",
        "context_management": "shorten the input before sending it",
    }
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {
        "background": (False,),
        "truncation": ("disabled",),
    }
    # No tool runs here, and a response has what it has.
    without_effect: ClassVar[WithoutEffect] = {
        **WITHOUT_EFFECT,
        "max_tool_calls": (),
        "include": ([],),
    }

    input: InputField = Field(description="A text, or the items of a conversation.")
    instructions: str | None = optional("A system message before the input.")
    max_output_tokens: int | None = optional(
        "Default and -1: what the context has room for.", **TOKEN_LIMIT
    )
    top_p: float | None = optional("Default 1.", gt=0, le=1)
    tools: list[FunctionTool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | _NamedFunction | _AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = optional("'format': what the text has to match.")
    reasoning: ReasoningOptions | None = None
    stream_options: EventOptions | None = None

    def for_chat(self) -> ChatRequest:
        """The chat request that says the same. Raises ApiError 400, in the chat's words."""
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "needs 'stream': true")
        messages = _messages(self.instructions, self.input)
        if not messages:
            raise refused("input", ": nothing in it says anything")
        tools = [tool.model_dump(exclude={"type"}) for tool in self.tools or []]
        given: dict[str, Any] = {
            **{name: getattr(self, name) for name in CommonFields.model_fields},
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "tools": [{"type": "function", "function": tool} for tool in tools],
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "top_p": self.top_p,
            "reasoning": self.reasoning,
        }
        if self.text is not None and self.text.format is not None:
            given["response_format"] = self.text.format.for_chat()
        if self.text is not None:
            given["verbosity"] = self.text.verbosity
        return check(ChatRequest, given)

    def repeated(self, sampling: SamplingParams) -> dict[str, JsonValue]:
        """Returns the fields that a response repeats. ``sampling``: what became of its fields."""
        text = self.text.model_dump(by_alias=True, exclude_none=True) if self.text else {}
        effort = self.reasoning.effort if self.reasoning else None
        tools = [tool.model_dump() for tool in self.tools or []]
        choice = self.tool_choice or "auto"
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": dict(self.metadata or {}),
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": effort, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": SERVICE_TIER,
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": tools,  # type: ignore[dict-item]
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": self.user,
        }

    def _tool_choice(self) -> Any:
        choice = self.tool_choice
        return choice.for_chat() if isinstance(choice, Body) else choice


def _messages(instructions: str | None, items: Sequence[_Item]) -> list[dict[str, Any]]:
    """Reasoning, text and calls of one turn are one message of the assistant."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for message in (item.for_chat() for item in items):
        last = messages[-1] if messages else {}
        both = last.keys() & message.keys() - {"role", "tool_calls"}
        begins_turn = "reasoning_content" in message
        if message["role"] == last.get("role") == "assistant" and not (both or begins_turn):
            calls = last.get("tool_calls", []) + message.get("tool_calls", [])
            last |= message | ({"tool_calls": calls} if calls else {})
        elif any(message.keys() - {"role"}):
            messages.append(message)
    return messages


_RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
    "verbosity": "text.verbosity",
}


def plan_response(
    translator: Translator, body: ResponsesRequest, arrival_time: float
) -> RequestPlan:
    """``Translator.plan`` for the chat request that says the same. Raises ApiError in the words of this
    one."""
    _refuse_foreign_parts(body.input, translator.info.unserved)
    try:
        plan = translator.plan(body.for_chat(), arrival_time)
    except ApiError as error:
        raise _in_own_words(error) from error
    repeated = body.repeated(plan.choices[0].request.sampling)
    return plan.in_words_of(_own_name, body.ignored(), repeated)


def _refuse_foreign_parts(items: Sequence[_Item], unserved: Collection[str]) -> None:
    for index, item in enumerate(items):
        for name in ("content", "output"):
            found = getattr(item, name, None)
            if isinstance(found, ForeignPart):
                raise found.refusal(f"input.{index}.{name}", unserved)


def _in_own_words(error: ApiError) -> ApiError:
    """A refusal of the chat request, with the field of this one that is at fault."""
    return error.about(_own_name(error.param)) if error.param else error


def _own_name(param: str) -> str:
    """The field of this request that became the chat request's."""
    if param.startswith("tools."):
        return param.replace(".function.", ".")
    for name, new in _RENAMED.items():
        if param == name or param.startswith(f"{name}."):
            # Messages and items are not the same in number.
            return new if name == "messages" else new + param.removeprefix(name)
    return param
