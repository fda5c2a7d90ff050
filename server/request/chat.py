"""The chat that every API's request comes to, and the completion beside it: what may be asked, and its
limits.

OpenAI's fields, the extras vLLM made common, what the logits processors declare, and ``speculative``; an
API of other fields says by ``OwnNames`` how it calls these. ``user`` goes into the request's log line, if
anywhere; ``metadata`` comes back, too. A ``Hint`` changes no text. Whether a value fits the model served
(token ids, lengths, drafters) is checked when the request is translated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, JsonValue

from engine.sampling.processor import parameters
from server.errors import OwnNames
from server.request.body import (
    MAX_SEED,
    SWITCHES,
    Body,
    Hint,
    Model,
    PromptField,
    StopField,
    TokenId,
    WithoutEffect,
    optional,
    with_fields,
)
from server.request.grammars import ResponseFormat, StructuredOutputs
from server.request.messages import (
    ChatMessage,
    ContentField,
    ToolFields,
)
from server.request.parsing import check
from server.request.speculative import SpeculativeField

MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_COUNT = 2**31 - 1
MAX_MESSAGES = 1 << 14

_LOGGED = "Written to the request log under log_client_fields."
_LISTED = """
num_ctx num_keep n_keep num_batch num_gqa num_gpu main_gpu num_thread numa low_vram f16_kv logits_all
use_mmap use_mlock rope_frequency_base rope_frequency_scale keep_alive ttl options usage response_fields
timings_per_token return_progress return_tokens post_sampling_probs id_slot backend_sampling weight
t_max_predict_ms reasoning_format parse_tool_calls thinking_forced_open reasoning_details client_metadata
provider providers route transforms models plugins fallbacks safe_prompt draft_model search_parameters
enable_search chat_id input_type embedding_types extra_headers extra_query mirostat_tau mirostat_eta
dynatemp_exponent xtc_threshold dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
samplers min_keep repeat_penalty repeat_last_n thinking reasoning reasoning_effort verbosity
"""
_LISTED_UNLESS: dict[str, tuple[Any, ...]] = {
    _LISTED: (),
    "typical_p typ_p tfs_z": (1, 1.0),
    "mirostat mirostat_mode dynatemp_range xtc_probability dry_multiplier top_a n_probs": (0, 0.0),
    "top_logprobs": (0,),
    "penalize_nl penalize_newline cache_prompt spaces_between_special_tokens": (True,),
    "vocab_only embedding_only verbose store": (False,),
    "prompt_cache_retention": ("in_memory", "in-memory"),
}
WITHOUT_EFFECT: WithoutEffect = {
    name: does for names, does in _LISTED_UNLESS.items() for name in names.split()
}
"""Fields that clients of OpenAI, llama.cpp, Ollama, LM Studio, OpenRouter and others send to any
server."""
TOKEN_LIMIT: dict[str, Any] = {
    "ge": -1,
    "le": MAX_COUNT,
    "json_schema_extra": {"not": {"const": 0}},
}
"""The bounds of a number of tokens to write."""


def limit_of(num_tokens: int | None) -> int | None:
    """Returns the most tokens to write; None: what there is room for."""
    return None if num_tokens == -1 else num_tokens


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORT = Hint(variable="reasoning_effort", switches=SWITCHES)
_SWITCH = Hint(switches=SWITCHES)
Verbosity = Literal["low", "medium", "high"]
VERBOSITY = Hint(variable="verbosity")


class ReasoningOptions(Body):
    """How much to think, as OpenAI and OpenRouter say it; reasoning is shown as it is written."""

    without_effect: ClassVar[WithoutEffect] = {
        "exclude": (False,),
        **dict.fromkeys(("summary", "generate_summary"), ()),
    }

    effort: Annotated[Effort | None, EFFORT] = optional(
        "For chat templates that read it, or whether to think."
    )
    enabled: Annotated[bool | None, _SWITCH] = None
    max_tokens: Annotated[int | None, Hint(variable="thinking_budget")] = None


class EventOptions(Body):
    """The options of all streams."""

    # Events are not padded.
    without_effect: ClassVar[WithoutEffect] = {"include_obfuscation": (False,)}


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


_MetadataKey = Annotated[str, Field(max_length=64)]
_MetadataValue = Annotated[str, Field(max_length=512)]


class CommonFields(Body):
    """The fields of all requests."""

    without_effect: ClassVar[WithoutEffect] = WITHOUT_EFFECT

    model: str | None = optional("The served model's name; may be left out.")
    temperature: float | None = optional("0 is greedy.", ge=0, le=2)
    seed: int | None = optional("Default and -1: drawn, and reported.", ge=-1, le=MAX_SEED)
    priority: int = optional("Lower runs first.", default=0, ge=-MAX_COUNT, le=MAX_COUNT)
    timeout: float | None = optional(
        "Seconds from arrival in which the reply has to be done; later it is an error.",
        gt=0,
        allow_inf_nan=False,
    )
    cache_salt: str | None = optional(
        "Caches are shared within one cache_salt only.", min_length=1, max_length=256
    )
    user: str | None = optional(_LOGGED, max_length=256)
    safety_identifier: str | None = optional(_LOGGED, max_length=256)
    prompt_cache_key: str | None = optional(
        "Requests with one key go to one replica; what they share is found by their texts.",
        max_length=256,
    )
    service_tier: Annotated[
        Literal["auto", "default", "flex", "scale", "priority", "standard_only"] | None,
        Hint(does=("auto", "default", "standard_only")),
    ] = optional("There is one tier; 'priority' is a field of its own.")
    metadata: dict[_MetadataKey, _MetadataValue] | None = optional(
        "Sent back with whole replies; written to the request log under log_client_fields.",
        max_length=16,
    )
    enable_thinking: Annotated[bool | None, _SWITCH] = optional("For chat templates that read it.")
    stream: bool = False
    speculative: SpeculativeField | None = None


def sharing(*names: str) -> Callable[[type[Model]], type[Model]]:
    """Gives a model these fields as all requests have them."""
    declared = CommonFields.model_fields
    return with_fields({name: (declared[name].annotation, declared[name]) for name in names})


_OF_PROCESSORS = {
    each.name: (each.type, optional(each.description, default=each.default))
    for each in parameters()
}


@with_fields(_OF_PROCESSORS)
class SamplingFields(CommonFields):
    """The further fields of completions and chats, with those that logits processors declare."""

    n: int = optional("Choices for each prompt.", default=1, ge=1, le=128)
    max_tokens: int | None = optional(
        "Default and -1: what the context has room for.", **TOKEN_LIMIT
    )
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

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that bounds a choice's tokens, and the bound; None: what there is room for."""
        return "max_tokens", limit_of(self.max_tokens)


class Completion(SamplingFields):
    """Texts, each of which is gone on from."""

    prompt: PromptField = Field(description="Text or token ids, one or a batch.")
    suffix: str | None = optional("What follows the text, which fills the gap.")
    echo: bool = optional("Begin the text with the prompt.", default=False)
    logprobs: int | None = optional(
        "Likeliest tokens reported next to each token.", ge=0, le=MAX_LOGPROBS
    )
    add_special_tokens: bool = optional("Let the tokenizer add its BOS.", default=True)
    allow_special_tokens: bool = optional(
        "Special tokens that the prompt spells are such tokens.", default=True
    )

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
    thinking: Annotated[JsonValue, _SWITCH] = optional(
        "The same; an object's 'type' may be 'enabled' or 'disabled'."
    )
    reasoning_effort: Annotated[Effort | None, EFFORT] = optional(
        "For chat templates that read it, or whether to think."
    )
    reasoning: ReasoningOptions | None = optional("As OpenRouter has it.")
    verbosity: Annotated[Verbosity | None, VERBOSITY] = optional("For chat templates that read it.")


_Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


class _Conversation(ToolFields):
    messages: _Messages


class Chat(SamplingFields, TemplateFields, ToolFields):
    """Messages that are answered: what the request of every API comes to."""

    messages: _Messages
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = optional("Begin with the last message, the assistant's own.", default=False)
    add_special_tokens: bool = optional("Templates write their own BOS.", default=False)

    @classmethod
    def saying(cls, given: dict[str, Any], names: OwnNames) -> Chat:
        """Returns the chat of fields that a client's own model has checked. What one of them became
        together with others (messages, tools and the choice among these) is checked here. Raises
        ApiError 400 with the client's ``names`` of them."""
        parts = {name: given[name] for name in given.keys() & {"messages", "tools", "tool_choice"}}
        made = check(_Conversation, parts, names)
        return cls.of(**given | {name: getattr(made, name) for name in made.model_fields_set})

    @property
    def num_logprobs(self) -> int | None:
        """The number of likeliest tokens reported next to each; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


Asked = Completion | Chat
"""A body that is planned."""
