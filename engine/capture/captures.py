"""Decides which forwards of a CPU are recorded, and when their recordings are used."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

import torch

from engine.batch import Bucket, ForwardOutput, InputBatch, pad_batch
from engine.capture.recorder import Recorder
from engine.capture.recording import Recording
from engine.capture.sample import Sample, Shape
from engine.kernels import Renews

logger = logging.getLogger(__name__)

_MOST_BYTES = 256 << 20
"""Memory of what a recording's forwards make; forwards that would take more run as they are."""
_OFTEN = 8
"""Forwards are recorded when so many have come: recording takes about what it spares so many."""
_ENOUGH = 4
"""Shapes compared before a recording serves others, too."""
_SHORT_SECONDS = 6e-3
"""Forwards that take a team longer always run in a team; shorter ones may run in one thread."""
_TRIALS = 5
"""Replays that are timed of either number of threads."""
_MUCH_FASTER = 1.15
"""A team is taken for a short forward only if it is faster by this factor: the server's other threads and
processes need cores, too."""


Run = Callable[[], ForwardOutput]
Planned = Callable[[InputBatch], Run]


class Replays:
    """Runs a runner's forwards again. This one has nothing to run again: each runs as it is."""

    def __init__(self, planned: Planned) -> None:
        """``planned``: plans a batch and returns its forward."""
        self._planned = planned

    def prepare(self, hidden_layers: tuple[int, ...] = ()) -> None:
        """Captures what is captured at start. ``hidden_layers``: of all hidden states that a batch may
        want."""

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


class _Kind(NamedTuple):
    """Forwards that are equal in this have one recording."""

    hidden_layers: tuple[int, ...]
    num_threads: int
    is_adapted: bool


class _Capture:
    """A kind's recording, or None, which serves up to ``most_rows``. ``known``: shapes whose replays were
    bit-identical to the model's own forward, and, once these are enough, others that were checked;
    ``threads``: by number of rows."""

    def __init__(self, most_rows: int) -> None:
        self.most_rows = most_rows
        self.num_seen = 0
        self.recording: Recording | None = None
        self.known: set[Shape] = set()
        self._least = self._most = Shape(0, 0)
        self.threads: defaultdict[int, _Threads] = defaultdict(_Threads)

    def is_too_large(self, shape: Shape) -> bool:
        if shape.num_rows > self.most_rows:
            return True
        return self.recording is not None and self.recording.num_bytes(shape) > _MOST_BYTES

    def serves(self, shape: Shape) -> bool:
        """Whether this shape is known or lies between known ones. A model that begins to do something
        else at some number of rows would do so at the larger of them, too."""
        if len(self.known) < _ENOUGH:
            return shape in self.known
        least, most = self._least, self._most
        return (
            least.num_rows <= shape.num_rows <= most.num_rows
            and least.num_logits <= shape.num_logits <= most.num_logits
        )

    def threads_of(self, num_rows: int) -> _Threads:
        """Where a team was seen to pay for fewer rows, or not to pay for more, nothing is to be timed."""
        threads = self.threads[num_rows]
        if threads.chosen is None:
            told = {
                each.chosen
                for rows, each in self.threads.items()
                if each.is_compared and (each.chosen != 1) == (rows < num_rows)
            }
            if len(told) == 1:
                threads.chosen = told.pop()
        return threads

    def know(self, shape: Shape) -> None:
        self.known.add(shape)
        ranges = [*zip(*self.known, strict=True)]
        self._least, self._most = (Shape(*map(end, ranges)) for end in (min, max))


class _Threads:
    """The number of threads for replays of one recording: replays in one thread and in a team are timed
    in turn, then one of the two is chosen."""

    def __init__(self) -> None:
        self.chosen: int | None = None
        self._seconds: dict[int, list[float]] = {1: [], torch.get_num_threads(): []}

    @property
    def is_compared(self) -> bool:
        return min(map(len, self._seconds.values())) >= _TRIALS

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
        elif self.is_compared:
            alone = min(self._seconds[1])
            self.chosen = team if alone > _MUCH_FASTER * min(self._seconds[team]) else 1


class Captures(Replays):
    """One recording for all forwards of a kind, of any number of rows.

    It is made once such forwards have come often enough to recur. Its results are compared with the
    model's, shape by shape, until these are enough; then it serves all shapes that lie between those that
    it has served, and others once it is checked that the model's calls are told the same. A model whose
    recording computes something else, or cannot be made, runs as it is.
    """

    def __init__(
        self, planned: Planned, most_rows: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """``most_rows``: inputs of so many lie where those of fewer do."""
        super().__init__(planned)
        self._clock = clock
        self._captures: defaultdict[_Kind, _Capture] = defaultdict(partial(_Capture, most_rows))
        self._hidden_layers: tuple[int, ...] = ()
        self._is_open = True

    def prepare(self, hidden_layers: tuple[int, ...] = ()) -> None:
        """Records nothing yet."""
        self._hidden_layers = hidden_layers

    def pad(self, batch: InputBatch) -> InputBatch:
        """Asks for all hidden states: a recording keeps them for nothing, and serves those who read them
        and those who do not."""
        batch = self._with_hidden(batch)
        if self._is_open and batch.num_rows:
            kind = _kind_of(batch)
            capture = self._captures[kind]
            capture.num_seen += 1
            if capture.num_seen >= _OFTEN:
                self._check(kind, capture, _shape_of(batch))
        return batch

    def _with_hidden(self, batch: InputBatch) -> InputBatch:
        layers = self._hidden_layers
        return replace(batch, hidden_layers=layers) if {*batch.hidden_layers} < {*layers} else batch

    def _check(self, kind: _Kind, capture: _Capture, shape: Shape) -> None:
        """Makes the recording, if there is none. Before it serves a shape for the first time, what it
        tells its calls has to be what the model tells them."""
        try:
            recording = capture.recording
            if recording is None:
                recording = capture.recording = Recording(partial(self._sample, kind))
            if not capture.serves(shape) and not capture.is_too_large(shape):
                several = Shape(*(max(2, each) for each in shape))
                runs = not recording.has_kernels_alone
                recording.check(several, self._sample(kind, several, runs))
                if len(capture.known) >= _ENOUGH:
                    capture.know(shape)
        except Exception as error:  # requests need no recording; a model may not take padding alone
            if not capture.known:
                self._close(str(error))
            else:
                logger.info("forwards of %d rows are not captured: %s", shape.num_rows, error)
                capture.most_rows = shape.num_rows - 1

    def _sample(self, kind: _Kind, shape: Shape, runs: bool = True) -> Sample:
        """Records a forward of padding alone: nothing is stored. ``runs``: its kernels run, too."""
        batch = InputBatch([], kind.hidden_layers)
        batch = pad_batch(batch, Bucket(shape.num_rows, 0), shape.num_logits)
        batch.adapters = [0] * shape.num_rows if kind.is_adapted else []
        run = self._planned(batch)
        recorder = Recorder(runs)
        with recorder.watch():
            output = run()
        return Sample(recorder, output)

    def forward(self, batch: InputBatch, plan: object, run: Run) -> ForwardOutput:
        if not self._is_open or not batch.num_rows:
            return run()
        capture, shape = self._captures[_kind_of(batch)], _shape_of(batch)
        recording = capture.recording
        renewing = cast(Renews, plan)
        if recording is not None and capture.serves(shape):
            return self._replay(capture.threads_of(shape.num_rows), recording, shape, renewing)
        if capture.is_too_large(shape):
            return run()
        output = run() if recording is None else self._compare(capture, shape, renewing, run)
        return output._replace(took_longer=True)

    def _replay(
        self, threads: _Threads, recording: Recording, shape: Shape, plan: Renews
    ) -> ForwardOutput:
        num_threads = threads.next()
        if threads.chosen is not None:
            # What was tried may have been one short text's rows, and these be rows of many long texts.
            is_heavy = num_threads == 1 and recording.wants_team(plan)
            return recording.replay(
                shape, plan, torch.get_num_threads() if is_heavy else num_threads
            )
        start = self._clock()
        output = recording.replay(shape, plan, num_threads)
        threads.observe(num_threads, self._clock() - start)
        return output

    def is_settled(self, batch: InputBatch) -> bool:
        """Expects batches of its kind, and of its shape, to come again."""
        if not self._is_open or not batch.num_rows:
            return True
        batch = self._with_hidden(batch)
        capture, shape = self._captures[_kind_of(batch)], _shape_of(batch)
        capture.num_seen += _OFTEN
        if capture.is_too_large(shape):
            return True
        return capture.serves(shape) and capture.threads_of(shape.num_rows).chosen is not None

    def _compare(self, capture: _Capture, shape: Shape, plan: Renews, run: Run) -> ForwardOutput:
        assert capture.recording is not None
        restore = plan.keep()
        got = capture.recording.replay(shape, plan, torch.get_num_threads()).with_own_logits()
        restore()
        expected = run()
        pairs = zip((got.logits, *got.hidden), (expected.logits, *expected.hidden), strict=True)
        if all(_same_bits(*pair) for pair in pairs):
            capture.know(shape)
        else:
            self._close("a recorded one computes something else")
        return expected

    def _close(self, reason: str) -> None:
        logger.info("forwards are not captured: %s", reason)
        self._is_open = False
        self._captures.clear()


def _kind_of(batch: InputBatch) -> _Kind:
    return _Kind(batch.hidden_layers, torch.get_num_threads(), batch.is_adapted)


def _shape_of(batch: InputBatch) -> Shape:
    return Shape(batch.num_rows, max(1, len(batch.logits_indices)))


def _same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether they are equal byte by byte: no number differs from itself."""
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (got, expected)))
