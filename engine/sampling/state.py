"""All that the choice of a request's next token depends on besides the logits.

One :class:`SamplingState` lives as long as its request, preemption included. Rows of a step see it
*after their path*: the state plus the draft tokens between the anchor and the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

from drafters.base import GREEDY, DraftSampling
from drafters.tree import DraftTree
from engine.grammar.constraint import Constrain, GrammarConstraint
from engine.request.errors import RequestError
from engine.request.outcome import Outcome
from engine.request.params import GenerationRequest, SamplingParams, VerificationName
from engine.sampling.noise import DRAFT_STREAM, gumbel_list, request_key, step_key
from engine.sampling.processor import Facts, check_token_ids, new_processors


class SamplingState:
    """Per-request plan, made once at admission, and the little that changes with every token.

    ``stop_token_ids`` are the tokens that end the request: its own and, unless it ignores them, the
    model's EOS tokens. ``max_num_tokens`` bounds prompt plus output. ``num_steps`` counts the steps
    that emitted something, the same whether or not the request was preempted between them.
    ``constrain`` makes constraints of grammars; ``grammar`` is the request's own, if it has one.
    Raises RequestError for token ids outside the vocabulary, and for grammars that cannot be used.
    """

    def __init__(
        self,
        request: GenerationRequest,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        max_model_len: int,
        constrain: Constrain | None = None,
    ) -> None:
        params = request.sampling
        check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        self.params = params
        self.key = request_key(params.seed, params.choice_index)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_output_tokens = 0
        # Tokens at most that the device has chosen and the host has not read: the next step is planned.
        self.num_unseen = 0
        self.is_greedy = params.temperature == 0
        # Greedy rows have one possible token: every verification then comes to equality.
        self.verification: VerificationName = (
            "match" if self.is_greedy else request.speculative.verification
        )
        self._is_whole = self.verification == "match" and (self.is_greedy or not truncates(params))
        self.num_steps = 0
        self.max_num_tokens = min(self.num_prompt_tokens + params.max_tokens, max_model_len)
        eos = () if params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset((*params.stop_token_ids, *eos))

        self.grammar = _constraint(params, constrain)
        # Below it, tokens that end the request do not. Where the grammar leaves nothing else, they do.
        self.min_num_output_tokens = 0 if self.grammar is not None else params.min_tokens
        self.processors = new_processors(
            Facts(params, request.prompt_token_ids, self.stop_token_ids, vocab_size, self.grammar)
        )

    @property
    def is_plain(self) -> bool:
        """Whether the token of a row hangs on its logits, the temperature and the noise alone."""
        processors = self.processors
        return self._is_whole and not (processors and any(each.is_active() for each in processors))

    @property
    def num_tokens(self) -> int:
        """Prompt plus output: the absolute position of the token that the anchor's row predicts."""
        return self.num_prompt_tokens + self.num_output_tokens

    def draft_sampling(self) -> DraftSampling:
        """The facts that a drafter needs in order to sample in the coming step.

        Under "match" the noise is the verifier's, else stream 1 of this step and no other.
        """
        params, key = self.params, self.key
        if self.is_greedy:
            return GREEDY
        if self.verification != "match":
            key = step_key(key, DRAFT_STREAM, self.num_steps)
        return DraftSampling(
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            partial(gumbel_list, key),
            key,
            self.verification,
        )

    def append(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that a step emitted."""
        self.num_unseen = 0
        self.num_output_tokens += len(token_ids)
        self.num_steps += bool(token_ids)
        for processor in self.processors:
            processor.append(token_ids)


def truncates(params: SamplingParams) -> bool:
    """Whether some tokens are left out as too unlikely."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _constraint(params: SamplingParams, constrain: Constrain | None) -> GrammarConstraint | None:
    if not params.grammar:
        return None
    if constrain is None:
        raise RequestError("grammar", "this engine has no tokenizer, which grammars need")
    if params.ignore_eos:
        raise RequestError("ignore_eos", "ignore_eos: a text ends where its grammar ends")
    return constrain(params.grammar, params.grammar_fields)


class SampledRequest(Protocol):
    """A request that samples in a step (``engine.schedule.request.ScheduledRequest``): row
    ``anchor_logit`` of the step's logits is its anchor's, and those of its draft's nodes follow."""

    @property
    def sampling(self) -> SamplingState: ...
    @property
    def anchor_logit(self) -> int: ...
    @property
    def draft(self) -> DraftTree: ...

    outcome: Outcome | None


def rows_of(request: SampledRequest) -> range:
    """The request's rows among the step's logits."""
    first = request.anchor_logit
    return range(first, first + 1 + len(request.draft.token_ids))


def noise_positions(request: SampledRequest) -> list[int]:
    """Positions of the noise of the request's rows: where in its text the predicted tokens are."""
    state = request.sampling
    first = state.num_tokens + state.num_unseen
    return [first, *(first + depth for depth in request.draft.depths())]
