"""``POST /api/chat`` and ``/api/generate``, as Ollama has them: their fields, and the request of a chat
or a completion that says the same.

What Ollama's clients put into ``options`` changes the text, or the way in which Ollama runs a model; the
latter are hints here. This server's own fields stand among the options, too, since Ollama's clients send
nothing else of their callers'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, JsonValue, PlainValidator

from server.errors import OwnNames, refused
from server.plan import RequestPlan
from server.request.body import MAX_SEED, SWITCHES, Body, Hint, StopField, WithoutEffect, optional
from server.request.chat import (
    MAX_COUNT,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    WITHOUT_EFFECT,
    Asked,
    Chat,
    Completion,
    sharing,
)
from server.request.grammars import ResponseFormat
from server.request.messages import (
    MAX_TOOLS,
    TEXT_ONLY,
    CalledFunction,
    ChatMessage,
    MessageToolCall,
    Tool,
)
from server.request.translate import Translator
from server.request.wish import DURATION, known_name, seconds_of

_EFFORT = "reasoning_effort"
_USUAL = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
_OWN = ("priority", "timeout", "cache_salt", "user", "metadata", "speculative")
"""Fields of this server, which stand among the options."""


@sharing(*_OWN)
class OllamaOptions(Body):
    """Defaults are the model's, then Ollama's, but that there is no penalty."""

    without_effect: ClassVar[WithoutEffect] = WITHOUT_EFFECT

    temperature: float | None = optional("0 is greedy.", ge=0, le=2)
    top_k: int | None = optional(
        "Keep so many of the likeliest tokens; 0: all.", ge=-1, le=MAX_COUNT
    )
    top_p: float | None = optional("Keep the likeliest of this probability.", gt=0, le=1)
    min_p: float | None = optional("Keep those of this share of the likeliest.", ge=0, le=1)
    seed: int = optional("-1: drawn, and reported.", default=-1, ge=-1, le=MAX_SEED)
    num_predict: int = optional(
        "Tokens to write at most; -2, -1 and 0: what the context has room for.",
        default=-1,
        ge=-2,
        le=MAX_COUNT,
    )
    stop: StopField = ()
    repeat_penalty: float | None = optional("Over prompt and output.", gt=0, le=10)
    presence_penalty: float = optional("Over the output.", default=0.0, ge=-2, le=2)
    frequency_penalty: float = optional("Over the output.", default=0.0, ge=-2, le=2)

    def for_request(self, models: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a chat or a completion that say the same, but for its length. ``models``:
        defaults that go before Ollama's."""
        given = dict(self)
        given["repetition_penalty"] = given.pop("repeat_penalty")
        del given["num_predict"]
        for name, usual in _USUAL.items():
            if given[name] is None and name not in models:
                given[name] = usual
        return given

    @property
    def limit(self) -> int | None:
        """Tokens to write; None: what there is room for, as in Ollama's runner also for 0."""
        return self.num_predict if self.num_predict > 0 else None


class OllamaToolCall(Body):
    """A call that the assistant made before."""

    without_effect: ClassVar[WithoutEffect] = {"index": None}

    id: str | None = Field(default=None, min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class OllamaMessage(Body):
    """Only the assistant has ``tool_calls`` and ``thinking``. A tool's message says by ``tool_name`` or
    ``name``, or by ``tool_call_id``, to which call it answers; else it is the first without an answer."""

    unsupported: ClassVar[dict[str, str]] = {"images": TEXT_ONLY}

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_name: str | None = Field(default=None, max_length=128)
    name: str | None = optional("A tool's, or the author.", max_length=128)
    tool_call_id: str | None = Field(default=None, max_length=256)


def _parse_format(value: object) -> Any:
    if value in ("", "json") or isinstance(value, dict):
        return value
    raise ValueError("must be 'json' or a JSON schema")


_Format = Annotated[
    Any,
    PlainValidator(
        _parse_format, json_schema_input_type=Literal["", "json"] | dict[str, JsonValue]
    ),
]
TextsField = str | Annotated[list[str], Field(min_length=1)]
_Duration = Annotated[str, Field(pattern=DURATION, max_length=64)]
_KeepAlive = Annotated[float | _Duration | None, Hint()]


_NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format.json_schema.schema": "format",
    "response_format": "format",
    "thinking": "think",
    _EFFORT: "think",
    **{name: f"options.{name}" for name in OllamaOptions.model_fields},
}


class _OllamaRequest(Body):
    """The fields of both. ``asks_by``: the one without which there is nothing to answer; ``names``: those
    of fields of the request that says the same."""

    asks_by: ClassVar[str]
    names: ClassVar[OwnNames] = OwnNames(_NAMES)
    without_effect: ClassVar[WithoutEffect] = WITHOUT_EFFECT | {
        "truncate": (False,),
        "shift": (False,),
    }

    model: str | None = optional("The served model's name, with ':latest' or without.")
    stream: bool = optional("As lines of JSON.", default=True)
    format: _Format = optional("'json' or a JSON schema: what the text has to match.")
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    think: bool | Literal["low", "medium", "high"] | None = optional(
        "Whether the model is to think, where its template has a switch, or how much."
    )
    keep_alive: _KeepAlive = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to answer: Ollama loads a model then, or unloads it."""
        return not getattr(self, self.asks_by)

    @property
    def only_unloads(self) -> bool:
        """Whether nothing is asked but that the model goes."""
        return self.is_empty and self.keep_alive is not None and seconds_of(self.keep_alive) == 0

    def for_translator(self, translator: Translator) -> Asked:
        """The request that says the same. Raises ApiError 400."""
        raise NotImplementedError

    def _for_request(self, translator: Translator) -> dict[str, Any]:
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", "needs 'logprobs': true")
        return {
            "model": known_name(self.model, translator.served_names),
            "stream": self.stream,
            "response_format": _response_format(self.format),
            "max_tokens": self.options.limit,
            **self.options.for_request(translator.sampling),
        }

    def _for_chat(
        self, translator: Translator, messages: list[ChatMessage], tools: list[Tool] | None = None
    ) -> Chat:
        given = self._for_request(translator) | thinking_fields(self.think, translator)
        given |= {"messages": messages, "tools": tools}
        given |= {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        return Chat.saying(given, self.names)


class OllamaChatRequest(_OllamaRequest):
    """``POST /api/chat``."""

    asks_by: ClassVar[str] = "messages"

    messages: list[OllamaMessage] = Field(default_factory=list, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)

    def for_translator(self, translator: Translator) -> Asked:
        return self._for_chat(translator, list(_messages(self.messages)), self.tools)


class OllamaGenerateRequest(_OllamaRequest):
    """``POST /api/generate``."""

    asks_by: ClassVar[str] = "prompt"
    names: ClassVar[OwnNames] = OwnNames({**_NAMES, "messages": "prompt", "messages.*": "prompt"})
    unsupported: ClassVar[dict[str, str]] = {
        "images": TEXT_ONLY,
        "template": "the tokenizer's own template is used; with 'raw' the prompt is taken as it is",
        "context": "nothing is stored here; send the conversation to /api/chat",
        "width": TEXT_ONLY,
        "height": TEXT_ONLY,
        "steps": TEXT_ONLY,
    }

    prompt: str = ""
    system: str | None = optional("A system message before the prompt.")
    suffix: str = optional("What follows the text, which fills the gap; no template.", default="")
    raw: bool = optional(
        "The prompt is no message, and no template is put around it.", default=False
    )

    @property
    def is_empty(self) -> bool:
        return not (self.prompt or self.suffix)

    def for_translator(self, translator: Translator) -> Asked:
        if self.raw or self.suffix:
            return self._for_completion(translator)
        said = {"system": self.system, "user": self.prompt}
        messages = [ChatMessage.of(role=x, content=said[x]) for x in said if said[x] or x == "user"]
        return self._for_chat(translator, messages)

    def _for_completion(self, translator: Translator) -> Completion:
        for name in ("system", "think"):
            if getattr(self, name):
                raise refused(name, "has no effect with 'raw' or 'suffix'")
        return Completion.of(
            **self._for_request(translator),
            prompt=[self.prompt],
            suffix=self.suffix,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class OllamaShowRequest(Body):
    """``POST /api/show``."""

    without_effect: ClassVar[WithoutEffect] = WITHOUT_EFFECT

    synonyms: ClassVar[dict[str, str]] = {"name": "model"}

    model: str | None = optional("The served model's name, with ':latest' or without.")


class OllamaPullRequest(Body):
    """``POST /api/pull``."""

    without_effect: ClassVar[WithoutEffect] = WITHOUT_EFFECT | {"insecure": (False,)}

    synonyms: ClassVar[dict[str, str]] = {"name": "model"}

    model: str = Field(min_length=1, description="org/repo[:QUANT] or hf.co/org/repo[:QUANT].")
    stream: bool = optional("How far it is, as lines of JSON.", default=True)


class _EmbedFields(Body):
    """``holds``: the field of the texts."""

    without_effect: ClassVar[WithoutEffect] = WITHOUT_EFFECT

    model: str | None = optional("The served model's name, with ':latest' or without.")
    dimensions: int | None = optional("Only the model's own number.", ge=1)
    truncate: bool | None = optional("Keep what there is room for of a longer text.")
    keep_alive: _KeepAlive = None
    options: OllamaOptions | None = optional("They say nothing of embeddings, and are told.")
    holds: ClassVar[str]

    @property
    def texts(self) -> list[str]:
        given = getattr(self, self.holds)
        return [given] if isinstance(given, str) else given


class OllamaEmbedRequest(_EmbedFields):
    """``POST /api/embed``."""

    holds: ClassVar[str] = "input"
    input: TextsField = Field(description="A text, or a list of texts.")


class OllamaEmbeddingsRequest(_EmbedFields):
    """``POST /api/embeddings``, of Ollama's older clients."""

    holds: ClassVar[str] = "prompt"
    prompt: str = Field(min_length=1)


def plan_ollama_embeddings(
    translator: Translator, body: OllamaEmbedRequest | OllamaEmbeddingsRequest, arrival_time: float
) -> RequestPlan:
    """``Translator.plan_embeddings`` for the request that says the same. Raises ApiError."""
    given: dict[str, Any] = {"model": known_name(body.model, translator.served_names)}
    given["truncate_prompt_tokens"] = -1 if body.truncate else None
    plan = translator.plan_embeddings(
        arrival_time, body.holds, body.texts, body.dimensions, **given
    )
    options = () if body.options is None else sorted(body.options.model_fields_set)
    ignored = [f"options.{each}" for each in options]
    return _as_called(plan.ignoring(ignored), body, translator)


def _as_called(
    plan: RequestPlan, body: _OllamaRequest | _EmbedFields, translator: Translator
) -> RequestPlan:
    """The plan with the client's name of the model, and the hints that nothing comes of."""
    hints = told_hints(body, translator.may_go)
    return replace(plan.ignoring(hints), model=body.model or translator.model_name)


def told_hints(body: _OllamaRequest | _EmbedFields, may_go: bool) -> Iterator[str]:
    """Yields the hints that nothing comes of. ``may_go``: the model comes and goes."""
    return (each for each in body.ignored() if each != "keep_alive" or not may_go)


def check_load(translator: Translator, body: _OllamaRequest) -> list[str]:
    """Returns the hints that nothing comes of where a model is loaded or ended and nothing is answered.
    Raises ApiError 404."""
    translator.check_model(known_name(body.model, translator.served_names))
    return [*told_hints(body, translator.may_go)]


def thinking_fields(think: bool | str | None, translator: Translator) -> dict[str, Any]:
    """The fields of a chat that say whether to think. Raises ApiError 400 where the model cannot."""
    variables = translator.template.variables
    if think is None:
        return {}
    level = think if isinstance(think, str) else None
    if level and _EFFORT not in variables:
        reason = ": this model's chat template knows no levels; send true or false"
        raise refused("think", reason)
    if think is True and SWITCHES.isdisjoint(variables) and not translator.formats.splits_reasoning:
        raise refused("think", ": this model does not think")
    shows = {} if think or not translator.formats.splits_reasoning else {"include_reasoning": False}
    return {"thinking": bool(think), _EFFORT: level, **shows}


def _response_format(wanted: str | dict[str, Any] | None) -> ResponseFormat | None:
    if isinstance(wanted, dict):
        return ResponseFormat.matching("format", wanted)
    return ResponseFormat.of(type="json_object") if wanted else None


def _messages(messages: Sequence[OllamaMessage]) -> Iterator[ChatMessage]:
    """The messages of a chat that say the same: calls have ids, and what tools say names them. Raises
    ApiError 400."""
    # (id, name) of calls that nothing has answered yet.
    unanswered: list[tuple[str, str]] = []
    for index, message in enumerate(messages):
        field = f"messages.{index}"
        calls = [
            MessageToolCall.of(id=call.id or f"call_{index}_{place}", function=call.function)
            for place, call in enumerate(message.tool_calls or ())
        ]
        unanswered += [(each.id, each.function.name) for each in calls]
        told: dict[str, Any] = {"role": message.role, "content": message.content}
        told |= {"reasoning_content": message.thinking or None, "tool_calls": calls or None}
        if message.role == "tool":
            told["tool_call_id"] = _answered(message, unanswered, field)
        else:
            told["name"] = message.name or None
            for name in ("tool_name", "tool_call_id"):
                if getattr(message, name):
                    reason = f": messages of {message.role!r} have no place for it"
                    raise refused(f"{field}.{name}", reason)
        yield ChatMessage.of(**told)


def _answered(message: OllamaMessage, unanswered: list[tuple[str, str]], field: str) -> str:
    """Returns the id of the call that a tool's message answers, and takes the call off the list."""
    name = message.tool_name or message.name
    for place, (call_id, called) in enumerate(unanswered):
        if message.tool_call_id in (None, call_id) and name in (None, called):
            del unanswered[place]
            return call_id
    at_fault = "tool_call_id" if message.tool_call_id else "tool_name" if name else "role"
    raise refused(f"{field}.{at_fault}", ": no message before this one has such a call to answer")


def plan_ollama(
    translator: Translator, body: OllamaChatRequest | OllamaGenerateRequest, arrival_time: float
) -> RequestPlan:
    """``Translator.plan`` for the request that says the same. Raises ApiError."""
    if body.is_empty:
        raise refused(body.asks_by, "is missing")
    plan = translator.plan(body.for_translator(translator), arrival_time, body.names)
    return _as_called(plan, body, translator)
