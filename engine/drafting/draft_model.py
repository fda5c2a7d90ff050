"""The draft models that drafters run, level by level, and the tokens that are chosen from their logits.

A level is one forward. Rows of a later level hold tokens that the level before it has chosen. In chains
their places are known in advance, so their tokens go from the device's choice into the next forward's
inputs, and the host waits once for all levels.

Tokens are sampled as the verifier samples, and with its noise, so that a draft agrees with the target
as often as the models do. Several at a row are the best few sums of log-probability and noise, which
are samples without replacement (Gumbel-top-k: Kool et al., arXiv 1903.06059). Logits processors are
left to the target: they change what is accepted, never what is written.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.base import DraftRequest, DraftSampling
from drafters.model.protocol import Candidates, DraftRows, Levels
from engine.attention.backend import AttentionBackend
from engine.batch import InputBatch, RequestRows, build_batch
from engine.drafting.own_states import OwnStates
from engine.kernels import host_kernel, is_host
from engine.model.runner import ModelRunner
from engine.sampling.noise_torch import gumbel
from engine.sampling.sampler import truncated
from engine.transfer import Readback, Stopwatch, read_now, upload
from kvpool.state_slots import StateSlots
from kvpool.store import KVStore

_NUM_SAMPLED_FROM = 256
"""Sampled drafts come from so many of the likeliest tokens; what is beyond is never drafted."""
_NUM_MATCHED_FROM = 128
"""Those of requests that are matched, where no distribution is judged: to find more costs more than they
are right."""


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """``position``: where the row's candidates would stand in the text."""

    sampling: DraftSampling
    position: int
    num_candidates: int

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature == 0

    @property
    def is_truncated(self) -> bool:
        """Whether tokens may be left out that the temperature would leave in."""
        chosen = self.sampling
        return bool(chosen.top_k or chosen.top_p < 1 or chosen.min_p > 0) and not self.is_greedy

    @property
    def is_sampled(self) -> bool:
        return self.sampling.verification != "match" and not self.is_greedy


class Choice(NamedTuple):
    """The tokens that were chosen, on the device: ``token_ids`` ``[num_rows, most]``, best first.
    ``finish`` returns each row's candidates, once what was added to the readback is fetched."""

    token_ids: Tensor
    finish: Callable[[], list[Candidates]]


@torch.inference_mode()
def begin_candidates(
    logits: Tensor,  # [num_rows, vocab_size], any float type
    rows: Sequence[ScoredRow],
    vocab_size: int,
    readback: Readback,
    token_map: Tensor | None = None,
) -> Choice:
    """Chooses each row's candidates. Tokens from ``vocab_size`` on, which the target does not have, are
    left out; ``distribution``s have this size. ``token_map``: the target's id of each column of
    ``logits``, where these are of a smaller vocabulary; None: they are the same."""
    values = logits[:, :vocab_size].float()
    samplings = [row.sampling for row in rows]
    most = max(row.num_candidates for row in rows)
    kernel = host_kernel("draft_tokens", logits.device)
    if kernel is not None and not any(row.is_sampled or row.is_truncated for row in rows):
        asked = [(row.sampling.key, row.position, row.sampling.temperature) for row in rows]
        contiguous = values.contiguous()
        chosen, shares = kernel.suggest_rows(contiguous, asked, most, _NUM_MATCHED_FROM, token_map)
        return Choice(chosen, _listed(chosen, shares, rows, readback))
    if all(row.is_greedy for row in rows):
        top, token_ids = _top(values, most, token_map)  # [num_rows, most]
        shares = (top - values.logsumexp(dim=-1, keepdim=True)).exp()
        return Choice(token_ids, _listed(token_ids, shares, rows, readback))
    top, token_ids = _top(values, max(most, _NUM_SAMPLED_FROM), token_map)
    covered = None
    if any(sampling.top_p < 1 and not sampling.top_k for sampling in samplings):
        temperatures = _column([sampling.temperature or 1.0 for sampling in samplings], values)
        sums = [(part / temperatures).logsumexp(dim=-1, keepdim=True) for part in (top, values)]
        covered = (sums[0] - sums[1]).exp()
    log_probs = truncated(top, samplings, covered).log_softmax(dim=-1)
    scores = log_probs + _noise(token_ids, rows)
    best, order = scores.topk(min(most, scores.shape[1]), dim=-1)
    confidences = (best - scores.logsumexp(dim=-1, keepdim=True)).exp()
    chosen = token_ids.gather(1, order)
    listed = _listed(chosen, confidences, rows, readback)
    if not any(row.is_sampled for row in rows):
        return Choice(chosen, listed)
    probs = log_probs.exp().float()
    likeliest = readback.add(probs[:, 0])
    distributions = probs.new_zeros(len(rows), vocab_size).scatter_(1, token_ids, probs)

    def finish() -> list[Candidates]:
        found = listed()
        for at, (each, sure) in enumerate(zip(found, likeliest.tolist(), strict=True)):
            if rows[at].is_sampled:
                confidences = [sure] * len(each.token_ids)
                found[at] = Candidates(each.token_ids, confidences, distributions[at])
        return found

    return Choice(chosen, finish)


def _top(values: Tensor, count: int, token_map: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the largest logits of each row and the target's ids of their tokens."""
    top, token_ids = values.topk(min(count, values.shape[1]), dim=-1)
    return top, token_ids if token_map is None else token_map[token_ids]


def _noise(token_ids: Tensor, rows: Sequence[ScoredRow]) -> Tensor:
    """Returns Gumbel noise of each row's position; none in greedy rows: ``[num_rows, num_tokens]``."""
    device = token_ids.device
    keys = upload([row.sampling.key for row in rows], device)
    positions = upload([row.position for row in rows], device)
    noise = gumbel(keys, positions, token_ids)
    return noise * _column([float(not row.is_greedy) for row in rows], noise)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return upload(values, like.device)[:, None]


def _listed(
    token_ids: Tensor, confidences: Tensor, rows: Sequence[ScoredRow], readback: Readback
) -> Callable[[], list[Candidates]]:
    """Lists the first ``num_candidates`` of each row that are not ruled out."""
    read = readback.add(token_ids), readback.add(confidences)

    def finish() -> list[Candidates]:
        found = []
        for row, tokens, shares in zip(rows, *(each.tolist() for each in read), strict=True):
            possible = [(t, s) for t, s in zip(tokens, shares, strict=True) if s > 0]
            possible = possible[: row.num_candidates]
            found.append(Candidates([t for t, _ in possible], [s for _, s in possible]))
        return found

    return finish


class DraftLimits(NamedTuple):
    """``vocab_size`` of the target; the rest as in ``drafters.model.protocol.DraftModel``."""

    vocab_size: int
    max_len: int
    max_catch_up_rows: int


class LevelModel(ABC):
    """A ``drafters.model.protocol.DraftModel``."""

    owns_rows: bool
    first_row = 0
    keeps_anchor = True
    num_parallel = 1
    most_depth: int | None = None
    num_slots = 0
    read_now = staticmethod(read_now)

    def __init__(
        self, attention: AttentionBackend, limits: DraftLimits, token_map: Tensor | None = None
    ) -> None:
        """``token_map`` as for ``begin_candidates``."""
        self._token_map = token_map
        self._attention = attention
        self._device = attention.store.device
        self.block_size = attention.store.block_size
        self._vocab_size, self.max_len, self.max_catch_up_rows = limits

    @property
    def store(self) -> KVStore:
        """Where its rows lie."""
        return self._attention.store

    @property
    def runs_ahead(self) -> bool:
        return not is_host(self._device)

    def usable_rows(self, ask: DraftRequest, num_valid: int) -> int:
        del ask
        return num_valid

    def leave(self, request_id: str) -> None:  # noqa: B027
        """Nothing is kept of requests here."""

    @torch.inference_mode()
    def begin(
        self, levels: Sequence[Sequence[DraftRows]], readback: Readback
    ) -> Callable[[], Levels]:
        """Launches all levels. The device is not waited for."""
        choices = [self._choose(levels[0], None, readback)]
        stop = _watch(self._device)
        for above, rows in pairwise(levels):
            chosen = _chosen(above, choices[-1], rows)
            choices.append(self._choose(rows, chosen, readback))
        seconds = stop()

        def finish() -> Levels:
            found = [self._by_request(*each) for each in zip(levels, choices, strict=True)]
            return Levels(found, seconds())

        return finish

    def _choose(
        self, rows: Sequence[DraftRows], chosen: Tensor | None, readback: Readback
    ) -> Choice | None:
        """Runs one forward: what may follow its scored rows, one request's after another's; None: there
        are none. ``chosen``: the rows' tokens, where only the device knows them."""
        batch = build_batch([self._rows_of(each) for each in rows], self.block_size)
        batch.chosen = chosen
        logits = self._logits(rows, batch)
        if not any(map(self._num_results, rows)):
            return None
        positions = iter(self._positions(rows, batch))
        scored = [
            ScoredRow(each.ask.sampling, next(positions), each.num_candidates)
            for each in rows
            for _ in range(self._num_results(each))
        ]
        return begin_candidates(logits, scored, self._vocab_size, readback, self._token_map)

    def _positions(self, rows: Sequence[DraftRows], batch: InputBatch) -> list[int]:
        """Returns where the candidates of each scored row would stand in the text."""
        del rows
        return [batch.positions[row] + 1 for row in batch.logits_indices]

    def _rows_of(self, rows: DraftRows) -> RequestRows:
        """Returns a request's rows of the forward."""
        return request_rows(rows)

    def _num_results(self, rows: DraftRows) -> int:
        """Returns how many of the request's rows of the forward are scored."""
        return rows.num_scored

    def _by_request(
        self, rows: Sequence[DraftRows], choice: Choice | None
    ) -> list[list[Candidates]]:
        """Returns the candidates of a level by request and scored row, once they were fetched."""
        found = iter(() if choice is None else choice.finish())
        return [[next(found) for _ in range(self._num_results(each))] for each in rows]

    @abstractmethod
    def _logits(self, rows: Sequence[DraftRows], batch: InputBatch) -> Tensor:
        """Runs the rows and keep their keys and values: ``[num_scored_rows, vocab_size]``, of the rows
        ``batch.logits_indices``."""


class EngineDraftModel(LevelModel):
    """A model runner that drafts."""

    def __init__(
        self,
        runner: ModelRunner,
        limits: DraftLimits,
        owns_rows: bool,
        states: StateSlots | OwnStates | None = None,
    ) -> None:
        """``states``: where layers keep some, its target's, from which it begins, or its own. Raises
        ValueError for a runner that is not in fast mode."""
        if runner.attention.needs.determinism != "fast":
            raise ValueError("a draft model runs in fast mode: its trees are fed level by level")
        super().__init__(runner.attention, limits)
        self._runner = runner
        self.owns_rows = owns_rows
        self._states = states

    @property
    def runs_ahead(self) -> bool:
        # Its own states are told the tokens that stand in rows.
        return super().runs_ahead and not isinstance(self._states, OwnStates)

    def usable_rows(self, ask: DraftRequest, num_valid: int) -> int:
        if not isinstance(self._states, OwnStates):
            return num_valid
        return self._states.usable(ask.request_id, ask.token_ids, num_valid)

    def leave(self, request_id: str) -> None:
        if isinstance(self._states, OwnStates):
            self._states.forget(request_id)

    def _rows_of(self, rows: DraftRows) -> RequestRows:
        found = request_rows(rows)
        if isinstance(self._states, OwnStates):
            found.states = self._states.rows(rows)
        elif self._states is not None:
            name, num_nodes = rows.ask.request_id, len(found.parents)
            found.states = self._states.peek(name, found.base, found.num_known, num_nodes)
        return found

    def _logits(self, rows: Sequence[DraftRows], batch: InputBatch) -> Tensor:
        del rows
        return self._runner.forward(batch).logits


def request_rows(rows: DraftRows) -> RequestRows:
    is_tree = bool(rows.parents)
    return RequestRows(
        token_ids=rows.token_ids,
        num_known=0 if is_tree else len(rows.token_ids),
        base=rows.base,
        parents=rows.parents,
        block_table=rows.ask.block_table,
        num_logits=rows.num_scored,
        num_stored=rows.num_stored,
    )


def _chosen(above: Sequence[DraftRows], choice: Choice | None, rows: Sequence[DraftRows]) -> Tensor:
    """Returns the tokens of rows that follow those ``above``, one per request: ``[num_rows]``."""
    assert choice is not None
    names = [each.ask.request_id for each in above for _ in range(each.num_scored)]
    scored = {name: index for index, name in enumerate(names)}
    index = upload([scored[each.ask.request_id] for each in rows], choice.token_ids.device)
    return choice.token_ids[:, 0].index_select(0, index)


def _watch(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Starts a stopwatch. Returns what stops it, which returns what gives its seconds."""
    if device.type == "cuda":
        return Stopwatch(device).stop
    start = time.perf_counter()

    def stop() -> Callable[[], float]:
        seconds = time.perf_counter() - start
        return lambda: seconds

    return stop
