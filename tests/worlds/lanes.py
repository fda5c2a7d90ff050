"""How much of a search a test does, by the lane it runs in."""

from __future__ import annotations

from hypothesis import settings

_PINNED = settings.get_profile("pinned").max_examples


def examples(pinned: int) -> int:
    """Examples for a test that runs ``pinned`` of them where they are pinned (tests/conftest.py)."""
    return pinned * settings().max_examples // _PINNED
