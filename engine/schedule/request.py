"""A request's mutable state inside the engine: changed only on the engine thread."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.events import TokenLogprobs
from engine.params import GenerationRequest
from engine.sampling.state import SamplingState
from engine.stats import RequestSpeculationStats


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """``token_ids`` is the prompt plus everything emitted. The KV of
    ``token_ids[:num_computed_tokens]`` is valid; steps work off what lies past it, ``num_new_tokens``.
    Where that is a single token, it is the anchor."""

    params: GenerationRequest
    sampling: SamplingState
    stats: RequestSpeculationStats
    arrival_order: int = 0
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By position in the prompt, gathered chunk by chunk."""
    told_prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        self.token_ids = list(self.params.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def request_id(self) -> str:
        return self.params.request_id

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.sampling.max_num_tokens - len(self.token_ids)

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: lower priority value, then earlier arrival."""
        return (self.params.priority, self.arrival_order)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Prompt rows still owe logprobs; then none of them may come from the prefix cache."""
        wanted = self.params.sampling.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def max_cached_tokens(self) -> int:
        return 0 if self.wants_prompt_logprobs else len(self.token_ids) - 1

    def start(self, num_cached: int) -> None:
        """Waiting -> running, on a fresh block table with ``num_cached`` tokens already committed."""
        self.status = RequestStatus.RUNNING
        self.num_computed_tokens = num_cached
        if self.first_scheduled_time is None:
            self.first_scheduled_time = time.perf_counter()
            self.num_cached_tokens = num_cached

    def preempt(self) -> None:
        """Running -> waiting; its keys and values are gone, its tokens are not."""
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_preemptions += 1

    def commit(self, num_new: int, emitted_token_ids: Sequence[int]) -> None:
        """``num_new`` more rows are final; the emitted tokens follow."""
        self.num_computed_tokens += num_new
        self.token_ids.extend(emitted_token_ids)
        self.sampling.append(emitted_token_ids)
        if emitted_token_ids and self.first_token_time is None:
            self.first_token_time = time.perf_counter()
