"""Runs again what a recorder wrote down."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch

from engine.attention.backend import CapturablePlan
from engine.batch import ForwardOutput
from engine.capture.recorder import KernelCall, Recorder, TensorCall
from engine.kernels import find_kernel


class CapturedForward:
    """A recorded forward. ``recorder`` has no ``reason``, and its calls hold what kernels point to;
    ``output``: what the forward returned."""

    def __init__(self, recorder: Recorder, output: ForwardOutput) -> None:
        self._recorder = recorder
        self._output = output
        self.num_bytes = recorder.num_bytes
        groups = groupby(recorder.calls, lambda call: isinstance(call, KernelCall))
        self._parts: list[_Kernels | list[TensorCall]] = [
            _Kernels(list(calls)) if are_kernels else list(calls)  # type: ignore[arg-type]
            for are_kernels, calls in groups
        ]

    def wants_team(self, plan: CapturablePlan) -> bool:
        """Whether what differs from step to step, which is attention, has work for several threads."""
        kernels = (part for part in self._parts if isinstance(part, _Kernels))
        return any(part.wants_team(plan) for part in kernels)

    def replay(self, plan: CapturablePlan, most_threads: int) -> ForwardOutput:
        """For inputs that lie where those of the recorded forward lay. Bits do not depend on threads."""
        for part in self._parts:
            if isinstance(part, _Kernels):
                part.run(plan, most_threads)
            else:
                for call in part:
                    _repeat(call)
        return self._output.copy()


class _Kernels:
    """Kernels with nothing between them."""

    def __init__(self, calls: Sequence[KernelCall]) -> None:
        sequence = find_kernel("sequence")
        self._run_sequence = sequence.run_sequence
        width = max(len(call.arguments) for call in calls)
        # As they are told at first, counters at 0; the kernels themselves work on the copy.
        self._arguments = np.zeros((len(calls), width), dtype=np.int64)
        self._told = self._arguments.copy()
        self._nodes = np.zeros((len(calls), sequence.NODE_INTS), dtype=np.int64)
        renewals: dict[tuple[object, int], list[int]] = {}
        for index, call in enumerate(calls):
            self._arguments[index, : len(call.arguments)] = call.arguments
            self._nodes[index] = call.address, self._told[index].ctypes.data, call.num_threads
            if call.renewal is not None:
                key = call.renewal.key, call.renewal.place
                renewals.setdefault(key, []).append(index)
        self._renewed = [(*key, np.array(rows)) for key, rows in renewals.items()]

    def wants_team(self, plan: CapturablePlan) -> bool:
        return any(plan.renewed(key)[1] > 1 for key, *_ in self._renewed)

    def run(self, plan: CapturablePlan, most_threads: int) -> None:
        np.copyto(self._told, self._arguments)
        for key, place, rows in self._renewed:
            number, num_threads = plan.renewed(key)
            self._told[rows, place] = number
            self._nodes[rows, 2] = num_threads
        nodes = self._nodes
        num_threads = min(most_threads, int(nodes[:, 2].max()))
        self._run_sequence(torch.from_numpy(nodes), num_threads)


def _repeat(call: TensorCall) -> None:
    results = call.function(*call.arguments, **call.named)
    if call.results is None:
        return
    made = (results,) if isinstance(results, torch.Tensor) else results
    for place, result in zip(call.results, made, strict=True):
        place.copy_(result)
