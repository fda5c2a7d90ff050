"""Tables that the requests of one tenant may share: several samples of a prompt teach each other.

Sharing is asked for per request (option ``share``). A table belongs to one ``cache_salt``; nothing passes
from one tenant's table to another's. Of at most ``MAX_TENANTS`` tables, the one whose tenant drafted
longest ago makes room for the next tenant's; tables of open requests stay. Where all of them are in
use, a request gets a table of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeAlias, TypeVar

from drafters.base import DrafterInfo, DrafterOption, OptionValue
from drafters.per_request import DraftState, PerRequestDrafter

MAX_TENANTS = 8
SHARE_OPTION = DrafterOption(
    "share",
    False,
    "Learn and draft together with the tenant's other requests that say so: for several samples of "
    "one prompt, or prompts much alike.",
)

Table = TypeVar("Table")


class TenantTables(Generic[Table]):
    """See the module. ``make`` builds an empty table."""

    def __init__(self, make: Callable[[], Table], max_tenants: int = MAX_TENANTS) -> None:
        self._make = make
        self._max_tenants = max_tenants
        self._tables: dict[
            str, Table
        ] = {}  # by cache_salt, the tenant that drafted last at the end
        self._num_open: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def borrow(self, cache_salt: str) -> Table | None:
        """The tenant's table, kept until ``give_back``; None where all are in use by others."""
        if cache_salt not in self._tables:
            if len(self._tables) >= self._max_tenants and not self._make_room():
                return None
            self._tables[cache_salt] = self._make()
        self._num_open[cache_salt] = self._num_open.get(cache_salt, 0) + 1
        table = self._tables[cache_salt] = self._tables.pop(cache_salt)
        return table

    def give_back(self, cache_salt: str) -> None:
        """One of the tenant's requests has ended. Its table stays for the next."""
        self._num_open[cache_salt] -= 1
        if not self._num_open[cache_salt]:
            del self._num_open[cache_salt]

    def _make_room(self) -> bool:
        idle = next(
            (cache_salt for cache_salt in self._tables if cache_salt not in self._num_open), None
        )
        if idle is None:
            return False
        del self._tables[idle]
        return True


Options: TypeAlias = Mapping[str, OptionValue]


class SharingDrafter(PerRequestDrafter, Generic[Table]):
    """One state per request, over a table that is the request's own or its tenant's."""

    def __init__(
        self,
        info: DrafterInfo,
        make_state: Callable[[Sequence[int], Options, Table], DraftState],
        make_own: Callable[[Options], Table],
        make_shared: Callable[[], Table],
    ) -> None:
        super().__init__(info, lambda ids, options: make_state(ids, options, make_own(options)))
        self._make_sharing_state = make_state
        self._tables = TenantTables(make_shared)
        self._borrowers: dict[str, str] = {}

    def open(
        self, request_id: str, token_ids: Sequence[int], options: Options, cache_salt: str
    ) -> None:
        """Raises as ``PerRequestDrafter.open`` does."""
        resolved = self.info.resolve(options)
        table = None
        if resolved["share"] and request_id not in self._states:
            table = self._tables.borrow(cache_salt)
        if table is None:
            super().open(request_id, token_ids, options, cache_salt)
            return
        self._borrowers[request_id] = cache_salt
        self._states[request_id] = self._make_sharing_state(token_ids, resolved, table)

    def close(self, request_id: str) -> None:
        super().close(request_id)
        cache_salt = self._borrowers.pop(request_id, None)
        if cache_salt is not None:
            self._tables.give_back(cache_salt)
