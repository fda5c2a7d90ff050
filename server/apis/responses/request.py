"""``POST /v1/responses``: its fields, and the chat that says the same.

A conversation is sent whole, or goes on from a response that is kept. What came out of one request goes
into the next as it is, and so does what other servers and their tools left there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import MaxLen, MinLen
from pydantic import (
    ConfigDict,
    Field,
    JsonValue,
    PlainValidator,
    WithJsonSchema,
    WrapValidator,
)

from engine.request.params import SamplingParams
from server.apis.responses.tools import (
    CHOICE_FIELD,
    TOOLS_FIELD,
    AllowedTools,
    HostedTool,
    NamedTool,
    ShownTool,
    TextFormat,
    qualified,
    shown_tools,
)
from server.errors import ApiError, OwnNames, bad_request, clip, refused
from server.plan import OfResponse, RequestPlan
from server.request.body import Body, WithoutEffect, optional
from server.request.chat import (
    TOKEN_LIMIT,
    VERBOSITY,
    WITHOUT_EFFECT,
    Chat,
    CommonFields,
    EventOptions,
    ReasoningOptions,
    Verbosity,
)
from server.request.foreign_parts import find_foreign_part, refuse_foreign_parts
from server.request.grammars import JsonSchema, ResponseFormat, Schema
from server.request.kinds import Kinds, any_of, one_of, parse_as, parse_each
from server.request.messages import (
    NAME_PATTERN,
    ArgumentsField,
    ChatMessage,
    MessageToolCall,
    Tool,
    text_of,
)
from server.request.translate import SERVICE_TIER, Translator

MAX_ITEMS = 1 << 14
_STATELESS = "send the items themselves, or 'previous_response_id'"
Known = Mapping[str, bytes]
"""Responses that are kept, by id: JSON of ``items``, all that came before, and of ``response``."""


# --- items ---


class InputTextPart(Body):
    """Text; ``annotations`` and ``logprobs`` come with parts of replies and say nothing to the model."""

    without_effect: ClassVar[WithoutEffect] = {"annotations": ([],), "logprobs": ([],)}

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


# Parts that are no text are refused by those who know the model.
_Content = Annotated[
    str | list[InputTextPart],
    WrapValidator(lambda value, parse: find_foreign_part(value) or parse(value)),
]


class _Item(Body):
    """The fields of all items. ``for_chat`` returns those of the message of a chat that says the same."""

    without_effect: ClassVar[WithoutEffect] = {"name": (), "phase": ()}

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] | None = None

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
    namespace: str | None = Field(default=None, min_length=1, max_length=128)
    arguments: ArgumentsField

    def for_chat(self) -> dict[str, Any]:
        return _call(self.call_id, qualified(self.name, self.namespace), self.arguments)


class InputCustomCall(InputCall):
    type: Literal["custom_tool_call"]  # type: ignore[assignment]
    arguments: str = Field(alias="input")

    def for_chat(self) -> dict[str, Any]:
        given = json.dumps({"input": self.arguments}, ensure_ascii=False)
        return _call(self.call_id, qualified(self.name, self.namespace), given)


class InputCallOutput(_Item):
    """Its call is found by the id."""

    without_effect: ClassVar[WithoutEffect] = {"name": None, "namespace": None, "phase": ()}

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str = Field(min_length=1, max_length=256)
    output: _Content

    def for_chat(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": text_of(self.output)}


class InputReasoning(_Item):
    """The model is shown the summary where nothing else can be read."""

    without_effect: ClassVar[WithoutEffect] = _Item.without_effect | {"encrypted_content": ()}

    type: Literal["reasoning"]
    summary: list[InputTextPart] | None = None
    content: list[InputTextPart] | None = None

    def for_chat(self) -> dict[str, Any]:
        text = text_of(self.content or self.summary)
        return {"role": "assistant", "reasoning_content": text} if text else {"role": "assistant"}


class ItemReference(_Item):
    """An item that came out of a response that is kept."""

    type: Literal["item_reference"]
    id: str

    @property
    def response_id(self) -> str:
        return f"resp_{self.id.partition('_')[2].rpartition('-')[0]}"

    def found(self, known: Known) -> _Item:
        """Raises ApiError 404."""
        kept = known.get(self.response_id, b'{"response": {"output": []}}')
        for each in json.loads(kept)["response"]["output"]:
            if each["id"] == self.id:
                item: _Item = parse_as(_ITEMS, each)
                return item
        message = f"Item with id '{clip(self.id, 64)}' not found: its response is not kept."
        raise ApiError(404, message, param="input", code="item_not_found")


_FOREIGN = (  # noqa: SIM905
    "additional_tools agent_message apply_patch_call apply_patch_call_output code_interpreter_call "
    "compaction configuration_update context_compaction file_search_call image_generation_call "
    "local_shell_call local_shell_call_output mcp_approval_request mcp_approval_response mcp_call "
    "mcp_list_tools shell_call shell_call_output tool_search_call tool_search_output web_search_call"
).split()


class ForeignItem(_Item):
    """Items that other servers and their tools left. The model is shown calls with an id, and what came
    of them, as those of a function; the rest is left out."""

    model_config = ConfigDict(extra="allow")
    without_effect: ClassVar[WithoutEffect] = {}

    type: Annotated[str, WithJsonSchema({"enum": _FOREIGN})]
    status: str | None = None  # type: ignore[assignment]
    call_id: str | None = Field(default=None, min_length=1, max_length=256)

    def for_chat(self) -> dict[str, Any]:
        said = json.dumps(self.model_extra, ensure_ascii=False)
        if self.type.endswith("_output"):
            output = (self.model_extra or {}).get("output")
            content = output if isinstance(output, str) else said
            return {"role": "tool", "tool_call_id": self.call_id or self.id, "content": content}
        if self.call_id is None:
            return {"role": "assistant"}
        return _call(self.call_id, self.type.removesuffix("_call"), said)


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [MessageToolCall.to(name, arguments, call_id)]}


_ITEMS: Kinds = {
    "message": InputMessage,
    "function_call": InputCall,
    "function_call_output": InputCallOutput,
    "custom_tool_call": InputCustomCall,
    "custom_tool_call_output": InputCallOutput,
    "reasoning": InputReasoning,
    "item_reference": ItemReference,
    **dict.fromkeys(_FOREIGN, ForeignItem),
}


def _parse_input(value: object) -> Any:
    """A text is a message of the user."""
    if isinstance(value, str):
        return [InputMessage(role="user", content=value)]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text or a non-empty list of items")
    return parse_each(_ITEMS, value, "message", MAX_ITEMS)


_AnyItem = any_of(_ITEMS)
_Items = Annotated[list[_AnyItem], MinLen(1), MaxLen(MAX_ITEMS)]  # type: ignore[valid-type]
InputField = Annotated[Any, PlainValidator(_parse_input, json_schema_input_type=str | _Items)]


# --- the request ---


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]
    name: str = Field(pattern=NAME_PATTERN)
    schema_: Schema = Field(alias="schema")


_FORMATS: Kinds = {"text": TextFormat, "json_object": TextFormat, "json_schema": SchemaFormat}


class TextConfig(Body):
    format: Annotated[Any, one_of(_FORMATS)] = None
    verbosity: Annotated[Verbosity | None, VERBOSITY] = optional("For chat templates that read it.")


class ResponsesRequest(CommonFields):
    """``POST /v1/responses``."""

    unsupported: ClassVar[dict[str, str]] = {
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
    previous_response_id: str | None = optional("What it goes on from, with all that came before.")
    instructions: str | None = optional("A system message before the input.")
    max_output_tokens: int | None = optional(
        "Default and -1: what the context has room for.", **TOKEN_LIMIT
    )
    top_p: float | None = optional("Default 1.", gt=0, le=1)
    tools: Annotated[Any, TOOLS_FIELD] = None
    tool_choice: Annotated[Any, CHOICE_FIELD] = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = optional("'format': what the text has to match.")
    reasoning: ReasoningOptions | None = None
    stream_options: EventOptions | None = None
    store: bool | None = optional("Whether requests may go on from it; default true.")

    def items(self, known: Known) -> list[_Item]:
        """The whole conversation. Raises ApiError."""
        before = []
        if (previous := self.previous_response_id) is not None:
            if previous not in known:
                message = f"Previous response with id '{clip(previous, 64)}' not found."
                raise bad_request("previous_response_id", message, "previous_response_not_found")
            kept = json.loads(known[previous])
            before = [*kept["items"], *kept["response"]["output"]]
        own = (x.found(known) if isinstance(x, ItemReference) else x for x in self.input)
        return [*(parse_as(_ITEMS, each, "message") for each in before), *own]

    def for_chat(
        self, items: Sequence[_Item], functions: Sequence[ShownTool], names: OwnNames
    ) -> Chat:
        """The chat that says the same. ``names``: of its fields here. Raises ApiError 400."""
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "needs 'stream': true")
        messages = _messages(self.instructions, items)
        if not messages:
            raise refused("input", ": nothing in it says anything")
        choice = self.tool_choice
        given: dict[str, Any] = {
            **{name: getattr(self, name) for name in CommonFields.model_fields},
            "messages": messages,
            "max_tokens": self.max_output_tokens,
            "tools": [Tool.of(function=each.shown) for each in functions],
            "tool_choice": choice.for_chat()
            if isinstance(choice, NamedTool | AllowedTools)
            else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "top_p": self.top_p,
            "reasoning": self.reasoning,
        }
        if self.text is not None and self.text.format is not None:
            form = self.text.format
            schema = form if isinstance(form, SchemaFormat) else None
            given["response_format"] = ResponseFormat.of(type=form.type, json_schema=schema)
        if self.text is not None:
            given["verbosity"] = self.text.verbosity
        return Chat.saying(given, names)

    def repeated(self, sampling: SamplingParams) -> dict[str, JsonValue]:
        """Returns the fields that a response repeats. ``sampling``: what became of its fields."""
        text = self.text.model_dump(by_alias=True, exclude_none=True) if self.text else {}
        choice = self.tool_choice or "auto"
        return {
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            "background": False,
            "metadata": dict(self.metadata or {}),
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {
                "effort": self.reasoning.effort if self.reasoning else None,
                "summary": None,
            },
            "service_tier": SERVICE_TIER,
            "store": self.store is not False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": choice.model_dump() if isinstance(choice, Body) else choice,
            "tools": [tool.model_dump() for tool in self.tools or []],
            "top_p": sampling.top_p,
            "truncation": "disabled",
        }


_AS_THEY_ARE = (
    "instructions",
    "max_output_tokens",
    "previous_response_id",
    "prompt_cache_key",
    "safety_identifier",
    "user",
)


def _messages(instructions: str | None, items: Sequence[_Item]) -> list[ChatMessage]:
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
    return [ChatMessage.of(**each) for each in messages]


_NAMES = {
    # Messages and items are not the same in number.
    **dict.fromkeys(("messages", "messages.*"), "input"),
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "tool_choice.function": "tool_choice",
    "verbosity": "text.verbosity",
}


def references(_: Translator, body: ResponsesRequest) -> list[str]:
    """Returns the ids of responses that the body goes on from or refers to."""
    found = [each.response_id for each in body.input if isinstance(each, ItemReference)]
    return [*found, *([body.previous_response_id] if body.previous_response_id else [])]


def plan_response(
    translator: Translator, body: ResponsesRequest, arrival_time: float, *, known: Known
) -> RequestPlan:
    """``Translator.plan`` for the chat that says the same. Raises ApiError."""
    refuse_foreign_parts(body.input, "input", translator.info.unserved)
    items, functions = body.items(known), shown_tools(body.tools or [], body.tool_choice)
    paths = dict(_NAMES)
    for index, each in enumerate(functions):
        paths |= each.names(f"tools.{index}")
    names = OwnNames(paths)
    plan = translator.plan(body.for_chat(items, functions, names), arrival_time, names)
    unseen = [each for each in body.input if isinstance(each, ForeignItem)]
    ignored = [*body.ignored()]
    ignored += [f"input.{each.type}" for each in unseen if not each.for_chat().keys() - {"role"}]
    ignored += [f"tools.{each.type}" for each in body.tools or [] if isinstance(each, HostedTool)]
    response = OfResponse(
        repeated=body.repeated(plan.choices[0].request.sampling),
        items=[each.model_dump(by_alias=True, exclude_none=True) for each in items],
        calls={each.shown.name: each.call for each in functions},
    )
    return replace(plan, response=response).ignoring(ignored)
