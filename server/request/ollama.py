"""``POST /api/chat`` and ``/api/generate``, as Ollama has them: their fields, and the request of a chat
or a completion that says the same.

What Ollama's clients put into ``options`` changes the text, or the way in which Ollama runs a model; the
latter are hints here. This server's own fields stand among the options, too, since Ollama's clients send
nothing else of their callers'.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, JsonValue, PlainValidator, model_validator

from server.errors import ApiError, refused
from server.plan import RequestPlan
from server.request.body import MAX_SEED, Body, Hint, StopField, optional, with_fields
from server.request.embeddings import EmbeddingsRequest, plan_embeddings
from server.request.messages import MAX_TOOLS, TEXT_ONLY, FunctionDefinition
from server.request.parsing import check
from server.request.protocol import (
    MAX_COUNT,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    ChatRequest,
    CommonFields,
    CompletionRequest,
)
from server.request.translate import Translator

LATEST = ":latest"
_DURATION = r"^[+-]?(0|(\d+(\.\d*)?(ns|us|µs|ms|s|m|h))+)$"
_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_OWN = ("priority", "timeout", "cache_salt", "user", "metadata", "speculative")
"""Fields of this server, which stand among the options."""


class _Lenient(Body):
    """Ollama's clients send empty values for what they leave out."""

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_empty(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            name: value
            for name, value in data.items()
            if not (name in cls.unsupported and value in ("", []))
        }


_Model = TypeVar("_Model", bound=Body)


def _with_own_fields(model: type[_Model]) -> type[_Model]:
    """The model, and the fields of ``_OWN`` as all requests have them."""
    declared = CommonFields.model_fields
    return with_fields(model, {name: (declared[name].annotation, declared[name]) for name in _OWN})


@_with_own_fields
class OllamaOptions(Body):
    """Defaults are Ollama's, but that there is no penalty."""

    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tfs_z": (1, 1.0),
        "typical_p": (1, 1.0),
        "mirostat": (0,),
        "penalize_newline": (True,),
        "vocab_only": (False,),
        "embedding_only": (False,),
    }

    temperature: float = optional("0 is greedy.", default=0.8, ge=0, le=2)
    top_k: int = optional("Keep so many of the likeliest tokens; 0: all.", default=40, ge=-1)
    top_p: float = optional("Keep the likeliest of this probability.", default=0.9, gt=0, le=1)
    min_p: float = optional("Keep those of this share of the likeliest.", default=0, ge=0, le=1)
    seed: int = optional("-1: drawn, and reported.", default=-1, ge=-1, le=MAX_SEED)
    num_predict: int = optional(
        "Tokens to write at most; -1 and -2: what the context has room for.",
        default=-1,
        ge=-2,
        le=MAX_COUNT,
        json_schema_extra={"not": {"const": 0}},
    )
    stop: StopField = ()
    repeat_penalty: float = optional("Over prompt and output.", default=1, gt=0, le=10)
    repeat_last_n: Annotated[int | None, Hint(does=(-1,))] = optional(
        "With a penalty only -1: penalties look at the whole text.", ge=-1, le=MAX_COUNT
    )
    presence_penalty: float = optional("Over the output.", default=0, ge=-2, le=2)
    frequency_penalty: float = optional("Over the output.", default=0, ge=-2, le=2)
    num_ctx: Annotated[int | None, Hint()] = None
    num_keep: Annotated[int | None, Hint()] = None
    num_batch: Annotated[int | None, Hint()] = None
    num_gpu: Annotated[int | None, Hint()] = None
    main_gpu: Annotated[int | None, Hint()] = None
    num_thread: Annotated[int | None, Hint()] = None
    numa: Annotated[bool | None, Hint()] = None
    low_vram: Annotated[bool | None, Hint()] = None
    f16_kv: Annotated[bool | None, Hint()] = None
    logits_all: Annotated[bool | None, Hint()] = None
    use_mmap: Annotated[bool | None, Hint()] = None
    use_mlock: Annotated[bool | None, Hint()] = None
    mirostat_tau: Annotated[float | None, Hint()] = None
    mirostat_eta: Annotated[float | None, Hint()] = None

    def for_request(self) -> dict[str, Any]:
        """The fields of a chat or a completion that say the same, but for its length. Raises ApiError
        400."""
        self._check()
        return {
            **{name: getattr(self, name) for name in _OWN},
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": None if self.seed == -1 else self.seed,
            "stop": list(self.stop),
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }

    @property
    def limit(self) -> int | None:
        """Tokens to write; None: what there is room for."""
        return self.num_predict if self.num_predict > 0 else None

    def _check(self) -> None:
        if self.num_predict == 0:
            raise refused("options.num_predict", "must be -1, -2, or at least 1")
        has_penalty = self.repeat_penalty != 1 or self.presence_penalty or self.frequency_penalty
        if has_penalty and self.repeat_last_n not in (None, -1):
            reason = ": penalties look at the whole text; send -1, or leave it out"
            raise refused("options.repeat_last_n", reason)


class OllamaFunctionCall(Body):
    """``index``: the call's place in its message, which its place in the list says."""

    name: str = Field(min_length=1, max_length=128)
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    index: int | None = None


class OllamaToolCall(Body):
    """A call that the assistant made before."""

    id: str | None = Field(default=None, min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: OllamaFunctionCall


class OllamaMessage(_Lenient):
    """Only the assistant has ``tool_calls`` and ``thinking``. A tool's message says by ``tool_name``, or
    by ``tool_call_id``, to which call it answers; else it is the first without an answer."""

    unsupported: ClassVar[dict[str, str]] = {"images": TEXT_ONLY}

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_name: str | None = Field(default=None, max_length=128)
    name: str | None = optional("The same as 'tool_name'.", max_length=128)
    tool_call_id: str | None = Field(default=None, max_length=256)


class OllamaTool(Body):
    """A function that may be called."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


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
_Duration = Annotated[str, Field(pattern=_DURATION, max_length=64)]


class _OllamaRequest(_Lenient):
    """The fields of both."""

    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {"truncate": (False,), "shift": (False,)}

    model: str | None = optional("The served model's name, with ':latest' or without.")
    stream: bool = optional("As lines of JSON.", default=True)
    format: _Format = optional("'json' or a JSON schema: what the text has to match.")
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    think: bool | Literal["low", "medium", "high"] | None = optional(
        "Whether the model is to think, where its template has a switch, or how much."
    )
    keep_alive: Annotated[float | _Duration | None, Hint()] = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to answer: Ollama loads a model then, or unloads it."""
        raise NotImplementedError

    @property
    def is_unload(self) -> bool:
        return self.keep_alive in (0, "0", "0s", "0m", "0h")

    def for_translator(self, translator: Translator) -> ChatRequest | CompletionRequest:
        """The request that says the same. Raises ApiError 400."""
        raise NotImplementedError

    def _for_request(self, translator: Translator) -> dict[str, Any]:
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs", "needs 'logprobs': true")
        return {
            "model": known_name(self.model, translator.served_names),
            "stream": self.stream,
            "response_format": _response_format(self.format),
            **self.options.for_request(),
        }

    def _for_chat(
        self, translator: Translator, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> ChatRequest:
        return _checked(
            ChatRequest,
            {
                **self._for_request(translator),
                **thinking_fields(self.think, translator),
                "messages": messages,
                "tools": tools,
                "max_completion_tokens": self.options.limit,
                "logprobs": self.logprobs,
                "top_logprobs": self.top_logprobs,
            },
        )


class OllamaChatRequest(_OllamaRequest):
    """``POST /api/chat``."""

    messages: list[OllamaMessage] = Field(default_factory=list, max_length=MAX_MESSAGES)
    tools: list[OllamaTool] | None = Field(default=None, max_length=MAX_TOOLS)

    @property
    def is_empty(self) -> bool:
        return not self.messages

    def for_translator(self, translator: Translator) -> ChatRequest:
        messages = list(_messages(self.messages))
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or []]
        return self._for_chat(translator, messages, tools)


class OllamaGenerateRequest(_OllamaRequest):
    """``POST /api/generate``."""

    unsupported: ClassVar[dict[str, str]] = {
        "suffix": "text is written after the prompt only",
        "images": TEXT_ONLY,
        "template": "the tokenizer's own template is used; with 'raw' the prompt is taken as it is",
        "context": "nothing is stored here; send the conversation to /api/chat",
        "width": TEXT_ONLY,
        "height": TEXT_ONLY,
        "steps": TEXT_ONLY,
    }

    prompt: str = ""
    system: str | None = optional("A system message before the prompt.")
    raw: bool = optional(
        "The prompt is no message, and no template is put around it.", default=False
    )

    @property
    def is_empty(self) -> bool:
        return not self.prompt

    def for_translator(self, translator: Translator) -> ChatRequest | CompletionRequest:
        if self.raw:
            return self._for_completion(translator)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": self.prompt})
        return self._for_chat(translator, messages, [])

    def _for_completion(self, translator: Translator) -> CompletionRequest:
        for name in ("system", "think"):
            if getattr(self, name):
                raise refused(name, "has no effect with 'raw'")
        return _checked(
            CompletionRequest,
            {
                **self._for_request(translator),
                "prompt": self.prompt,
                # As much as there is room for, where no number is given.
                "max_tokens": self.options.limit or translator.max_model_len,
                "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            },
        )


class OllamaShowRequest(Body):
    """``POST /api/show``."""

    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {"verbose": (False,)}

    model: str | None = optional("The served model's name, with ':latest' or without.")
    name: str | None = optional("The same as 'model'.")


class _EmbedFields(_Lenient):
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {"truncate": (False,)}

    model: str | None = optional("The served model's name, with ':latest' or without.")
    dimensions: int | None = optional("Only the model's own number.", ge=1)
    options: OllamaOptions | None = optional("They say nothing of embeddings, and are told.")
    keep_alive: Annotated[float | _Duration | None, Hint()] = None


class OllamaEmbedRequest(_EmbedFields):
    """``POST /api/embed``."""

    input: TextsField = Field(description="A text, or a list of texts.")

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input


class OllamaEmbeddingsRequest(_EmbedFields):
    """``POST /api/embeddings``, of Ollama's older clients."""

    prompt: str = Field(min_length=1)

    @property
    def texts(self) -> list[str]:
        return [self.prompt]


def plan_ollama_embeddings(
    translator: Translator,
    body: OllamaEmbedRequest | OllamaEmbeddingsRequest,
    arrival_time: float,
    drafters: Sequence[str] | None = None,
) -> RequestPlan:
    """``plan_embeddings`` for the request that says the same. Raises ApiError."""
    name = known_name(body.model, translator.served_names)
    given = {"model": name, "input": body.texts, "dimensions": body.dimensions}
    try:
        plan = plan_embeddings(
            translator, check(EmbeddingsRequest, _said(given)), arrival_time, drafters
        )
    except ApiError as error:
        is_old = isinstance(body, OllamaEmbeddingsRequest) and error.param == "input"
        raise error.about("prompt") if is_old else error from error
    options = () if body.options is None else sorted(body.options.model_fields_set)
    ignored = [f"options.{each}" for each in options]
    ignored += ["keep_alive"] if body.keep_alive is not None else []
    repeated = {"model": body.model or translator.model_name}
    return replace(plan, repeated=repeated, ignored=tuple(ignored))


def known_name(name: str | None, served: Iterable[str]) -> str | None:
    """The one of the names served that is meant: a name without a tag has the tag ``latest``. What is
    none of them stays as it is."""
    if name is None:
        return None
    return next((each for each in served if tagged(each) == tagged(name)), name)


def tagged(name: str) -> str:
    """The name with its tag, as Ollama lists it."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def thinking_fields(think: bool | str | None, translator: Translator) -> dict[str, Any]:
    """The fields of a chat that say whether to think. Raises ApiError 400 where the model cannot."""
    variables = translator.template_variables
    switch = next((name for name in _SWITCHES if name in variables), None)
    if think is None:
        return {}
    told: dict[str, Any] = {} if switch is None else {switch: bool(think)}
    if isinstance(think, str):
        if _EFFORT not in variables:
            reason = ": this model's chat template knows no levels; send true or false"
            raise refused("think", reason)
        told[_EFFORT] = think
    elif think and not told and not translator.splits_reasoning:
        raise refused("think", ": this model does not think")
    shows = {} if think or not translator.splits_reasoning else {"include_reasoning": False}
    return {"chat_template_kwargs": told or None, **shows}


def _response_format(wanted: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if isinstance(wanted, dict):
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": wanted}}
    return {"type": "json_object"} if wanted else None


def _messages(messages: Sequence[OllamaMessage]) -> Iterator[dict[str, Any]]:
    """The messages of a chat that say the same: calls have ids, and what tools say names them. Raises
    ApiError 400."""
    # (id, name) of calls that nothing has answered yet.
    unanswered: list[tuple[str, str]] = []
    for index, message in enumerate(messages):
        field = f"messages.{index}"
        told: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking:
            told["reasoning_content"] = message.thinking
        if message.tool_calls:
            told["tool_calls"] = [
                _call(call, f"call_{index}_{place}")
                for place, call in enumerate(message.tool_calls)
            ]
            unanswered += [(each["id"], each["function"]["name"]) for each in told["tool_calls"]]
        if message.role == "tool":
            told["tool_call_id"] = _answered(message, unanswered, field)
        else:
            for name in ("tool_name", "name", "tool_call_id"):
                if getattr(message, name):
                    reason = f": messages of {message.role!r} have no place for it"
                    raise refused(f"{field}.{name}", reason)
        yield told


def _call(call: OllamaToolCall, own_id: str) -> dict[str, Any]:
    arguments = json.dumps(call.function.arguments, ensure_ascii=False)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id or own_id, "type": "function", "function": function}


def _answered(message: OllamaMessage, unanswered: list[tuple[str, str]], field: str) -> str:
    """Returns the id of the call that a tool's message answers, and takes the call off the list."""
    name = message.tool_name or message.name
    for place, (call_id, called) in enumerate(unanswered):
        if message.tool_call_id in (None, call_id) and name in (None, called):
            del unanswered[place]
            return call_id
    at_fault = "tool_call_id" if message.tool_call_id else "tool_name" if name else "role"
    raise refused(f"{field}.{at_fault}", ": no message before this one has such a call to answer")


def _checked(kind: type[_Model], fields: Mapping[str, Any]) -> _Model:
    return check(kind, _said(fields))


def _said(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in fields.items() if each not in (None, [])}


_RENAMED = {
    "max_completion_tokens": "options.num_predict",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format.json_schema.schema": "format",
    "response_format": "format",
    "chat_template_kwargs": "think",
    **{name: f"options.{name}" for name in OllamaOptions.model_fields},
}


def plan_ollama(
    translator: Translator,
    body: OllamaChatRequest | OllamaGenerateRequest,
    arrival_time: float,
    drafters: Sequence[str] | None = None,
) -> RequestPlan:
    """``Translator.plan`` for the request that says the same. Raises ApiError in the words of
    this one."""
    if body.is_empty:
        name = "messages" if isinstance(body, OllamaChatRequest) else "prompt"
        raise refused(name, "is missing")
    try:
        plan = translator.plan(body.for_translator(translator), arrival_time, drafters)
    except ApiError as error:
        raise _in_own_words(error, body) from error
    plan = plan.with_grammars_of(_own_name)
    ignored = [each.path for each in body.hints() if each.hint.needs_telling(each.value)]
    name = body.model or translator.model_name
    return replace(
        plan, repeated={"model": name}, ignored=(*ignored, *map(_own_name, plan.ignored))
    )


def _in_own_words(error: ApiError, body: OllamaChatRequest | OllamaGenerateRequest) -> ApiError:
    """A refusal of the other request, with the field of this one that is at fault."""
    param = error.param or ""
    if param.startswith("messages") and isinstance(body, OllamaGenerateRequest):
        return error.about("prompt")
    return error.about(_own_name(param)) if param else error


def _own_name(param: str) -> str:
    """The field of this request that became one of the other's."""
    for name, own in _RENAMED.items():
        if param == name or param.startswith(f"{name}."):
            return own + ("" if own == "think" else param.removeprefix(name))
    return param
