"""A bounded dictionary that forgets what was not written for long, at no cost per entry."""

from __future__ import annotations

from typing import Generic, TypeVar

Value = TypeVar("Value")


class Generations(Generic[Value]):
    """Integer keys to values, in two generations of at most ``max_entries / 2`` each.

    Writing puts a key into the young generation; when that is full it becomes the old one, and what
    the old one still held, keys not written for a whole generation, is dropped.
    """

    __slots__ = ("_generation_size", "_old", "_young")

    def __init__(self, max_entries: int) -> None:
        self._generation_size = max(1, max_entries // 2)
        self._young: dict[int, Value] = {}
        self._old: dict[int, Value] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: int) -> Value | None:
        value = self._young.get(key)
        return self._old.get(key) if value is None else value

    def put(self, key: int, value: Value) -> None:
        young = self._young
        if key not in young:
            if len(young) >= self._generation_size:
                self._old = young
                young = self._young = {}
            if self._old:
                self._old.pop(key, None)
        young[key] = value
