"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: their fields, and the chat request that says
the same.

Agents send many fields that change no text, and ask for more tokens than a small model's context has.
The former are hints; of the latter the text gets what there is room for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import MaxLen, MinLen
from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, model_validator

from server.errors import ApiError, refused
from server.plan import RequestPlan
from server.request.anthropic_blocks import (
    InputMessage,
    SystemField,
    Turn,
    system_text,
    turns,
)
from server.request.body import MAX_STOP_CHARS, MAX_STOP_STRINGS, Body, Hint, optional, refusal
from server.request.messages import (
    CACHED,
    MAX_TOOLS,
    NAME_PATTERN,
    CacheControl,
    ParametersField,
)
from server.request.parsing import check
from server.request.protocol import (
    MAX_COUNT,
    MAX_MESSAGES,
    ChatRequest,
    CommonFields,
    Effort,
    TemplateFields,
    TokenizeRequest,
)
from server.request.translate import Translator

_NOTHING_RUNS = "no tool runs here"
_STATELESS = "nothing is stored here; send the messages themselves"
_THINKS = ("enable_thinking", "thinking")
"""How chat templates call the switch of reasoning."""
_BUDGET = "thinking_budget"
_EFFORT = "reasoning_effort"


class CustomTool(Body):
    """A function that may be called. ``input_examples`` are shown to the model with the schema."""

    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {"allowed_callers": (["direct"],)}

    type: Literal["custom"] = "custom"
    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    input_schema: ParametersField
    strict: bool | None = None
    input_examples: list[dict[str, JsonValue]] | None = None
    cache_control: CacheControl | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None

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

    def for_chat(self) -> dict[str, Any]:
        examples = {"examples": self.input_examples} if self.input_examples else {}
        function = {"name": self.name, "parameters": {**self.input_schema, **examples}}
        told = {"description": self.description, "strict": self.strict}
        given = {name: value for name, value in told.items() if value is not None}
        return {"type": "function", "function": {**function, **given}}


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

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, Hint(variable=_BUDGET)] = optional(
        "For chat templates that read 'thinking_budget'.", ge=1, le=MAX_COUNT
    )
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _has_effect(self) -> Thinking:
        if self.type != "enabled" and self.budget_tokens is not None:
            raise refusal("budget_tokens", message=f"has no effect with type {self.type!r}")
        return self

    def variables(self, known: Collection[str]) -> dict[str, JsonValue]:
        """What the chat template is told, of the variables that it has."""
        told: dict[str, JsonValue] = {}
        if self.type != "adaptive":
            told |= dict.fromkeys(_THINKS, self.type == "enabled")
        if self.budget_tokens is not None:
            told[_BUDGET] = self.budget_tokens
        return {name: value for name, value in told.items() if name in known}


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, JsonValue] = Field(alias="schema")


class OutputConfig(Body):
    effort: Annotated[Effort | None, Hint(variable=_EFFORT)] = optional(
        "For chat templates that read 'reasoning_effort'."
    )
    format: OutputFormat | None = optional("What the text has to match.")


def _check_names(tools: list[CustomTool]) -> list[CustomTool]:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise refusal(index, "name", message=f"{tool.name!r} is there twice")
        seen.add(tool.name)
    return tools


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: each for name, each in value.items() if each is not None}
    return value


class MessageFields(Body):
    """The fields of both endpoints."""

    unsupported: ClassVar[dict[str, str]] = {
        "container": f"{_NOTHING_RUNS}, and nothing is kept",
        "fallbacks": "one model is served",
        "compaction": "shorten the messages before sending them",
    }
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {"mcp_servers": ([],)}

    messages: list[InputMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: SystemField | None = optional("A text, or blocks of text.")
    tools: Annotated[list[CustomTool], AfterValidator(_check_names)] | None = optional(
        "Functions that may be called.", max_length=MAX_TOOLS
    )
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = optional("For chat templates with a variable for it.")
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = optional("The same as 'output_config.format'.")
    chat_template_kwargs: dict[str, JsonValue] | None = optional(
        "Variables of the tokenizer's chat template."
    )
    cache_control: Annotated[CacheControl | None, CACHED] = optional("In blocks and tools, too.")
    context_management: Annotated[dict[str, JsonValue] | None, Hint()] = optional(
        "Nothing is taken out of the messages; 'applied_edits' of the reply says so, too."
    )
    speed: Annotated[Literal["standard", "fast"] | None, Hint(does=("standard",))] = optional(
        "There is one speed."
    )
    thread: JsonValue | None = optional("Refused by a code at which clients send messages whole.")

    def turns(self) -> list[Turn]:
        """The messages of a chat that say the same, the system prompt first."""
        found = turns(self.messages)
        if self.system is not None and (text := system_text(self.system)):
            found.insert(0, Turn({"role": "system", "content": text}, "system"))
        return found

    def for_chat(self, variables: Collection[str]) -> dict[str, Any]:
        """The fields of the chat request that says the same. ``variables``: those that the chat template
        reads. Raises ApiError 400."""
        messages = [turn.message for turn in self.turns()]
        given: dict[str, Any] = {"messages": messages, **self._for_template(variables)}
        last = messages[-1]
        if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
            given |= {"add_generation_prompt": False, "continue_final_message": True}
        if self.tools:
            given["tools"] = [tool.for_chat() for tool in self.tools]
        choice = self.tool_choice
        if choice is not None and (self.tools or choice.type not in ("auto", "none")):
            given["tool_choice"] = choice.for_chat()
            if choice.disable_parallel_tool_use:
                given["parallel_tool_calls"] = False
        return given

    def form(self) -> OutputFormat | None:
        """What the text has to match. Raises ApiError 400."""
        own = None if self.output_config is None else self.output_config.format
        if own is not None and self.output_format not in (None, own):
            raise refused("output_format", "contradicts output_config.format")
        return own or self.output_format

    def ignored(self, variables: Collection[str]) -> Iterator[str]:
        """Yields the hints that nothing comes of, by their paths."""
        for each in self.hints():
            is_handed = not {each.hint.variable, each.hint.switch}.isdisjoint(variables)
            if each.hint.needs_telling(each.value) and not is_handed:
                yield each.path
        switched = self.thinking is not None and self.thinking.type != "adaptive"
        if switched and not any(name in variables for name in _THINKS):
            yield "thinking.type"
        if any(tool.defer_loading for tool in self.tools or ()):
            yield "tools.defer_loading"

    def _for_template(self, variables: Collection[str]) -> dict[str, Any]:
        """Raises ApiError 400."""
        told: dict[str, JsonValue] = {}
        if self.thinking is not None:
            told |= self.thinking.variables(variables)
        if self.output_config is not None and self.output_config.effort and _EFFORT in variables:
            told[_EFFORT] = self.output_config.effort
        own = self.chat_template_kwargs or {}
        for name in told.keys() & own.keys():
            if told[name] != own[name]:
                field = "output_config.effort" if name == _EFFORT else "thinking"
                raise refused(field, f"contradicts chat_template_kwargs.{name}")
        told |= own
        return {"chat_template_kwargs": told} if told else {}


class CountTokensRequest(MessageFields):
    """``POST /v1/messages/count_tokens``."""

    model: str | None = None


_Stop = Annotated[str, MinLen(1), MaxLen(MAX_STOP_CHARS)]
_Tier = Annotated[
    Literal["auto", "default", "flex", "scale", "priority", "standard_only"] | None,
    Hint(does=("auto", "default", "standard_only")),
]
_METADATA = CommonFields.model_fields["metadata"].annotation


class MessagesRequest(CommonFields, MessageFields):
    """``POST /v1/messages``."""

    max_tokens: int = Field(ge=1, le=MAX_COUNT, description="At most what there is room for.")
    stop_sequences: list[_Stop] | None = Field(default=None, max_length=MAX_STOP_STRINGS)
    top_p: float | None = optional("Default 1.", gt=0, le=1)
    top_k: int | None = optional("Default: all tokens.", ge=-1, le=MAX_COUNT)
    metadata: Annotated[_METADATA, BeforeValidator(_without_nulls)] = optional(  # type: ignore[valid-type]
        "'user_id', and what else is to be in the request's log line.", max_length=16
    )
    service_tier: _Tier = optional(  # type: ignore[assignment]
        "There is one tier, 'standard'; 'priority' is a field of its own."
    )
    inference_geo: Annotated[str | None, Hint()] = optional("The server is where it is.")
    diagnostics: Annotated[dict[str, JsonValue] | None, Hint()] = optional(
        "The usage says what the cache had."
    )

    def to_chat(self, translator: Translator) -> ChatRequest:
        """The chat request that says the same. Raises ApiError 400, in the chat's words."""
        given = self.for_chat(translator.template_variables)
        own = CommonFields.model_fields.keys() - {"service_tier"}
        given |= {name: getattr(self, name) for name in own}
        given |= {"top_p": self.top_p, "top_k": self.top_k, "stop": self.stop_sequences}
        if self.max_tokens <= translator.max_model_len:
            given["max_tokens"] = self.max_tokens
        if (form := self.form()) is not None:
            schema = {"name": "output", "schema": form.schema_}
            given["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.thinking is not None and self.thinking.display == "omitted":
            given["include_reasoning"] = not translator.splits_reasoning
        return check(ChatRequest, {name: each for name, each in given.items() if each is not None})


def plan_messages(
    translator: Translator,
    body: MessagesRequest,
    arrival_time: float,
    drafters: Sequence[str] | None = None,
) -> RequestPlan:
    """``Translator.plan`` for the chat request that says the same. Raises ApiError in the words of this
    one."""
    _refuse_the_unserved(body, translator)
    try:
        plan = translator.plan(body.to_chat(translator), arrival_time, drafters)
    except ApiError as error:
        raise _in_own_words(error, body) from error
    plan = plan.with_grammars_of(_own_name)
    repeated: dict[str, JsonValue] = {"max_tokens": body.max_tokens}
    if body.context_management is not None:
        repeated["context_management"] = {"applied_edits": []}
    ignored = [*body.ignored(translator.template_variables)]
    ignored += map(_own_name, plan.ignored)
    return replace(plan, repeated=repeated, ignored=tuple(dict.fromkeys(ignored)))


def count_tokens(translator: Translator, body: CountTokensRequest) -> int:
    """The tokens of the prompt that the messages make. Raises ApiError."""
    _refuse_the_unserved(body, translator)
    given = body.for_chat(translator.template_variables)
    names = {"messages", "tools", *TemplateFields.model_fields}
    if given.get("tool_choice") == "none":
        names.remove("tools")
    asked = {name: value for name, value in given.items() if name in names}
    try:
        body.form()
        tokens = translator.tokenize(check(TokenizeRequest, asked | {"model": body.model}))
    except ApiError as error:
        raise _in_own_words(error, body) from error
    return len(tokens)


def _refuse_the_unserved(body: MessageFields, translator: Translator) -> None:
    """Raises ApiError 400 for a thread, and for parts that are no text."""
    if body.thread not in (None, False):
        # The client's loop of tools asks for one, and on this code goes on without.
        raise refused("thread", f"is not supported: {_STATELESS}", "thread_unsupported_request")
    for index, message in enumerate(body.messages):
        for place, part in message.foreign_parts():
            raise part.refusal(f"messages.{index}.{place}", translator.unserved)


_RENAMED = {
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "tool_choice.function": "tool_choice",
}


def _in_own_words(error: ApiError, body: MessageFields) -> ApiError:
    """A refusal of the chat request, with the field of this one that is at fault."""
    if error.code == "context_length_exceeded":
        # By these words agents see that they have to shorten a conversation.
        message = f"prompt is too long: {error.message}"
        return ApiError(error.status, message, param="messages", code=error.code)
    param = error.param or ""
    first, _, rest = param.partition(".")
    if first == "messages" and rest:
        index, _, _ = rest.partition(".")
        return error.about(body.turns()[int(index)].field)
    return error.about(_own_name(param)) if param else error


def _own_name(param: str) -> str:
    """The field of this request that became one of the chat request's."""
    if param.startswith("tools."):
        return param.replace(".function.parameters", ".input_schema").replace(".function", "")
    for name, own in _RENAMED.items():
        if f"{param}.".startswith(f"{name}."):
            return own + param.removeprefix(name)
    return param
