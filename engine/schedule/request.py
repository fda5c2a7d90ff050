"""A request's mutable state inside the engine, and its part in a step. Changed only on the engine
thread."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from drafters.tree import EMPTY, DraftTree, chain
from engine.request.events import FinishInfo, FinishReason, TokenLogprobs
from engine.request.outcome import Outcome
from engine.request.params import GenerationRequest
from engine.request.stats import Reason, RequestStats
from engine.sampling.state import SamplingState
from kvpool.block_pool import Restoration

if TYPE_CHECKING:
    from torch import Tensor

    from engine.batch import RequestRows


@dataclass(slots=True, eq=False)
class Request:
    """``token_ids`` is the prompt plus everything emitted. The KV of
    ``token_ids[:num_computed_tokens]`` is valid; steps work off what lies past it, ``num_new_tokens``.
    Where that is a single token, it is the anchor."""

    params: GenerationRequest
    sampling: SamplingState
    arrival_order: int = 0
    adapter: Any = None
    """The adapter of its rows (``engine.model.adapted.Adapter``), if they have one."""
    drafting: Any = None
    """Its drafters' parts in it (``engine.speculation.drafting.Drafting``), if it has any."""
    stats: RequestStats = field(init=False)
    request_id: str = field(init=False)
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    is_running: bool = False
    """It has a block table, and rows in every step; else it waits, or is over."""
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Gathered chunk by chunk, by position in the prompt."""
    sent_prompt_logprobs: bool = False
    restoration: Restoration | None = None
    """While it waits for blocks of its text to come back into memory."""
    num_charged_tokens: int = 0
    """So many of ``token_ids`` the tenant was charged for."""
    pooled: Tensor | None = None
    """The states of ``num_pooled_tokens`` as far as they are pooled: ``[hidden_size]``, fp64."""
    num_pooled_tokens: int = 0
    embedding: bytes | None = None

    def __post_init__(self) -> None:
        self.stats = RequestStats(drafter=self.params.speculative.draft_strategy)
        self.request_id = self.params.request_id
        self.token_ids = list(self.params.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)

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
    def owed_mask_seconds(self) -> float:
        """The time that its grammar has taken beyond its shares of the steps so far."""
        return 0.0 if self.sampling.grammar is None else self.sampling.grammar.time.owed

    @property
    def rank(self) -> tuple[int, int]:
        """Orders requests: lower priority value first, then earlier arrival."""
        return (self.params.priority, self.arrival_order)

    @property
    def deadline(self) -> float:
        """On ``time.perf_counter``'s clock; infinite where there is none."""
        return math.inf if self.params.deadline is None else self.params.deadline

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Prompt rows still owe logprobs; then none of them may come from the prefix cache."""
        wanted = self.params.sampling.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """All of them, once, with the request's first event; the first token has none."""
        if self.params.sampling.prompt_logprobs is None or self.sent_prompt_logprobs:
            return None
        self.sent_prompt_logprobs = True
        return (None, *(self.prompt_logprobs[at] for at in range(1, self.num_prompt_tokens)))

    def max_cached_tokens(self) -> int:
        if self.wants_prompt_logprobs:
            return 0
        # A mean needs every row once.
        most = self.num_pooled_tokens if self.params.pooling == "mean" else len(self.token_ids)
        return min(most, len(self.token_ids) - 1)

    def start(self, num_cached: int) -> None:
        """Waiting -> running, on a fresh block table with ``num_cached`` tokens already committed."""
        self.is_running = True
        self.restoration = None
        self.num_computed_tokens = num_cached
        if self.first_scheduled_time is None:
            self.first_scheduled_time = time.perf_counter()
            self.num_cached_tokens = num_cached

    def preempt(self) -> None:
        """Running -> waiting; its keys and values are gone, its tokens are not."""
        self.is_running = False
        self.num_computed_tokens = 0
        self.num_preemptions += 1

    def commit(self, num_new: int, emitted_token_ids: Sequence[int]) -> None:
        """``num_new`` more rows are final; the emitted tokens follow."""
        self.num_computed_tokens += num_new
        self.token_ids.extend(emitted_token_ids)
        self.sampling.append(emitted_token_ids)
        if emitted_token_ids and self.first_token_time is None:
            self.first_token_time = time.perf_counter()

    def finish_info(
        self, reason: FinishReason, stop_token_id: int | None = None, cut: str = ""
    ) -> FinishInfo:
        """The account that goes out with the last event; the request is over."""
        now = time.perf_counter()
        scheduled = self.first_scheduled_time or now
        arrival = self.params.arrival_time or scheduled
        return FinishInfo(
            reason=reason,
            stop_token_id=stop_token_id,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            speculative=self.stats,
            arrival_time=arrival,
            queue_seconds=scheduled - arrival,
            time_to_first_token_seconds=(self.first_token_time or now) - arrival,
            e2e_seconds=now - arrival,
            num_preemptions=self.num_preemptions,
            embedding=self.embedding,
            cut=cut,
        )


@dataclass(slots=True)
class ScheduledRequest:
    """A request's part in a step. The scheduler plans it, speculation drafts for it, the batch lays out
    its rows, verification finds its outcome, and the report says what it took.

    Its rows are ``num_known`` known tokens from position ``base`` on (tokens computed before the step),
    then the nodes of ``draft``. ``samples``: the anchor is among them, so that the target's next token
    comes out of this step, as ``outcome``.
    """

    request: Request
    num_known: int
    base: int = field(init=False)
    samples: bool = field(init=False)

    max_nodes: int = 0
    """Draft nodes that make sense in this step; ``max_depth`` bounds their depth."""
    max_depth: int = 0
    num_asked: int = 0
    """So many of ``max_nodes`` the drafter is asked for; 0: it is not asked."""
    row_prices: Sequence[float] = ()
    """See ``DraftRequest``."""
    proposal: DraftTree = EMPTY
    draft: DraftTree = EMPTY
    """The part of the proposal that is verified; ``reason`` says why it is no larger."""
    reason: Reason = ""
    shares: dict[Any, DraftTree] = field(default_factory=dict)
    """The drafts of the host and of each guest that was asked (``engine.speculation.parts``)."""

    hidden_layers: tuple[int, ...] = ()
    """The layers whose hidden states of this step the drafter reads, in its order."""
    num_top_tokens: int = 0
    """So many of the target's likeliest tokens per row the drafter wants to see, with their
    probabilities where ``wants_top_probs``."""
    wants_top_probs: bool = False

    copies: tuple[int, int] | None = None
    """The shortest and longest match of a draft that the device makes; ``draft`` is as long, and of other
    tokens, until the step is read."""
    num_matched: int = 0
    """Tokens that agree before what the device has copied."""

    rows: RequestRows = field(init=False, repr=False)
    """Its rows, and where they lie in the batch."""
    outcome: Outcome | None = None
    top_token_ids: Sequence[Sequence[int]] | None = None
    """The target's likeliest tokens at the anchor's row and each node's, best first; their
    logits, and their probabilities."""
    top_logits: Sequence[Sequence[float]] | None = None
    top_probs: Sequence[Sequence[float]] | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """Log-probabilities of the emitted tokens, for requests that asked."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    """Its shares of the step, as in ``SpeculativeStats``."""

    def __post_init__(self) -> None:
        request = self.request
        if self.sampling.num_unseen:  # all that is known is under way
            self.base = len(request.token_ids) + self.num_unsure
            self.samples = True
        else:
            self.base = request.num_computed_tokens
            self.samples = self.num_known == request.num_new_tokens

    @property
    def num_unsure(self) -> int:
        """Nodes before the step that are not read yet; ``base`` takes all of them for accepted."""
        return max(0, self.sampling.num_unseen - 1)

    @property
    def is_pooled(self) -> bool:
        """Whether the hidden states of its known rows are read for an embedding."""
        return self.request.params.pooling != "none"

    @property
    def sampling(self) -> SamplingState:
        return self.request.sampling

    @property
    def anchor_logit(self) -> int:
        """The anchor's row among the step's logits, if the request samples; the nodes' rows follow."""
        rows = self.rows
        return rows.first_logit + rows.num_logits - 1 - len(self.draft.token_ids)

    def leave_top_tokens(self, num: int) -> None:
        """Keeps as many of each row's top tokens as were asked for, if more were read."""
        for name in ("top_token_ids", "top_logits", "top_probs"):
            rows = getattr(self, name)
            setattr(self, name, rows and [row[:num] for row in rows])

    def read_draft(self, token_ids: Sequence[int], num_matched: int) -> None:
        """The device has made the draft: of these tokens, or none where none agree before it."""
        self.num_matched = num_matched
        self.draft = chain(token_ids) if num_matched else EMPTY
        self.rows.num_logits -= len(token_ids) - len(self.draft)

    def leave_out_late_drafts(self) -> None:
        """Mask the rows, and leave out nodes for which the step has no time.

        In a chain that is decided before a node's own token is looked at, so it tells nothing of it. In
        a sampled tree of several branches it would: that one stays whole."""
        grammar, draft = self.sampling.grammar, self.draft
        if grammar is None or not draft:
            return
        if self.sampling.verification != "match" and not draft.is_chain():
            return
        num_left_out = 1 + len(draft) - grammar.num_maskable(draft.paths())
        if num_left_out:
            self.draft = draft.subtree(range(len(draft) - num_left_out))
            self.rows.num_logits -= num_left_out
            self.reason = "masks"

    @property
    def known_token_ids(self) -> list[int]:
        """A zero stands for one that only the device knows yet."""
        if self.sampling.num_unseen:
            return [0] * self.num_known
        return self.request.token_ids[self.base : self.base + self.num_known]

    @property
    def num_prompt_tokens(self) -> int:
        end = min(self.base + self.num_known, self.request.num_prompt_tokens)
        return max(0, end - self.base)

    @property
    def accepted_rows(self) -> tuple[int, ...]:
        """Rows after the anchor whose nodes are kept, counted from it."""
        return self.outcome.path[1:] if self.outcome else ()


@dataclass(slots=True)
class Plan:
    """The requests of a step, and what the scheduler did for it."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    num_rows: int = 0
    spare_rows: int = 0
    """Rows of the budget left for draft nodes."""
    admitted: list[Request] = field(default_factory=list)
    """Started for the first time; they may have been preempted at once."""
    num_waiting: int = 0
    """Requests for which there was no place."""
    is_ahead: bool = False
    """The step is launched before the one before is read."""
    is_plain: bool = False
    """Nobody is asked for a draft, so that it is seen what the step takes without."""
    draft_seconds: dict[str, float] = field(default_factory=dict)
    """Spent on drafting, by drafter."""
    speculation_seconds: float = 0.0
    """Spent on asking drafters, granting and learning from it, beside what they took themselves."""
    row_tokens: float = 0.0
    """Tokens that are not written while the step verifies one draft node."""
    waiting_tokens: float = 0.0
    """Tokens of each who was asked that are not written while the device waits for the host, where there
    is no node to charge them to."""

    @property
    def num_sampling(self) -> int:
        return sum(each.samples for each in self.scheduled)

    @property
    def num_context_tokens(self) -> int:
        """Computed in steps before."""
        return sum(each.base for each in self.scheduled)
