"""Decides which forwards of a CPU are recorded, and when their recordings are used."""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, cast

import torch

from engine.batch import Bucket, ForwardOutput, InputBatch, pad_batch
from engine.capture.recording import CapturedForward, Recorder
from engine.kernels import Renews

logger = logging.getLogger(__name__)

_MOST_ROWS = 96
"""Forwards of more rows are not recorded: beside them the interpreter's time does not count."""
_MOST_BYTES = 256 << 20
"""Memory of all recordings together."""
_OFTEN = 5.0
"""A shape is recorded when it has come for this time. Recording and comparing a forward cost what about
six replays save; with a threshold of about as many, a shape costs at most twice what the best choice in
hindsight would (the ski rental problem)."""
_SHORT_SECONDS = 6e-3
"""Forwards that take a team longer always run in a team; shorter ones may run in one thread."""
_PROMPT_ROWS = (8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, _MOST_ROWS)
"""Steps that read prompts have any number of rows, few of them with logits: they are padded to one of
these, and to a power of two of rows with logits."""
_TRIALS = 5
"""Replays that are timed of either number of threads."""
_MUCH_FASTER = 1.15
"""A team is taken for a short forward only if it is faster by this factor: the server's other threads and
processes need cores, too."""


Run = Callable[[], ForwardOutput]


class Replays:
    """Runs a runner's forwards again. This one has nothing to run again: each runs as it is."""

    def prepare(
        self, planned: Callable[[InputBatch], Run], hidden_layers: tuple[int, ...] = ()
    ) -> None:
        """Captures what is captured at start. ``planned``: plans a batch and returns its forward.
        ``hidden_layers``: of all hidden states that a batch may want."""

    def pad(self, batch: InputBatch) -> InputBatch:
        """Returns the batch as ``forward`` wants it; the rows that it has come first."""
        return batch

    def forward(self, batch: InputBatch, plan: object, run: Run) -> ForwardOutput:
        """``run``: the model's forward over the batch, with ``plan``. Returns what it returns."""
        del batch, plan
        return run()

    def is_settled(self, batch: InputBatch) -> bool:
        """Whether the next forward takes as long as all those after it."""
        del batch
        return True


class _Shape(NamedTuple):
    """The key of a recording: it serves all forwards that are equal in this."""

    num_rows: int
    num_logits: int
    hidden_layers: tuple[int, ...]
    num_threads: int
    is_adapted: bool


class _Capture:
    """A shape's recording. ``num_lost``: the forwards without one, in as many times what a replay spares:
    those that ran padded in a larger shape's lost less. ``is_trusted``: a replay was bit-identical to
    the model's own forward."""

    def __init__(self) -> None:
        self.num_lost = 0.0
        self.graph: CapturedForward | None = None
        self.is_trusted = False
        self.threads = _Threads()

    @property
    def is_timed(self) -> bool:
        """A replay was timed."""
        return self.is_trusted and self.threads.seconds < float("inf")

    def expect(self) -> None:
        """Lets the next forward be recorded."""
        self.num_lost = max(self.num_lost, _OFTEN - 1.0)


class _Threads:
    """The number of threads for replays of one recording: replays in one thread and in a team are timed
    in turn, then one of the two is chosen."""

    def __init__(self) -> None:
        self.chosen: int | None = None
        self._seconds: dict[int, list[float]] = {1: [], torch.get_num_threads(): []}

    @property
    def seconds(self) -> float:
        """The shortest time of a replay."""
        return min((min(each) for each in self._seconds.values() if each), default=float("inf"))

    def next(self) -> int:
        """Returns the number of threads for the next replay; the first is a team's."""
        if self.chosen is not None:
            return self.chosen
        return min(reversed(self._seconds), key=lambda count: len(self._seconds[count]))

    def observe(self, num_threads: int, seconds: float) -> None:
        self._seconds[num_threads].append(seconds)
        team = max(self._seconds)
        if num_threads == team and (team == 1 or seconds > _SHORT_SECONDS):
            self.chosen = team
        elif min(map(len, self._seconds.values())) == _TRIALS:
            alone = min(self._seconds[1])
            self.chosen = team if alone > _MUCH_FASTER * min(self._seconds[team]) else 1


class Captures(Replays):
    """Recordings of forwards by shape; the least used ones are dropped first.

    A shape is recorded once it has occurred often enough to recur. The next time, with other inputs,
    the recording's results are compared with the model's, and are used from then on if they are equal.
    Until then a recording with more rows serves it, if there is one whose padding takes less time than
    the interpreter would. A model whose recording computes something else, or cannot be made, runs as it
    is.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._captures: OrderedDict[_Shape, _Capture] = OrderedDict()
        self._hidden_layers: tuple[int, ...] = ()
        self._spared: list[float] = []
        """Seconds that replays took less than the model's own forwards; when compared, sorted."""
        self._is_open = True

    def prepare(
        self, planned: Callable[[InputBatch], Run], hidden_layers: tuple[int, ...] = ()
    ) -> None:
        """Records nothing yet."""
        del planned
        self._hidden_layers = hidden_layers

    def pad(self, batch: InputBatch) -> InputBatch:
        """Asks for all hidden states: a recording keeps them for nothing, and serves those who read them
        and those who do not. Pads up to a number of rows that is recorded, where its own is not and the
        padding takes less time than what the interpreter does between the kernels."""
        if not self._is_open or not 0 < batch.num_rows <= _MOST_ROWS:
            return batch
        batch = self._with_hidden(batch)
        own = self._shape_of(batch)
        known = self._captures.setdefault(own, _Capture())
        if known.num_lost >= _OFTEN - 1.0:  # it has a recording, or the next forward is recorded
            is_dear = known.is_timed and self._lost_by_padding(batch.num_rows, own) >= 1.0
            return batch if is_dear else _filled(batch, own)
        if own.num_logits < own.num_rows:
            known.num_lost += own != self._shape_at(batch)  # else the forward counts it
            return batch
        larger = self._shape_with_room(own)
        if larger is None or (lost := self._lost_by_padding(batch.num_rows, larger)) >= 1.0:
            return batch
        known.num_lost += lost
        return _filled(batch, larger)

    def _shape_of(self, batch: InputBatch) -> _Shape:
        """Returns the shape in which a batch is recorded."""
        own = self._shape_at(batch)
        if own.num_logits == own.num_rows:
            return own
        num_rows = next(each for each in _PROMPT_ROWS if each >= own.num_rows)
        num_logits = min(num_rows, 1 << (own.num_logits - 1).bit_length())
        return own._replace(num_rows=num_rows, num_logits=num_logits)

    def _shape_at(self, batch: InputBatch) -> _Shape:
        """Returns the shape of a batch as it is. Its inputs lie where those of as many rows always do."""
        sizes = batch.num_rows, max(1, len(batch.logits_indices))
        return _Shape(*sizes, batch.hidden_layers, torch.get_num_threads(), batch.is_adapted)

    def _with_hidden(self, batch: InputBatch) -> InputBatch:
        layers = self._hidden_layers
        return replace(batch, hidden_layers=layers) if {*batch.hidden_layers} < {*layers} else batch

    def _shape_with_room(self, own: _Shape) -> _Shape | None:
        """Returns the smallest shape of the recordings that serve such a batch when it is padded."""
        fitting = (
            shape
            for shape, capture in self._captures.items()
            if own.num_rows < shape.num_rows == shape.num_logits
            and shape[2:] == own[2:]
            and capture.is_trusted
        )
        return min(fitting, default=None)

    def _lost_by_padding(self, num_rows: int, shape: _Shape) -> float:
        """Returns what so many rows lose in a larger shape, at most, in times of what a replay spares."""
        # They would take at least their share of it: weights that are read only make them dearer.
        padding = self._captures[shape].threads.seconds * (1.0 - num_rows / shape.num_rows)
        spared = self._spared[len(self._spared) // 2]
        return padding / spared if spared > 0.0 else float("inf")

    def forward(self, batch: InputBatch, plan: object, run: Run) -> ForwardOutput:
        if not self._is_open or batch.num_rows > _MOST_ROWS:
            return run()
        shape = self._shape_at(batch)
        capture = self._captures.setdefault(shape, _Capture())
        self._captures.move_to_end(shape)
        renewing = cast(Renews, plan)
        if capture.graph is not None and capture.is_trusted:
            output = self._replay(capture.threads, capture.graph, renewing)
            return output._replace(num_rows=batch.num_rows)
        num_own = sum(each.num_rows for each in batch.requests)
        return self._learn(capture, renewing, run, num_own)._replace(num_rows=0)

    def _learn(self, capture: _Capture, plan: Renews, run: Run, num_own: int) -> ForwardOutput:
        """Runs a forward whose shape has no recording that is trusted; ``num_own`` of its rows are no
        padding."""
        if capture.graph is not None:
            return self._compare(capture, capture.graph, plan, run, num_own)
        capture.num_lost += 1.0
        return run() if capture.num_lost < _OFTEN else self._record(capture, run)

    def _replay(self, threads: _Threads, graph: CapturedForward, plan: Renews) -> ForwardOutput:
        num_threads = threads.next()
        if threads.chosen is not None:
            # What was tried may have been one short text's rows, and these be rows of many long texts.
            is_heavy = num_threads == 1 and graph.wants_team(plan)
            return graph.replay(plan, torch.get_num_threads() if is_heavy else num_threads)
        start = self._clock()
        output = graph.replay(plan, num_threads)
        threads.observe(num_threads, self._clock() - start)
        return output

    def is_settled(self, batch: InputBatch) -> bool:
        """Expects the batch's shapes, its own and the one it is padded to, to come again."""
        if not self._is_open or batch.num_rows > _MOST_ROWS:
            return True
        batch = self._with_hidden(batch)
        self._captures.setdefault(self._shape_of(batch), _Capture()).expect()
        capture = self._captures.setdefault(self._shape_at(self.pad(batch)), _Capture())
        capture.expect()
        return capture.is_trusted and capture.threads.chosen is not None

    def _record(self, capture: _Capture, run: Run) -> ForwardOutput:
        recorder = Recorder()
        with recorder.watch():
            output = run()
        if recorder.reason is not None:
            self._close(recorder.reason)
            return output
        capture.graph = CapturedForward(recorder, output)
        self._forget()
        return output.with_own_logits()

    def _compare(
        self, capture: _Capture, graph: CapturedForward, plan: Renews, run: Run, num_own: int
    ) -> ForwardOutput:
        restore = plan.keep()
        start = self._clock()
        got = graph.replay(plan, torch.get_num_threads()).with_own_logits()
        replayed = self._clock()
        restore()
        expected = run()
        insort(self._spared, self._clock() - replayed - (replayed - start))
        # Logits of padding are those of the first row; its states are whatever lay there.
        first, second = (
            (each.logits, *(states[:num_own] for states in each.hidden)) for each in (got, expected)
        )
        pairs = zip(first, second, strict=True)
        capture.is_trusted = all(_same_bits(*pair) for pair in pairs)
        if not capture.is_trusted:
            self._close("a recorded one computes something else")
        return expected

    def _forget(self) -> None:
        """Drops the recordings that were not used for longest, until the rest has room."""
        every = self._captures.values()
        held = [(each, each.graph.num_bytes) for each in every if each.graph is not None]
        total = sum(num_bytes for _, num_bytes in held)
        for each, num_bytes in held[:-1]:
            if total > _MOST_BYTES:
                total -= num_bytes
                each.graph, each.is_trusted, each.num_lost = None, False, 0.0

    def _close(self, reason: str) -> None:
        logger.info("forwards are not captured: %s", reason)
        self._is_open = False
        self._captures.clear()


def _filled(batch: InputBatch, shape: _Shape) -> InputBatch:
    """Returns the batch, padded to the shape's rows and rows with logits."""
    if (shape.num_rows, shape.num_logits) == (batch.num_rows, len(batch.logits_indices)):
        return batch
    return pad_batch(batch, Bucket(shape.num_rows, len(batch.requests)), shape.num_logits)


def _same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether they are equal byte by byte: no number differs from itself."""
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (got, expected)))
