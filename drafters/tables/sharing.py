"""Tables that the requests of one tenant may share: several samples of a prompt teach each other.

Sharing is asked for per request (option ``share``). A table belongs to one ``cache_salt``; nothing passes
from one tenant's table to another's. Of at most ``MAX_TENANTS`` tables, the one whose tenant drafted
longest ago makes room for the next tenant's; tables of open requests stay. Where all of them are in
use, a request gets a table of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from drafters.base import Drafter, DrafterOption, NewRequest, Options, RequestState

MAX_TENANTS = 8
SHARE_OPTION = DrafterOption(
    "share",
    False,
    "Learn and draft together with the tenant's other requests that say so: for several samples of "
    "one prompt, or prompts much alike.",
)

Table = TypeVar("Table")
Value = TypeVar("Value")


class SharingDrafter(Drafter, ABC, Generic[Table]):
    """One state per request, over a table that is the request's own or its tenant's."""

    def __init__(
        self, make_own: Callable[[Options], Table], make_shared: Callable[[], Table]
    ) -> None:
        super().__init__()
        self._make_own, self._make_shared = make_own, make_shared
        self._tables: dict[str, Table] = {}
        """Tables by tenant; the tenant that drafted last is at the end."""
        self._borrowers: dict[str, str] = {}
        """The tenant into whose table each request learns."""

    @abstractmethod
    def state_over(self, request: NewRequest, table: Table) -> RequestState:
        """Returns the state of a new request, which learns into ``table``."""

    def start(self, request: NewRequest) -> RequestState:
        table = self._borrowed(request) if request.options["share"] else None
        if table is None:
            table = self._make_own(request.options)
        return self.state_over(request, table)

    def finish(self, request_id: str, state: Any) -> None:  # noqa: ARG002
        self._borrowers.pop(request_id, None)

    def _borrowed(self, request: NewRequest) -> Table | None:
        """Returns the tenant's table, which stays while it has requests; None where there is no room."""
        table = self._tables.pop(request.cache_salt, None)
        if table is None and len(self._tables) >= MAX_TENANTS:
            in_use = self._borrowers.values()
            idle = next((each for each in self._tables if each not in in_use), None)
            if idle is None:
                return None
            del self._tables[idle]
        table = self._tables[request.cache_salt] = self._make_shared() if table is None else table
        self._borrowers[request.request_id] = request.cache_salt
        return table


class Generations(Generic[Value]):
    """A bounded dictionary that forgets what was not written for long, at no cost per entry: integer
    keys to values, in two generations of at most ``max_entries / 2`` each.

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

    @property
    def young(self) -> dict[int, Value]:
        """The generation that is written to; to be changed only where there is room."""
        return self._young

    def has_room(self, num_keys: int) -> bool:
        """Whether so many new keys fit before anything is dropped."""
        return not self._old and len(self._young) + num_keys <= self._generation_size

    def get(self, key: int) -> Value | None:
        value = self._young.get(key)
        return self._old.get(key) if value is None else value

    def renewed(self, key: int, new: Value) -> Value:
        """Moves a key that is not in the young generation there, with ``new`` if it had no value. Returns
        its value, which may be changed in place."""
        if len(self._young) >= self._generation_size:
            self._old, self._young = self._young, {}
        value = self._young[key] = self._old.pop(key, new)
        return value

    def put(self, key: int, value: Value) -> None:
        young = self._young
        if key not in young:
            if len(young) >= self._generation_size:
                self._old = young
                young = self._young = {}
            if self._old:
                self._old.pop(key, None)
        young[key] = value
