"""What runs a runner's forwards again without the interpreter: recordings on a CPU, graphs on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.attention.backend import AttentionBackend, AttentionPlan
from engine.batch import ForwardOutput, InputBatch, InputTensors
from engine.capture.captures import Captures
from engine.capture.device_graphs import CudaGraphMaker, DeviceGraphs
from engine.capture.device_graphs import GraphSizes as GraphSizes
from engine.config import USUAL_GRAPH_ROWS, EngineConfig


def graph_sizes(
    config: EngineConfig, attention: AttentionBackend, most_keys: int, strict: bool = True
) -> GraphSizes | None:
    """What ``config`` has captured; None: nothing. ``most_keys``: tokens of a request, drafts not
    counted.

    ``strict``: raises ValueError where ``cuda_graph_rows`` asks for what cannot be had; a draft model may
    have none.
    """
    reason, most_rows = _reason(attention), config.cuda_graph_rows
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


def _reason(attention: AttentionBackend) -> str | None:
    """Why there are no graphs; None: there are."""
    if attention.needs.device.type != "cuda":
        return "there are CUDA graphs on CUDA devices only"
    if not attention.can_graph:
        return f"steps of the attention backend {attention.name} cannot be captured"
    return None


class Replays(Protocol):
    """Of one runner."""

    @property
    def num_graphs(self) -> int:
        """Of a device's, that there are."""

    def prepare(self, planned: Callable[[InputBatch], Callable[[], ForwardOutput]]) -> None:
        """Capture what is captured at start. ``planned``: plans a batch and returns its forward."""

    def pad(self, batch: InputBatch) -> InputBatch:
        """The batch as ``forward`` wants it; the rows that it has come first."""

    def forward(
        self,
        batch: InputBatch,
        inputs: InputTensors,
        plan: AttentionPlan,
        run: Callable[[], ForwardOutput],
    ) -> ForwardOutput:
        """``run``: the model's forward over ``inputs``, with ``plan``. Returns what it returns, and may
        return hidden states that nobody asked for."""

    def is_settled(self, batch: InputBatch, inputs: InputTensors) -> bool:
        """Whether the next forward takes as long as all those after it."""


def make_replays(
    attention: AttentionBackend, sizes: GraphSizes | None, can_capture: bool = True
) -> Replays:
    """Graphs of so many sizes, or none of a device's: recordings, where there are such, and the model
    ``can_capture``."""
    if sizes is None:
        return Captures(attention, can_capture)
    return DeviceGraphs(attention, CudaGraphMaker(attention.needs.device), sizes)
