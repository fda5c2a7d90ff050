"""The plan of a request that was checked: the engine's requests and how their text is cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from engine.request.params import GenerationRequest
from server.errors import SAME, OwnNames

IGNORED_HEADER = "x-slipstream-ignored"
"""Lists the request's fields without effect."""
_MAX_PATH_CHARS, _MAX_IGNORED_CHARS = 120, 2000


def ignored_header(paths: Iterable[str]) -> dict[str, str]:
    """Returns the header that lists these fields, whatever letters and lengths their names have: names in
    JSON schemas are clients' own."""
    listed = ", ".join(quote(each[:_MAX_PATH_CHARS], safe=" $@:/[]") for each in paths)
    if len(listed) > _MAX_IGNORED_CHARS:
        listed = listed[:_MAX_IGNORED_CHARS].rpartition(", ")[0] + ", ..."
    return {IGNORED_HEADER: listed} if listed else {}


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a choice's tokens are shown, where its text ends, and how the text is taken apart.

    ``min_tokens``: a stop string counts once a later token completes it. ``tool_calls`` and
    ``reasoning`` are names of formats, "" for none: then the text is content. ``functions``: those that
    may be called, and the schemas of their arguments. ``reasoning_is_open``: the prompt ends inside the
    reasoning.
    """

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
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


@dataclass(frozen=True, slots=True)
class OfResponse:
    """The part of a plan that responses alone have. ``repeated``: what they say of their request;
    ``items``: the conversation before what is written; ``calls``: what an item that calls a function
    begins with, by the function's name."""

    repeated: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]]
    calls: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """Everything about a request that its reply needs. Choice ``i`` belongs to prompt ``i // n``.

    ``model``: its name in the reply. ``limit``: the most tokens that a choice was to have; None: what
    there is room for.
    ``num_logprobs``: None for none, else the number of alternatives shown; ``num_prompt_logprobs``
    likewise. ``beginnings``: by prompt, what the texts of its choices begin with before anything was
    written; ``echo``: that is the prompt itself. ``tokens_as_ids``: logprobs name tokens by their ids.
    ``continuous_usage``: every chunk counts. ``logged``: fields in which clients name people, as far
    as they are logged. ``metadata``: repeated by a whole reply. ``cache_salt``: the client's own.
    ``service_tier``: the reply's, where one was asked for. ``ignored``: the hints that nothing comes of,
    by their fields' paths. ``names``: the client's, of fields that are refused after this.
    ``as_base64``: vectors are texts.
    """

    request_id: str
    created: int
    model: str
    n: int
    choices: tuple[ChoicePlan, ...]
    beginnings: tuple[str, ...]
    echo: bool
    limit: int | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    tokens_as_ids: bool
    return_token_ids: bool
    return_drafted: bool
    logged: Mapping[str, Any]
    cache_salt: str
    service_tier: str | None
    metadata: Mapping[str, str]
    ignored: tuple[str, ...]
    names: OwnNames = SAME
    as_base64: bool = False
    response: OfResponse | None = None

    def ignoring(self, paths: Iterable[str]) -> RequestPlan:
        """Returns the same with further fields without effect."""
        return replace(self, ignored=tuple(dict.fromkeys((*self.ignored, *paths))))

    @property
    def num_at_once(self) -> int:
        """How many choices run at once. The texts of one request for embeddings may be more than the
        engine's queue and the tenant's seats."""
        request = self.choices[0].request
        most = request.batch.num_at_once if request.batch else None
        if most is None:
            return len(self.choices)
        return min(most, request.tenant.max_concurrent_requests or most)

    @property
    def seed(self) -> int:
        return self.choices[0].request.sampling.seed

    @property
    def adapter(self) -> str | None:
        """The name of the adapter that it asks for."""
        return self.choices[0].request.adapter

    @property
    def has_prediction(self) -> bool:
        return bool(self.choices[0].request.prediction_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(each.request.prompt_token_ids) for each in self.choices[:: self.n])

    @property
    def splits_reasoning(self) -> bool:
        return bool(self.choices[0].text.reasoning)

    def prompt_token_ids(self, choice_index: int) -> tuple[int, ...]:
        return self.choices[choice_index].request.prompt_token_ids

    def beginning(self, choice_index: int) -> str:
        """Returns what the choice's text begins with, before anything was written."""
        return self.beginnings[choice_index // self.n]
