"""Replays a runner's forwards without the interpreter: recordings on a CPU, and here CUDA graphs, which
run again without a launch from Python.

A graph repeats the same kernels, with the same shapes, at the same addresses. So steps are padded to
buckets, a few of which serve all steps, and everything that differs between steps is in memory at fixed
addresses: inputs in ``InputBuffers``, attention's arguments in its backend's own memory
(``can_graph``). All graphs are captured at engine start, the smallest first, within a stated time and
memory; steps that fit none run directly.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from engine.attention.backend import AttentionBackend
from engine.batch import Bucket, ForwardOutput, InputBatch, pad_batch
from engine.capture.captures import Captures, Planned, Replays, Run
from engine.config import USUAL_GRAPH_ROWS, EngineConfig
from engine.states.plan import ModelStates

logger = logging.getLogger(__name__)

CAPTURE_SECONDS = 60.0
"""No further graph is begun after so long; what is not captured runs eagerly."""
LEAST_FREE_SHARE = 0.05
"""No graph is begun below this free share of the device's memory, so that what else the engine needs
finds room."""
_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_FEW_REQUESTS = (1, 4, 16)


class GraphSizes(NamedTuple):
    """Captured steps have at most so many rows and requests, each of at most ``most_keys`` tokens, drafts
    included, and ``most_nodes`` draft nodes."""

    most_rows: int
    most_requests: int
    most_keys: int
    most_nodes: int


def graph_sizes(
    config: EngineConfig,
    attention: AttentionBackend,
    most_keys: int,
    strict: bool = True,
    states: ModelStates | None = None,
) -> GraphSizes | None:
    """Returns what ``config`` has captured; None: nothing. ``most_keys``: tokens of a request, drafts not
    counted. ``states``: of a model whose layers keep some.

    ``strict``: raises ValueError where ``cuda_graph_rows`` asks for what cannot be had; a draft model may
    have none.
    """
    reason, most_rows = None, config.cuda_graph_rows
    if attention.needs.device.type != "cuda":
        reason = "there are CUDA graphs on CUDA devices only"
    elif not attention.can_graph:
        reason = f"steps of the attention backend {attention.name} cannot be captured"
    elif states is not None and not states.can_graph:
        reason = "steps of layers that keep a state cannot be captured without Triton"
    if reason is not None and most_rows and strict:
        raise ValueError(f"cuda_graph_rows={most_rows}: {reason}")
    if reason is not None or most_rows == 0:
        return None
    return GraphSizes(
        most_rows=USUAL_GRAPH_ROWS if most_rows is None else most_rows,
        most_requests=config.max_num_seqs,
        most_keys=most_keys + config.max_num_nodes,
        most_nodes=config.max_num_nodes,
    )


def make_replays(
    planned: Planned,
    attention: AttentionBackend,
    sizes: GraphSizes | None,
    most_rows: int,
    can_capture: bool = True,
    states: ModelStates | None = None,
) -> Replays:
    """Returns graphs of so many sizes, or none of a device's: recordings of up to ``most_rows`` rows,
    where there are such, and the model ``can_capture``. ``planned``: plans a batch and returns its
    forward."""
    if sizes is not None:
        maker = CudaGraphMaker(attention.needs.device)
        return DeviceGraphs(planned, attention, maker, sizes, states)
    on_cpu = attention.can_capture and attention.needs.device.type == "cpu"
    return Captures(planned, most_rows) if can_capture and on_cpu else Replays(planned)


def make_buckets(most_rows: int, most_requests: int) -> tuple[Bucket, ...]:
    """Returns all up to ``most_rows``, the smallest first. Padding is at most half of a small step's
    rows, and a third of a large one's. ``most_requests``: that a step can have.

    A step has as many rows as requests at least: so what a bucket can hold is bounded by both."""
    sizes = [rows for rows in _ROWS if rows < most_rows] + [most_rows] * (most_rows > 0)
    buckets = []
    for rows in sizes:
        most = min(rows, most_requests)
        buckets += [Bucket(rows, few) for few in (*_FEW_REQUESTS, most) if few <= most]
    return tuple(dict.fromkeys(buckets))


def find_bucket(buckets: Iterable[Bucket], batch: InputBatch) -> Bucket | None:
    """Returns the smallest that has room for the batch; None: it is larger than all."""
    num_rows, num_requests = batch.num_rows, len(batch.requests)
    fitting = (each for each in buckets if each.num_rows >= num_rows)
    return next((each for each in fitting if each.num_requests >= num_requests), None)


class Graph(NamedTuple):
    """A captured forward. ``replay`` runs it over what its inputs' memory holds now, asynchronously as
    any kernel; ``output``: the memory that its results are in."""

    replay: Callable[[], None]
    output: ForwardOutput


class GraphMaker(Protocol):
    """Captures on a device. Graphs of one maker are never replayed at the same time."""

    def capture(self, run: Run) -> Graph:
        """``run`` is called several times. Raises RuntimeError where it does what a graph cannot."""

    def has_room(self) -> bool:
        """Whether the device's memory lets another be captured."""


class CudaGraphMaker:
    """CUDA graphs that share one pool of memory (``GraphMaker``)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Run) -> Graph:
        with torch.cuda.device(self._device):
            # Libraries set up what they need, and kernels are compiled, outside the capture.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run()
                run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                output = run()
        return Graph(graph.replay, output)

    def has_room(self) -> bool:
        free, total = torch.cuda.mem_get_info(self._device)
        return free > LEAST_FREE_SHARE * total


class DeviceGraphs(Replays):
    """The graphs of one runner, by bucket. ``prepare`` makes them; before it, and where it could not,
    steps run as they are."""

    def __init__(
        self,
        planned: Planned,
        attention: AttentionBackend,
        maker: GraphMaker,
        sizes: GraphSizes,
        states: ModelStates | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``clock``: seconds, for ``CAPTURE_SECONDS``."""
        super().__init__(planned)
        self._attention, self._maker, self._sizes, self._clock = attention, maker, sizes, clock
        self._states = states
        self._graphs: dict[Bucket, Graph] = {}
        self._hidden_layers: tuple[int, ...] = ()

    def pad(self, batch: InputBatch) -> InputBatch:
        """Returns the batch in its bucket, or as it is where no graph serves it."""
        # What adapters add differs in shape with the rows that have them.
        if batch.is_adapted or not set(batch.hidden_layers) <= set(self._hidden_layers):
            return batch
        bucket = find_bucket(self._graphs, batch)
        if bucket is None:
            return batch
        return pad_batch(replace(batch, hidden_layers=self._hidden_layers), bucket)

    def forward(self, batch: InputBatch, plan: object, run: Run) -> ForwardOutput:
        del plan  # it lies where it lay when the graph was captured
        if batch.bucket is None:
            return run()
        graph = self._graphs[batch.bucket]
        graph.replay()
        output = graph.output
        if output.tokens is None:  # who reads the logits may want to see them later
            return output.with_own_logits()
        return output._replace(tokens=output.tokens.clone())

    def prepare(self, hidden_layers: tuple[int, ...] = ()) -> None:
        """Captures padding alone: nothing is stored."""
        start = self._clock()
        self._hidden_layers = hidden_layers
        wanted = make_buckets(self._sizes.most_rows, self._sizes.most_requests)
        for bucket in wanted:
            # Of all before the first is captured: what it reads stays where it is.
            self._attention.reserve(bucket, self._sizes.most_keys, self._sizes.most_nodes)
            if self._states is not None:
                self._states.reserve(bucket, self._sizes.most_nodes)
        for bucket in wanted:
            if self._clock() - start > CAPTURE_SECONDS or not self._maker.has_room():
                break
            # With hidden states, which keep their place and cost nothing where nobody reads them.
            batch = pad_batch(InputBatch([], hidden_layers), bucket)
            try:
                self._graphs[bucket] = self._maker.capture(self._planned(batch))
            except (RuntimeError, NotImplementedError) as error:
                logger.warning("steps run without graphs: %s", error)
                self._graphs.clear()
                break
        seconds = self._clock() - start
        logger.info("%d of %d graphs captured in %.1f s", len(self._graphs), len(wanted), seconds)
