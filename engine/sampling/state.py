"""What the choice of a request's next token depends on besides the logits: plain Python and numpy.

One :class:`SamplingState` lives as long as its request, preemption included. It counts the tokens
that penalties ask for and remembers the few that bad words do. Rows of a step see it *after their
path*: the state plus the draft tokens between the anchor and the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from drafters.base import GREEDY, DraftSampling
from drafters.tree import EMPTY, DraftTree
from engine.errors import RequestError
from engine.params import GenerationRequest, SamplingParams, VerificationName
from engine.sampling.noise import DRAFT_STREAM, gumbel_list, request_key, step_key


class TokenCounts:
    """Output counts of the tokens seen, as arrays that grow in place. Prompt tokens count 0."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._token_ids: NDArray[np.int64] = np.zeros(64, np.int64)
        self._counts: NDArray[np.float32] = np.zeros(64, np.float32)

    def add(self, token_ids: Iterable[int], amount: int) -> None:
        for token_id in token_ids:
            slot = self._slots.setdefault(token_id, len(self._slots))
            if slot == len(self._token_ids):
                self._token_ids = np.resize(self._token_ids, 2 * slot)
                self._counts = np.concatenate([self._counts, np.zeros(slot, np.float32)])
            self._token_ids[slot] = token_id
            self._counts[slot] += amount

    def get(self, token_id: int) -> int:
        slot = self._slots.get(token_id)
        return 0 if slot is None else int(self._counts[slot])

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The distinct tokens seen, in the order of first sight."""
        return self._token_ids[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often each of ``token_ids`` was emitted."""
        return self._counts[: len(self._slots)]


class SamplingState:
    """Per-request plan, made once at admission, and the little that changes with every token.

    ``stop_token_ids`` are the tokens that end the request: its own and, unless it ignores them, the
    model's EOS tokens. ``max_num_tokens`` bounds prompt plus output. ``num_steps`` counts the steps
    that emitted something, the same whether or not the request was preempted between them.
    Raises RequestError for token ids outside the vocabulary.
    """

    def __init__(
        self,
        request: GenerationRequest,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        params = request.sampling
        _check_token_ids(params, vocab_size)
        self.params = params
        self.key = request_key(params.seed, params.choice_index)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_output_tokens = 0
        # Greedy rows have one possible token: every verification then comes to equality.
        self.verification: VerificationName = (
            "match" if self.is_greedy else request.speculative.verification
        )
        self.num_steps = 0
        self.max_num_tokens = min(self.num_prompt_tokens + params.max_tokens, max_model_len)
        eos = () if params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset((*params.stop_token_ids, *eos))

        self.counts: TokenCounts | None = None
        if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (
            1,
            0,
            0,
        ):
            self.counts = TokenCounts()
            if params.repetition_penalty != 1:
                self.counts.add(request.prompt_token_ids, 0)
        self.bias_token_ids = np.fromiter(params.logit_bias.keys(), np.int64)
        self.biases = np.fromiter(params.logit_bias.values(), np.float32)
        words = [word for word in params.bad_words_token_ids if word]
        self.bad_token_ids = sorted({word[0] for word in words if len(word) == 1})
        self._bad_sequences = [word for word in words if len(word) > 1]
        self._tail_len = max(map(len, self._bad_sequences), default=1) - 1
        self._tail = self._last(request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt plus output: the absolute position of the token that the anchor's row predicts."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0

    def draft_sampling(self) -> DraftSampling:
        """What a drafter has to know in order to draw in the coming step.

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

    @property
    def edits_logits(self) -> bool:
        """Whether this request's rows need more than temperature and truncation now."""
        return (
            self.counts is not None
            or bool(self.bias_token_ids.size)
            or bool(self.bad_token_ids)
            or bool(self._bad_sequences)
            or self.num_output_tokens < self.params.min_tokens
        )

    def append(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that a step emitted."""
        self.num_output_tokens += len(token_ids)
        self.num_steps += bool(token_ids)
        if self.counts is not None:
            self.counts.add(token_ids, 1)
        self._tail = self._last([*self._tail, *token_ids])

    def forbidden_token_ids(self, path: Sequence[int]) -> list[int]:
        """Tokens that may not follow ``path`` (draft tokens since the anchor): stop tokens before
        ``min_tokens`` outputs, and the last token of a bad word whose others end the text so far,
        prompt included."""
        forbidden = list(self.bad_token_ids)
        if self.num_output_tokens + len(path) < self.params.min_tokens:
            forbidden += self.stop_token_ids
        if self._bad_sequences:
            text = (*self._tail, *path)
            forbidden += [w[-1] for w in self._bad_sequences if text[1 - len(w) :] == w[:-1]]
        return forbidden

    def _last(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(token_ids[max(0, len(token_ids) - self._tail_len) :])


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One request's rows of a step: ``first_row`` is the anchor's, ``first_row + 1 + i`` node
    i's."""

    state: SamplingState
    first_row: int
    tree: DraftTree = field(default=EMPTY)

    @property
    def num_rows(self) -> int:
        return 1 + len(self.tree)

    def depths(self) -> list[int]:
        """Depth of every row: 0 for the anchor."""
        return [0, *self.tree.depths()]

    def paths(self) -> list[tuple[int, ...]]:
        """The draft tokens from the anchor (excluded) to every row (included)."""
        paths: list[tuple[int, ...]] = [()]
        for token_id, parent in zip(self.tree.token_ids, self.tree.parents, strict=True):
            paths.append((*paths[parent + 1], token_id))
        return paths


def _check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    named = {
        "logit_bias": params.logit_bias,
        "bad_words": [token_id for word in params.bad_words_token_ids for token_id in word],
        "stop_token_ids": params.stop_token_ids,
    }
    for param, token_ids in named.items():
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                message = f"{param}: token {token_id} is not in the vocabulary of {vocab_size}."
                raise RequestError(param, message)
