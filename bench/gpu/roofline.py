"""How near is a step of one row to what the memory's bandwidth allows, and what do graphs save?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from transformers import PreTrainedModel

from engine.capture.replays import GraphSizes
from engine.model.runner import ModelRunner
from kvpool.store import KVStore

_COPY_BYTES = 1 << 30
_COPY_BYTES_ON_A_CPU = 1 << 26
_REPEATS = 20


@dataclass(frozen=True, slots=True)
class Roofline:
    """A step of one row after ``num_kv_tokens``. ``num_bytes``: weights, keys and values that it has to
    read. ``share``: of what the bandwidth that a copy reaches would take."""

    num_kv_tokens: int
    seconds: float
    num_bytes: int
    bandwidth: float

    @property
    def share(self) -> float:
        return self.num_bytes / self.bandwidth / self.seconds


@dataclass(frozen=True, slots=True)
class GraphGain:
    """Median seconds of a step of so many requests, a row each, with graphs and without;
    ``num_graphs``: captured, in ``capture_seconds``."""

    batch_size: int
    seconds: float
    eager_seconds: float
    num_graphs: int
    capture_seconds: float

    @property
    def gain(self) -> float:
        return self.eager_seconds / self.seconds


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by the best of several large copies."""
    num_bytes = _COPY_BYTES if device.type == "cuda" else _COPY_BYTES_ON_A_CPU
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        _wait(device)
        start = time.perf_counter()
        target.copy_(source)
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return 2 * num_bytes / best


def roofline(runner: ModelRunner, bandwidth: float, num_kv_tokens: int) -> Roofline:
    """Overwrites the store's blocks."""
    num_bytes = weight_bytes(runner.model) + kv_bytes(runner.store, num_kv_tokens)
    return Roofline(num_kv_tokens, _step(runner, 1, num_kv_tokens), num_bytes, bandwidth)


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a step of one row has to read."""
    weights = sum(each.nbytes for each in model.parameters())
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    is_tied = embedding.data_ptr() == head.data_ptr()
    return weights if is_tied else weights - embedding.nbytes  # one row of it is read


def kv_bytes(store: KVStore, num_tokens: int) -> int:
    return store.num_bytes // store.num_slots * num_tokens


def graph_gains(
    runner: ModelRunner, batch_sizes: Sequence[int], num_kv_tokens: int
) -> list[GraphGain]:
    """The runner's model with graphs and without. Nothing where the device has none. Overwrites the
    store's blocks."""
    attention = runner.attention
    if attention.needs.device.type != "cuda" or not attention.can_graph:
        return []
    most = max(batch_sizes)
    start = time.perf_counter()
    sizes = GraphSizes(most, most, 2 * num_kv_tokens, 0)
    graphed = ModelRunner(runner.model, attention, most, sizes)
    graphed.prepare()
    capture_seconds = time.perf_counter() - start
    eager = ModelRunner(runner.model, attention, most)
    return [
        GraphGain(
            size,
            _step(graphed, size, size * num_kv_tokens),
            _step(eager, size, size * num_kv_tokens),
            graphed.num_graphs,
            capture_seconds,
        )
        for size in batch_sizes
    ]


def _step(runner: ModelRunner, num_requests: int, num_kv_tokens: int) -> float:
    """Median seconds."""
    times = [
        runner.time_step(num_requests, num_kv_tokens, num_requests) for _ in range(_REPEATS + 3)
    ]
    return median(times[3:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
