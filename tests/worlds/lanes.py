"""How much of a search a test does, by the lane it runs in."""

from __future__ import annotations

from hypothesis import settings

_PINNED = settings.get_profile("pinned").max_examples


def examples(pinned: int, fuzzed: int | None = None) -> int:
    """Examples for a test that runs ``pinned`` of them where they are pinned (tests/conftest.py), and
    ``fuzzed`` where faults are sought; None: as many more as other tests do."""
    most = settings().max_examples
    if fuzzed is not None and most > _PINNED:
        return fuzzed
    return pinned * most // _PINNED
