"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: their fields, and the chat that says the
same.

Agents send many fields that change no text, and ask for more tokens than a small model's context has.
The former are hints; of the latter the text gets what there is room for.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from server.apis.anthropic.blocks import InputMessage, SystemField, Turn, system_text, turns
from server.errors import OwnNames, refused
from server.plan import RequestPlan
from server.request.body import (
    MAX_STOP_STRINGS,
    SWITCHES,
    Body,
    Hint,
    StopString,
    WithoutEffect,
    optional,
    refusal,
)
from server.request.chat import (
    EFFORT,
    MAX_COUNT,
    MAX_MESSAGES,
    TOKEN_LIMIT,
    WITHOUT_EFFECT,
    Chat,
    CommonFields,
    Effort,
    ReasoningOptions,
)
from server.request.foreign_parts import refuse_foreign_parts
from server.request.grammars import ResponseFormat
from server.request.messages import (
    CACHED,
    MAX_TOOLS,
    NAME_PATTERN,
    ChatMessage,
    FunctionDefinition,
    ParametersField,
    Tool,
)
from server.request.translate import Translator

_NOTHING_RUNS = "no tool runs here"
_STATELESS = "nothing is stored here; send the messages themselves"


class CustomTool(Body):
    """A function that may be called. ``input_examples`` are shown to the model with the schema."""

    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {"allowed_callers": (["direct"],)}
    without_effect: ClassVar[WithoutEffect] = CACHED | {
        "defer_loading": (False,),
        "eager_input_streaming": None,
    }

    type: Literal["custom"] = "custom"
    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    input_schema: ParametersField
    strict: bool | None = None
    input_examples: list[dict[str, JsonValue]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _runs_at_the_client(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "custom":
            message = (
                f"{kind!r} is not supported: {_NOTHING_RUNS}, and the model knows no tool of "
                "Anthropic's; give one of your own, with its 'input_schema'"
            )
            raise refusal("type", message=message)
        return data

    def for_chat(self) -> Tool:
        examples = {"examples": self.input_examples} if self.input_examples else {}
        function = FunctionDefinition.of(
            name=self.name,
            description=self.description,
            parameters={**self.input_schema, **examples},
            strict=self.strict,
        )
        return Tool.of(function=function)


class ToolChoice(Body):
    """``any``: one of the tools, or several; ``tool``: the one of this ``name``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_what_it_has_to(self) -> ToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            missing = "is missing" if self.name is None else f"has no effect with {self.type!r}"
            raise refusal("name", message=missing)
        return self

    def for_chat(self) -> Any:
        if self.name is not None:
            return {"type": "function", "function": {"name": self.name}}
        return {"any": "required"}.get(self.type, self.type)


class Thinking(Body):
    """``budget_tokens`` is for chat templates with such a variable; ``omitted``: thoughts are not
    shown."""

    type: Annotated[
        Literal["enabled", "disabled", "adaptive"], Hint(switches=SWITCHES, does=("adaptive",))
    ]
    budget_tokens: Annotated[int | None, Hint(variable="thinking_budget")] = optional(
        "For chat templates that read 'thinking_budget'.", ge=1, le=MAX_COUNT
    )
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _has_effect(self) -> Thinking:
        if self.type != "enabled" and self.budget_tokens is not None:
            raise refusal("budget_tokens", message=f"has no effect with type {self.type!r}")
        return self


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, JsonValue] = Field(alias="schema")


class OutputConfig(Body):
    effort: Annotated[Effort | None, EFFORT] = optional(
        "For chat templates that read it, or whether to think."
    )
    format: OutputFormat | None = optional("What the text has to match.")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: each for name, each in value.items() if each is not None}
    return value


_NAMES = {
    "stop": "stop_sequences",
    "continue_final_message": "messages",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "tool_choice.function": "tool_choice",
    "thinking": "thinking.type",
    "reasoning.max_tokens": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
}


class MessageFields(Body):
    """The fields of both endpoints."""

    unsupported: ClassVar[dict[str, str]] = {
        "container": f"{_NOTHING_RUNS}, and nothing is kept",
        "fallbacks": "one model is served",
        "compaction": "shorten the messages before sending them",
    }
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {"mcp_servers": ([],)}
    without_effect: ClassVar[WithoutEffect] = {**CACHED, "speed": ("standard",)}

    messages: list[InputMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: SystemField | None = optional("A text, or blocks of text.")
    tools: list[CustomTool] | None = optional("Functions that may be called.", max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = optional("For chat templates with a variable for it.")
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = optional("The same as 'output_config.format'.")
    chat_template_kwargs: dict[str, JsonValue] | None = optional(
        "Variables of the tokenizer's chat template."
    )
    context_management: Annotated[dict[str, JsonValue] | None, Hint()] = optional(
        "Nothing is taken out of the messages; 'applied_edits' of the reply says so, too."
    )
    thread: JsonValue | None = optional("Refused by a code at which clients send messages whole.")

    def for_chat(self) -> tuple[dict[str, Any], OwnNames]:
        """The fields of the chat that says the same, and their names here."""
        found = turns(self.messages)
        if self.system is not None and (text := system_text(self.system)):
            found.insert(0, Turn({"role": "system", "content": text}, "system"))
        paths = {f"messages.{index}.*": turn.field for index, turn in enumerate(found)}
        for index in range(len(self.tools or ())):
            paths[f"tools.{index}.function"] = f"tools.{index}"
            paths[f"tools.{index}.function.parameters"] = f"tools.{index}.input_schema"
        given: dict[str, Any] = {
            "messages": [ChatMessage.of(**turn.message) for turn in found],
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": self.output_config and self.output_config.effort,
            "tools": [tool.for_chat() for tool in self.tools or ()],
        }
        if self.thinking is not None and self.thinking.type != "adaptive":
            given["thinking"] = self.thinking.type
            given["reasoning"] = ReasoningOptions.of(max_tokens=self.thinking.budget_tokens)
        last = found[-1].message
        if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
            given |= {"add_generation_prompt": False, "continue_final_message": True}
        if self.tool_choice is not None:
            given["tool_choice"] = self.tool_choice.for_chat()
            if self.tool_choice.disable_parallel_tool_use:
                given["parallel_tool_calls"] = False
        return given, OwnNames(_NAMES | paths)

    def form(self) -> OutputFormat | None:
        """Returns the format that the text has to match. Raises ApiError 400."""
        own = None if self.output_config is None else self.output_config.format
        if own is not None and self.output_format not in (None, own):
            raise refused("output_format", "contradicts output_config.format")
        return own or self.output_format


class CountTokensRequest(MessageFields):
    """``POST /v1/messages/count_tokens``."""

    model: str | None = None


_METADATA = CommonFields.model_fields["metadata"].annotation


class MessagesRequest(CommonFields, MessageFields):
    """``POST /v1/messages``."""

    without_effect: ClassVar[WithoutEffect] = {
        **WITHOUT_EFFECT,
        **MessageFields.without_effect,
        **dict.fromkeys(("inference_geo", "diagnostics"), ()),
    }

    max_tokens: int = optional("Cut to what there is room for.", default=..., **TOKEN_LIMIT)
    stop_sequences: list[StopString] | None = Field(default=None, max_length=MAX_STOP_STRINGS)
    top_p: float | None = optional("Default 1.", gt=0, le=1)
    top_k: int | None = optional("Default: all tokens.", ge=-1, le=MAX_COUNT)
    metadata: Annotated[_METADATA, BeforeValidator(_without_nulls)] = optional(  # type: ignore[valid-type]
        "'user_id', and what else is to be in the request's log line.", max_length=16
    )

    def to_chat(self, translator: Translator) -> tuple[Chat, OwnNames]:
        """The chat that says the same, and its fields' names here. Raises ApiError 400."""
        given, names = self.for_chat()
        own = (*CommonFields.model_fields, "top_p", "top_k", "max_tokens")
        given |= {name: getattr(self, name) for name in own}
        given["stop"] = tuple(self.stop_sequences or ())
        if (form := self.form()) is not None:
            given["response_format"] = ResponseFormat.matching("output", form.schema_)
        if self.thinking is not None and self.thinking.display == "omitted":
            given["include_reasoning"] = not translator.formats.splits_reasoning
        return Chat.saying(given, names), names


def plan_messages(
    translator: Translator, body: MessagesRequest, arrival_time: float
) -> RequestPlan:
    """``Translator.plan`` for the chat that says the same. Raises ApiError."""
    _refuse_the_unserved(body, translator)
    chat, names = body.to_chat(translator)
    return translator.plan(chat, arrival_time, names).ignoring(body.ignored())


def count_tokens(translator: Translator, body: CountTokensRequest) -> int:
    """The tokens of the prompt that the messages make. Raises ApiError."""
    _refuse_the_unserved(body, translator)
    body.form()
    given, names = body.for_chat()
    chat = Chat.saying(given | {"model": body.model}, names)
    return len(translator.tokenize(chat, names))


def _refuse_the_unserved(body: MessageFields, translator: Translator) -> None:
    """Raises ApiError 400 for a thread, and for parts that are no text."""
    if body.thread not in (None, False):
        # The client's loop of tools asks for one, and on this code goes on without.
        raise refused("thread", f"is not supported: {_STATELESS}", "thread_unsupported_request")
    for name in ("messages", "system"):
        refuse_foreign_parts(getattr(body, name), name, translator.info.unserved)
