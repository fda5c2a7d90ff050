"""Products with weights in few bits, which layers that read one input may share.

Inputs are rounded to 8 bits in groups of 32 (``engine.kernels.grouped_product``), or keep their floats.
Sums within a group are sums of integers; groups are added in ascending order, with one rounding each. So
a row's result has the same bits in whatever company it is computed: one loop for few rows and many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.kernels import KINDS

if TYPE_CHECKING:
    from engine.kernels.grouped_product import Gate
    from engine.kernels.packing import PackedGroups
    from engine.kernels.routes import Routes


class GroupedProduct:
    """Products of rows with ``packed`` weights, of one layer or of ``num_layers`` side by side.
    ``dtype``: of the result. ``order``: which feature each column of the weights is for, where that is
    not their own order. ``keeps_inputs``: rows are not rounded to 8 bits."""

    def __init__(
        self,
        packed: PackedGroups,
        dtype: torch.dtype,
        order: torch.Tensor | None = None,
        num_layers: int = 1,
        keeps_inputs: bool = False,
    ) -> None:
        from engine.kernels.grouped_product import gate_rows, product

        self._multiply, self._gate_rows = product, gate_rows
        self.packed, self.dtype, self.order = packed, dtype, order
        self.keeps_inputs = keeps_inputs
        self.out_features, self.in_features = packed.out_features, packed.in_features
        self._num_layers = num_layers
        self._inputs: torch.Tensor | None = None
        self._result: torch.Tensor | None = None
        self._num_read = 0

    @property
    def num_bytes(self) -> int:
        return self.packed.num_bytes

    def __call__(
        self, rows: torch.Tensor, gate: Gate | None = None, routes: Routes | None = None
    ) -> torch.Tensor:
        """``rows`` ``[num_rows, in_features]``, or twice as many features that ``gate`` makes one half
        of; returns ``[num_rows, out_features]``, with ``routes`` to experts ``[num_pairs,
        out_features]``."""
        rows = rows if rows.dtype in KINDS else rows.float()
        if self.order is not None:
            rows = rows if gate is None else self._gate_rows(rows, gate)
            rows, gate = rows.index_select(1, self.order), None
        return self._multiply(rows, self.packed, self.dtype, gate, self.keeps_inputs, routes)

    def shared(self, inputs: torch.Tensor) -> torch.Tensor:
        """Takes the ``inputs`` ``[.., in_features]`` of one of the layers; returns ``[.., out_features]``
        of all of them, computed when the first one asks and kept until all have. A layer that has
        another input than the one before it computes the product anew."""
        result = self._result
        if result is None or inputs is not self._inputs:
            flat = inputs.reshape(-1, inputs.shape[-1])
            result = self(flat).view(*inputs.shape[:-1], -1)
            self._inputs, self._result, self._num_read = inputs, result, 0
        self._num_read += 1
        if self._num_read == self._num_layers:
            self._inputs = self._result = None
        return result


def join_products(products: Sequence[GroupedProduct]) -> GroupedProduct:
    """Returns the products of several layers as one. Those for which ``can_join`` says so."""
    from engine.kernels.packing import join

    first = products[0]
    return GroupedProduct(
        join([each.packed for each in products]),
        first.dtype,
        first.order,
        len(products),
        first.keeps_inputs,
    )


def can_join(products: Sequence[GroupedProduct]) -> bool:
    """Whether one product may compute several: of one format, one order of features, whole blocks."""
    from engine.kernels.packing import can_join as can_join_packed

    first = products[0]
    return can_join_packed([each.packed for each in products]) and all(
        (each.order is None) == (first.order is None)
        and (each.order is None or torch.equal(each.order, first.order))  # type: ignore[arg-type]
        and (each.dtype, each.keeps_inputs) == (first.dtype, first.keeps_inputs)
        for each in products
    )
