"""Forwards captured as graphs of a device (CUDA's), and run again without a launch from Python.

A graph repeats what its forward told the device: the same kernels, with the same shapes, at the same
addresses. So steps are padded to buckets (``buckets.py``), and everything that differs from step to step
lies in memory that keeps its place: inputs in ``InputBuffers``, what attention is told in its backend's
own (``can_graph``). All graphs are captured when the engine starts, the smallest first, within a stated
time and memory; steps that fit none run as they are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from engine.attention.backend import AttentionBackend, AttentionPlan
from engine.batch import Bucket, ForwardOutput, InputBatch, InputTensors, pad_batch
from engine.capture.buckets import find_bucket, make_buckets

logger = logging.getLogger(__name__)

CAPTURE_SECONDS = 60.0
"""No further graph is begun after so long; what is not captured runs eagerly."""
LEAST_FREE_SHARE = 0.05
"""Of the device's memory, below which none is begun either: what else the engine needs finds room."""

Run = Callable[[], ForwardOutput]


class GraphSizes(NamedTuple):
    """Captured steps have at most so many rows and requests, each of at most ``most_keys`` tokens, drafts
    included, and ``most_nodes`` draft nodes."""

    most_rows: int
    most_requests: int
    most_keys: int
    most_nodes: int


class Graph(Protocol):
    """A captured forward, and the memory that its results are in."""

    output: ForwardOutput

    def replay(self) -> None:
        """Run it over what its inputs' memory holds now. Asynchronous, as any kernel is."""


class GraphMaker(Protocol):
    """What captures on a device. Graphs of one maker are never replayed at the same time."""

    def capture(self, run: Run) -> Graph:
        """``run`` is called several times. Raises RuntimeError where it does what a graph cannot."""

    def has_room(self) -> bool:
        """Whether the device's memory lets another be captured."""


class CudaGraphMaker:
    """CUDA graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Run) -> Graph:
        """See ``GraphMaker``."""
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
        return _CudaGraph(graph, output)

    def has_room(self) -> bool:
        """See ``GraphMaker``."""
        free, total = torch.cuda.mem_get_info(self._device)
        return free > LEAST_FREE_SHARE * total


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: ForwardOutput) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        self._graph.replay()


class DeviceGraphs:
    """The graphs of one runner, by bucket (``Replays``). ``prepare`` makes them; before it, and where it
    could not, steps run as they are."""

    def __init__(
        self,
        attention: AttentionBackend,
        maker: GraphMaker,
        sizes: GraphSizes,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``clock``: seconds, for ``CAPTURE_SECONDS``."""
        self._attention = attention
        self._maker = maker
        self._sizes = sizes
        self._clock = clock
        self._wanted = make_buckets(sizes.most_rows, sizes.most_requests)
        self._buckets: tuple[Bucket, ...] = ()
        self._graphs: dict[Bucket, Graph] = {}

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def pad(self, batch: InputBatch) -> InputBatch:
        """The batch in its bucket, or as it is where no graph serves it."""
        bucket = find_bucket(self._buckets, batch)
        return batch if bucket is None else pad_batch(batch, bucket)

    def forward(
        self, batch: InputBatch, inputs: InputTensors, plan: AttentionPlan, run: Run
    ) -> ForwardOutput:
        """As ``Captures.forward``. The batch is one that ``pad`` gave back."""
        del inputs, plan  # lie where they lay when the graph was captured
        if batch.bucket is None:
            return run()
        graph = self._graphs[batch.bucket]
        graph.replay()
        return graph.output.copy()

    def is_settled(self, batch: InputBatch, inputs: InputTensors) -> bool:
        """See ``Captures``: nothing is learnt here."""
        del batch, inputs
        return True

    def prepare(self, planned: Callable[[InputBatch], Run]) -> None:
        """See ``Replays``. Padding alone is captured: nothing is stored."""
        start = self._clock()
        for bucket in self._wanted:
            # Of all before the first is captured: what it reads stays where it is.
            self._attention.reserve(bucket, self._sizes.most_keys, self._sizes.most_nodes)
        for bucket in self._wanted:
            if self._clock() - start > CAPTURE_SECONDS or not self._maker.has_room():
                break
            # With hidden states, which cost nothing where nobody reads them.
            batch = pad_batch(InputBatch([], wants_hidden=True), bucket)
            try:
                self._graphs[bucket] = self._maker.capture(planned(batch))
            except (RuntimeError, NotImplementedError) as error:
                logger.warning("steps run without graphs: %s", error)
                self._graphs.clear()
                break
        self._buckets = tuple(self._graphs)
        seconds = self._clock() - start
        logger.info(
            "%d of %d graphs captured in %.1f s", len(self._graphs), len(self._wanted), seconds
        )
