"""The inputs that let a forward choose tokens itself."""

from __future__ import annotations

from collections.abc import Sequence

from engine.batch import Choices
from engine.sampling.state import noise_positions, rows_of
from engine.schedule.request import ScheduledRequest


def row_choices(parts: Sequence[ScheduledRequest], num_logits: int) -> Choices:
    """Asks for the tokens of requests that are plain, in a batch that is built, and for no others."""
    keys, positions, temperatures = found = Choices.of_none(num_logits)
    for each in parts:
        state = each.sampling
        if each.samples and state.is_plain:
            own = rows_of(each)
            first, end = own.start, own.stop
            keys[first:end] = [state.key] * len(own)
            positions[first:end] = noise_positions(each)
            temperatures[first:end] = [state.params.temperature] * len(own)
    return found
