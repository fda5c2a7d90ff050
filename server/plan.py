"""What a request asks for once it is checked: the engine's requests and how their text is cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.request.params import GenerationRequest


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a choice's tokens are shown and where its text ends.

    ``min_tokens``: a stop string counts once a later token completes it.
    """

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class MessageOptions:
    """How a choice's text is taken apart. ``tool_calls`` and ``reasoning`` are names of formats, "" for
    none: then the text is content. ``functions``: those that may be called, and the schemas of their
    arguments. ``reasoning_is_open``: the prompt ends inside the reasoning.
    """

    tool_calls: str = ""
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reasoning: str = ""
    reasoning_is_open: bool = False
    include_reasoning: bool = True

    @property
    def parses(self) -> bool:
        return bool(self.tool_calls or self.reasoning)


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    index: int
    request: GenerationRequest
    text: TextOptions
    message: MessageOptions = MessageOptions()


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """What a reply shows, and whether it is streamed.

    ``num_logprobs``: None for none, else the number of alternatives shown; ``num_prompt_logprobs``
    likewise. ``echo``: replies begin with the prompt's text, or else with ``prefix``.
    ``tokens_as_ids``: logprobs name tokens by their ids. ``continuous_usage``: every chunk counts.
    """

    stream: bool
    include_usage: bool
    continuous_usage: bool
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    tokens_as_ids: bool
    return_token_ids: bool
    return_drafted: bool
    echo: bool
    prefix: str


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """Everything about a request that its reply needs. Choice ``i`` belongs to prompt ``i // n``."""

    request_id: str
    created: int
    n: int
    prompts: tuple[Prompt, ...]
    choices: tuple[ChoicePlan, ...]
    reply: ReplyOptions
    user: str | None
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The client's own words for the log, which a whole reply repeats."""
    repeated: Mapping[str, Any] = field(default_factory=dict)
    """What the reply says of the request, by its names."""

    @property
    def seed(self) -> int:
        return self.choices[0].request.sampling.seed

    @property
    def has_prediction(self) -> bool:
        return bool(self.choices[0].request.prediction_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def splits_reasoning(self) -> bool:
        return any(choice.message.reasoning for choice in self.choices)

    def prompt_of(self, choice_index: int) -> Prompt:
        return self.prompts[choice_index // self.n]

    def echoed(self, choice_index: int) -> str:
        """Returns what the choice's text begins with, before anything was written."""
        return self.prompt_of(choice_index).text if self.reply.echo else self.reply.prefix
