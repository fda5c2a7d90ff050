"""Which layers' states a head reads: what files say of it, and what else they may mean.

A state is named by the layer that it enters: C(k), 0 <= k <= the target's number of layers. Some trainers
write k, others the layer that it leaves, k - 1, under one and the same name, and a head that reads the
wrong states fails silently: it only drafts badly. So heads come with every reading that is likely, the
likeliest first, and the load check tries them.
"""

from __future__ import annotations

from collections.abc import Sequence

Layers = tuple[int, ...]


def readings(given: Sequence[Layers], num_layers: int) -> tuple[Layers, ...]:
    """Returns those of ``given`` that the target has, then their neighbours by one layer, each once."""
    shifted = [tuple(layer + step for layer in each) for each in given for step in (1, -1)]
    every = dict.fromkeys([*given, *shifted])
    return tuple(each for each in every if all(0 <= layer <= num_layers for layer in each))
