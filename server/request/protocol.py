"""The requests of ``/v1/completions`` and ``/v1/chat/completions``: what may be asked, and its
limits.

OpenAI's fields, the extras vLLM made common, what the logits processors declare, and
``speculative``. ``user`` goes into the request's log line, and nowhere else; ``metadata`` comes back,
too. A ``Hint`` changes no text. Whether a value fits the model served (token ids, lengths, drafters)
is checked when the request is translated.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import ConfigDict, Field, JsonValue
from pydantic.config import JsonDict

from engine.sampling.processor import parameters
from server.request.body import (
    MAX_SEED,
    Body,
    Hint,
    PromptField,
    StopField,
    TokenId,
    in_case,
    optional,
    with_fields,
)
from server.request.grammars import ResponseFormat, StructuredOutputs
from server.request.messages import (
    MAX_TOOLS,
    TEXT_ONLY,
    ChatMessage,
    ContentField,
    ToolFields,
    ToolsField,
)
from server.request.speculative import SpeculativeField

MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
DEFAULT_COMPLETION_TOKENS = 16
MAX_COUNT = 2**31 - 1
MAX_MESSAGES = 1 << 14

_CACHE_KEY = "keeps requests together behind the ingress; written to the request's log line"
_NOT_MOVED = "keys and values stay in this server"
_UNSUPPORTED = {
    "stream_interval": "a chunk is sent for each step",
    "guided_json": "use 'structured_outputs'",
    "guided_regex": "use 'structured_outputs'",
    "guided_choice": "use 'structured_outputs'",
    "guided_grammar": "use 'structured_outputs'",
    "use_beam_search": "tokens are sampled",
    "length_penalty": "it belongs to beam search",
    "logits_processors": "the server runs no code of its clients",
    "repetition_detection": "use 'frequency_penalty' or 'repetition_penalty'",
    "thinking_token_budget": "use 'max_tokens'",
    "request_id": "send it as the header 'X-Request-Id'",
    "session_id": "use 'cache_salt' for whom, and 'user' for the log",
    "return_weight_versions": "the weights are those loaded at start",
    "vllm_xargs": "use 'speculative.options' for the drafter's",
    "kv_transfer_params": _NOT_MOVED,
    "ec_transfer_params": _NOT_MOVED,
    "mm_processor_kwargs": TEXT_ONLY,
    "media_io_kwargs": TEXT_ONLY,
}
_FIXED: dict[str, tuple[Any, ...]] = {
    # What else there is concerns tokenizers written in Python.
    "spaces_between_special_tokens": (True,),
}


class EventOptions(Body):
    """What may be said of all streams."""

    include_obfuscation: Annotated[bool | None, Hint(does=(False,))] = optional(
        "Events are not padded."
    )


class StreamOptions(EventOptions):
    """``include_usage``: one more chunk before ``[DONE]``, without choices, with the request's
    usage. ``continuous_usage_stats``: every chunk counts the tokens so far.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Prediction(Body):
    """OpenAI's Predicted Outputs: a text that the output is expected to repeat for the most part."""

    type: Literal["content"]
    content: ContentField


_Model = TypeVar("_Model", bound=Body)
_MetadataKey = Annotated[str, Field(max_length=64)]
_MetadataValue = Annotated[str, Field(max_length=512)]


def _with_processors(model: type[_Model]) -> type[_Model]:
    """The model, and a field for every parameter of every logits processor."""
    about = {
        each.name: (each.type, optional(each.description, default=each.default))
        for each in parameters()
    }
    return with_fields(model, about)


class CommonFields(Body):
    """The fields of all requests."""

    model: str | None = optional("The served model's name; may be left out.")
    temperature: float | None = optional("0 is greedy.", ge=0, le=2)
    seed: int | None = optional("Default: drawn, and reported.", ge=0, le=MAX_SEED)
    priority: int = optional("Lower runs first.", default=0, ge=-MAX_COUNT, le=MAX_COUNT)
    timeout: float | None = optional(
        "Seconds from arrival in which the reply has to be done; later it is an error.",
        gt=0,
        allow_inf_nan=False,
    )
    cache_salt: str | None = optional(
        "Caches are shared within one cache_salt only.", min_length=1, max_length=256
    )
    user: str | None = optional("Written to the request log.", max_length=256)
    safety_identifier: Annotated[str | None, Hint("written to the request's log line")] = optional(
        "Written to the request log.", max_length=256
    )
    prompt_cache_key: Annotated[str | None, Hint(_CACHE_KEY)] = optional(
        "Requests with one key go to one replica; what they share is found by their texts.",
        max_length=256,
    )
    prompt_cache_retention: Annotated[
        Literal["in_memory", "in-memory", "24h"] | None, Hint(does=("in_memory", "in-memory"))
    ] = optional("Blocks are kept as long as there is room.")
    service_tier: Annotated[
        Literal["auto", "default", "flex", "scale", "priority"] | None,
        Hint(does=("auto", "default")),
    ] = optional("There is one tier, 'default'; 'priority' is a field of its own.")
    store: Annotated[bool | None, Hint(does=(False,))] = optional("Nothing is stored.")
    metadata: dict[_MetadataKey, _MetadataValue] | None = optional(
        "Written to the request log, and sent back with whole replies.", max_length=16
    )
    stream: bool = False
    speculative: SpeculativeField | None = None


@_with_processors
class SamplingFields(CommonFields):
    """The further fields of completions and chats, with those that logits processors declare."""

    n: int = optional("Choices for each prompt.", default=1, ge=1, le=128)
    stop: StopField = ()
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=128)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    prompt_logprobs: int | None = optional(
        "Likeliest tokens reported for each place of the prompt.", ge=0, le=MAX_LOGPROBS
    )
    logprob_token_ids: list[TokenId] | None = optional(
        "Tokens reported in logprobs besides the likeliest.",
        min_length=1,
        max_length=MAX_LOGPROB_TOKEN_IDS,
    )
    return_tokens_as_token_ids: bool = optional(
        "Name tokens 'token_id:ID' in logprobs.", default=False
    )
    truncate_prompt_tokens: int | None = optional(
        "Keep so many of a prompt's tokens; -1: what there is room for.",
        ge=-1,
        le=MAX_COUNT,
        json_schema_extra={"not": {"const": 0}},
    )
    truncation_side: Literal["left", "right"] | None = optional(
        "Where tokens are cut off; default left."
    )
    allow_special_tokens: bool = optional(
        "Special tokens that texts spell are such tokens.", default=False
    )
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = optional(
        "Text, any JSON object, or JSON that matches a schema."
    )
    structured_outputs: StructuredOutputs | None = optional("What the output has to match.")
    prediction: Prediction | None = optional(
        "What the output will mostly be; drafted from, never written by itself."
    )


class CompletionRequest(SamplingFields):
    """``POST /v1/completions``."""

    unsupported: ClassVar[dict[str, str]] = _UNSUPPORTED | {
        "prompt_embeds": "prompts are text or token ids",
    }
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = _FIXED

    prompt: PromptField = Field(description="Text or token ids, one or a batch.")
    max_tokens: int | None = optional("Default 16.", ge=1, le=MAX_COUNT)
    suffix: str | None = optional("What follows the text, which fills the gap.")
    best_of: int | None = optional("Only the value of 'n' is accepted.", ge=1)
    echo: bool = optional("Begin the text with the prompt.", default=False)
    logprobs: int | None = optional(
        "Likeliest tokens reported next to each token.", ge=0, le=MAX_LOGPROBS
    )
    add_special_tokens: bool = optional("Let the tokenizer add its BOS.", default=True)
    allow_special_tokens: bool = optional(
        "Special tokens that the prompt spells are such tokens.", default=True
    )

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that bounds a choice's tokens, and the bound; None: what there is room for."""
        return "max_tokens", self.max_tokens or DEFAULT_COMPLETION_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        """The number of likeliest tokens reported next to each; None: no log-probabilities."""
        return self.logprobs


class TemplateFields(Body):
    """How messages become a prompt."""

    add_generation_prompt: bool = optional(
        "Let the template begin the assistant's turn.", default=True
    )
    continue_final_message: bool = optional(
        "Go on in the last message; without a generation prompt.", default=False
    )
    chat_template_kwargs: dict[str, JsonValue] | None = optional(
        "Variables of the tokenizer's chat template."
    )


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORT = Hint(variable="reasoning_effort", switch="enable_thinking")
Verbosity = Literal["low", "medium", "high"]
VERBOSITY = Hint(variable="verbosity")

_LOGPROBS: JsonDict = {
    "anyOf": [in_case({}, ("top_logprobs",)), in_case({"logprobs": {"const": True}})]
}


class ChatRequest(SamplingFields, TemplateFields, ToolFields):
    """``POST /v1/chat/completions``."""

    model_config = ConfigDict(json_schema_extra=_LOGPROBS)

    unsupported: ClassVar[dict[str, str]] = _UNSUPPORTED | {
        "functions": "use 'tools'",
        "function_call": "use 'tool_choice'",
        "audio": TEXT_ONLY,
        "web_search_options": "the server reads nothing from the web",
        "chat_template": "the tokenizer's own template is used",
        "documents": "write them into a message",
        "return_prompt_text": "use 'return_token_ids' and /detokenize",
    }
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = _FIXED | {
        "modalities": (["text"],),
    }

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = optional("Default: what the context has room for.", ge=1, le=MAX_COUNT)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = optional("Begin with the last message, the assistant's own.", default=False)
    reasoning_effort: Annotated[Effort | None, EFFORT] = optional(
        "For chat templates that read it, or whether to think."
    )
    verbosity: Annotated[Verbosity | None, VERBOSITY] = optional("For chat templates that read it.")
    add_special_tokens: bool = optional("Templates write their own BOS.", default=False)

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that bounds a choice's tokens, and the bound; None: what there is room for."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """The number of likeliest tokens reported next to each; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


_PROMPT_OR_MESSAGES: JsonDict = {
    "anyOf": [
        in_case(
            {"prompt": {"type": "string"}}, ("messages", "tools", *TemplateFields.model_fields)
        ),
        in_case({"messages": {"type": "array"}}, ("prompt",)),
    ]
}


class TokenizeRequest(TemplateFields):
    """``POST /tokenize``: of a ``prompt`` as ``/v1/completions`` takes it, or of ``messages`` as
    ``/v1/chat/completions`` does.
    """

    unsupported: ClassVar[dict[str, str]] = {
        "chat_template": ChatRequest.unsupported["chat_template"],
        "documents": ChatRequest.unsupported["documents"],
        "mm_processor_kwargs": TEXT_ONLY,
    }

    model_config = ConfigDict(json_schema_extra=_PROMPT_OR_MESSAGES)

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    tools: ToolsField | None = optional("With messages.", min_length=1, max_length=MAX_TOOLS)
    add_special_tokens: bool | None = optional("Default: true for a prompt, false for messages.")
    allow_special_tokens: bool | None = optional("Default: true for a prompt, false for messages.")
    return_token_strs: bool = optional("The vocabulary's entries, too.", default=False)


class DetokenizeRequest(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]
