"""What products of rows with packed weights are made of: a few rows times a block of output channels at
once, with all of their sums in registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import config, njit
from numba.core import cgutils

from engine.kernels import LANES
from engine.kernels import instructions as asm

ROWS_AT_ONCE = 6
"""Rows that there are registers for."""
WAITING_ROWS = 2
"""So few wait for memory anyway, which reads ahead by itself; for more, what is read next is fetched."""

Emit = Callable[..., None]


@njit
def share_of(count: int, num_parts: int, part: int) -> tuple[int, int]:
    """Returns where a part of ``count`` begins and ends, of parts that are about equal."""
    return count * part // num_parts, count * (part + 1) // num_parts


def by_rows(emit_for: Callable[[int], Emit], builder: Any, num_rows: Any, *values: Any) -> None:
    """Writes ``emit_for(n)(builder, *values)`` for each ``n`` that ``num_rows`` may be."""
    done = builder.append_basic_block("rows_done")
    switch = builder.switch(num_rows, done)
    for count in range(1, ROWS_AT_ONCE + 1):
        block = builder.append_basic_block(f"rows_{count}")
        switch.add_case(count, block)
        with builder.goto_block(block):
            emit_for(count)(builder, *values)
            builder.branch(done)
    builder.position_at_end(done)


class Tile:
    """Sums of ``num_rows`` rows with ``channels`` channels: ``sums[row][column]`` has sixteen of them."""

    def __init__(self, builder: Any, num_rows: int, channels: int) -> None:
        self._builder = builder
        self._num_rows, self._width = num_rows, channels // LANES
        self._channels = channels

    def sums(self, value: Callable[[int, int], Any]) -> list[list[Any]]:
        """Registers that begin with ``value(row, column)``."""
        return [
            [cgutils.alloca_once_value(self._builder, value(row, at)) for at in range(self._width)]
            for row in range(self._num_rows)
        ]

    def place(self, target: Any, row: int, column: int) -> Any:
        """Where sixteen sums lie in ``target`` ``[num_rows, channels]`` float32."""
        return asm.plus(self._builder, target, 4 * (self._channels * row + LANES * column))

    def rows(self, first: Any, stride: Any) -> list[Any]:
        """Where rows begin that are ``stride`` bytes apart."""
        builder = self._builder
        return [
            builder.add(first, builder.mul(stride, stride.type(row)))
            for row in range(self._num_rows)
        ]

    def columns(self, address: Any, size: int, load: Callable[[Any, Any], Any]) -> list[Any]:
        """What ``load`` loads of each sixteen channels; ``size``: bytes of each channel."""
        places = (asm.plus(self._builder, address, size * LANES * at) for at in range(self._width))
        return [load(self._builder, place) for place in places]

    def write(self, sums: list[list[Any]], target: Any) -> None:
        for row, mine in enumerate(sums):
            for at, total in enumerate(mine):
                asm.write(self._builder, self.place(target, row, at), self._builder.load(total), 4)


# --- which instructions there are ---


def has_feature(name: str) -> bool:
    """Whether this machine has a feature by LLVM's name, and numba compiles for it: for another machine,
    LLVM would give up on what that one lacks."""
    return not (config.CPU_NAME or config.CPU_FEATURES) and _has(name)


def has_wide_registers() -> bool:
    """Whether numba compiles for a machine with AVX-512."""
    if config.CPU_FEATURES is not None:
        return "+avx512f" in config.CPU_FEATURES
    return _has("avx512f")


def _has(name: str) -> bool:
    try:
        return bool(get_host_cpu_features().get(name))
    except RuntimeError:  # LLVM does not know the machine
        return False


def called(builder: Any, name: str, result: Any, *values: Any) -> Any:
    """What the instruction ``name`` makes of ``values``."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)
