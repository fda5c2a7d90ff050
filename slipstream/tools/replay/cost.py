"""The cost of a target's step by its rows, as measured by the user, or a default."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DEFAULT_STEP_COST = ((1, 0.020), (33, 0.024), (65, 0.028))
"""(rows, seconds) of a memory-bound target: 33 rows take 1.2 times as long as one, as measured with
a model of 0.4 B parameters in bf16 on two CPU cores (1.1 to 1.3)."""


class StepCost:
    """Seconds of a step by its rows: linear between the measured counts and on after the last,
    constant before the first."""

    def __init__(self, measured: Sequence[tuple[int, float]] = DEFAULT_STEP_COST) -> None:
        """``measured``: (rows, seconds), at least two, rows ascending. Raises ValueError naming the
        entry that does not fit."""
        if len(measured) < 2:
            raise ValueError("needs at least two entries of [rows, seconds]")
        last = 0
        for index, (num_rows, seconds) in enumerate(measured):
            if num_rows <= last:
                raise ValueError(f"entry {index}: rows must ascend from 1")
            if not 0 < seconds < math.inf:
                raise ValueError(f"entry {index}: seconds must be positive")
            last = num_rows
        self.measured = tuple(measured)
        self._rows = [num_rows for num_rows, _ in measured]

    def seconds(self, num_rows: int) -> float:
        """Never less than the first entry's."""
        first_rows, first = self.measured[0]
        if num_rows <= first_rows:
            return first
        right = min(bisect_right(self._rows, num_rows), len(self._rows) - 1)
        (low, low_seconds), (high, high_seconds) = self.measured[right - 1], self.measured[right]
        slope = (high_seconds - low_seconds) / (high - low)
        return max(first, low_seconds + slope * (num_rows - low))


def read_step_cost(path: Path) -> StepCost:
    """The table in a JSON file, a list of [rows, seconds]. Raises ValueError naming file and entry,
    OSError."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(entries, list):
            raise ValueError("must be a list of [rows, seconds]")
        return StepCost([_entry(index, entry) for index, entry in enumerate(entries)])
    except json.JSONDecodeError as error:
        raise ValueError(f"--step-cost {path}: not JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"--step-cost {path}: {error}") from error


def _entry(index: int, entry: Any) -> tuple[int, float]:
    if not isinstance(entry, list) or len(entry) != 2:
        raise ValueError(f"entry {index} is not [rows, seconds]")
    num_rows, seconds = entry
    if type(num_rows) is not int:
        raise ValueError(f"entry {index}: rows must be an integer")
    if type(seconds) not in (int, float):
        raise ValueError(f"entry {index}: seconds must be a number")
    return num_rows, float(seconds)
