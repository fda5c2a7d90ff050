"""Tensors of layers that keep a state: slots that hold states, and places that hold rows' inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvpool.store import ZeroedMemory


class ConvolutionShape(NamedTuple):
    """A causal convolution of ``width`` taps over each channel. Its state is the last ``width - 1``
    inputs, oldest first: ``[width - 1, channels]``."""

    channels: int
    width: int

    @property
    def state(self) -> tuple[int, ...]:
        return self.width - 1, self.channels

    @property
    def row_size(self) -> int:
        """Floats that a row's inputs take."""
        return self.channels


class RecurrenceShape(NamedTuple):
    """``S = decay S + k u^T`` per head, read as ``S^T q``. Its state is
    ``[heads, key_dim, value_dim]``. Keys and queries have ``key_heads`` heads, each serving
    ``heads / key_heads`` neighbours; ``num_decays`` per head: 1, or one for each of its ``key_dim``."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    num_decays: int = 1

    @property
    def state(self) -> tuple[int, ...]:
        return self.heads, self.key_dim, self.value_dim

    @property
    def row_size(self) -> int:
        """Floats that a row's inputs take: keys, values, decays and what weighs the values."""
        return self.key_heads * self.key_dim + self.heads * (self.value_dim + self.num_decays + 1)


StateShape = ConvolutionShape | RecurrenceShape


class StateStore(ZeroedMemory):
    """States and inputs of a model's operations, in float32 whatever the model's type.

    ``states[op]``: ``[num_slots, *shape.state]``; ``rows[op]``: ``[num_places, shape.row_size]``, inputs
    of rows that may still be taken back. Memory is taken when it is first written.
    """

    def __init__(
        self, shapes: Sequence[StateShape], num_slots: int, num_places: int, device: torch.device
    ) -> None:
        super().__init__(device)
        self.shapes = tuple(shapes)
        self.num_slots, self.num_places = num_slots, num_places
        self.states = [self._zeros((num_slots, *each.state), torch.float32) for each in shapes]
        self.rows = [self._zeros((num_places, each.row_size), torch.float32) for each in shapes]

    @staticmethod
    def bytes_per_slot(shapes: Sequence[StateShape]) -> int:
        return sum(4 * torch.Size(each.state).numel() for each in shapes)

    @staticmethod
    def bytes_per_place(shapes: Sequence[StateShape]) -> int:
        return sum(4 * each.row_size for each in shapes)
