"""Transfers between host and device. Every wait of a step for its device is in this file.

Uploads are copied from pinned memory in stream order, so the host does not wait. Reads are computed
first, by operations whose shapes the host knows, and then arrive in one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

_Result = TypeVar("_Result")


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a list, an array or a tensor of the host's as a tensor on ``device``. On a CPU it may share
    memory with an array."""
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Arrival:
    """A tensor that a ``Readback`` was given. ``there``: on the host; None: it was not fetched yet."""

    def __init__(self, sent: Tensor) -> None:
        self.sent = sent
        self.there: Tensor | None = None

    def tolist(self) -> list[Any]:
        """Raises RuntimeError before it was fetched."""
        if self.there is None:
            raise RuntimeError("the readback was not fetched yet")
        listed: list[Any] = self.there.tolist()
        return listed


class Readback:
    """Tensors of one device that the host wants to see: all that were added come in one copy, and there
    is one wait for it."""

    def __init__(self) -> None:
        self._added: list[Arrival] = []
        self._arrive: Callable[[], list[Tensor]] | None = None

    def add(self, values: Tensor) -> Arrival:
        arrival = Arrival(values)
        self._added.append(arrival)
        return arrival

    @property
    def num_added(self) -> int:
        """Counts what was added since the last fetch."""
        return len(self._added)

    def send(self) -> None:
        """Begins to bring what was added, behind all that was launched until now."""
        sent = [each.sent for each in self._added]
        is_far = bool(sent) and sent[0].device.type == "cuda"
        self._arrive = _copied(sent) if is_far else lambda: sent

    def fetch(self) -> None:
        """Reads everything added since the last fetch. Does not wait if that is nothing."""
        if self._arrive is None:
            self.send()
        added, arrive, self._added, self._arrive = self._added, self._arrive, [], None
        for each, tensor in zip(added, arrive() if added and arrive else [], strict=True):
            each.there = tensor


def read_now(begin: Callable[[Readback], Callable[[], _Result]]) -> _Result:
    """Begins something, waits for what it reads, and finishes it."""
    readback = Readback()
    finish = begin(readback)
    readback.fetch()
    return finish()


class Stopwatch:
    """Started when it is made: how long a GPU works on what is launched until it is stopped."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._begun = torch.cuda.Event(enable_timing=True)
        self._ended = torch.cuda.Event(enable_timing=True)
        self._begun.record(self._stream)

    def stop(self) -> Callable[[], float]:
        """Returns a function that tells the seconds; it waits where the work is not done yet."""
        self._ended.record(self._stream)
        return self._seconds

    def _seconds(self) -> float:
        self._ended.synchronize()
        milliseconds: float = self._begun.elapsed_time(self._ended)
        return milliseconds / 1000


def _copied(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Returns what waits for the copies."""
    packed = pack(tensors)
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(packed.device))

    def arrive() -> list[Tensor]:
        done.synchronize()
        return unpack(host, tensors)

    return arrive


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the tensors' bytes: those of the widest types first, so that all stay aligned."""
    return torch.cat(
        [tensors[at].contiguous().view(-1).view(torch.uint8) for at in _order(tensors)]
    )


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of packed bytes, of the types and shapes of ``like``, in their order."""
    found: dict[int, Tensor] = {}
    first = 0
    for at in _order(like):
        num_bytes = like[at].numel() * like[at].element_size()
        part = packed[first : first + num_bytes]
        found[at] = part.view(like[at].dtype).view(like[at].shape)
        first += num_bytes
    return [found[at] for at in range(len(like))]


def _order(tensors: Sequence[Tensor]) -> list[int]:
    return sorted(range(len(tensors)), key=lambda at: -tensors[at].element_size())
