"""Tables are shared within a tenant, never across, and their number is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.base import DrafterInfo, NewRequest, RequestState
from drafters.tables import sharing
from drafters.tables.recycling import RecyclingDrafter
from drafters.tables.sharing import MAX_TENANTS, SHARE_OPTION, Generations, SharingDrafter
from drafters.tables.stand import StandDrafter
from worlds.simulated_target import ask, tell

Drafting = StandDrafter | RecyclingDrafter
PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]


class Listing(SharingDrafter[list[str]]):
    """Its tables are lists; ``given`` is the one that the newest request got."""

    info = DrafterInfo("listing", "Notes tables.", options=(SHARE_OPTION,))

    def __init__(self) -> None:
        super().__init__(lambda _: ["own"], list)
        self.given: list[str] = []

    def state_over(self, request: NewRequest, table: list[str]) -> RequestState:
        del request
        self.given = table
        return RequestState()

    def table_of(self, name: str) -> list[str]:
        """The table of a new request of the tenant that its name begins with."""
        self.open(name, PROMPT, {"share": True}, name[0])
        return self.given


def test_one_table_per_tenant_the_longest_idle_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "MAX_TENANTS", 2)
    drafter = Listing()
    first = drafter.table_of("a1")
    assert drafter.table_of("b1") is not first
    assert drafter.table_of("a2") is first
    assert drafter.table_of("c1") == ["own"]  # both are in use
    drafter.close("a1")
    assert drafter.table_of("c2") == ["own"]  # "a" has a request left
    drafter.close("a2")
    drafter.close("b1")
    first.append("kept")
    assert drafter.table_of("a3") == ["kept"]
    assert drafter.table_of("c3") == []  # "b" went
    drafter.close("a3")
    assert drafter.table_of("b2") == []  # and then "a"
    drafter.close("c3")
    assert drafter.table_of("a4") == []


@pytest.mark.parametrize("make", [StandDrafter, RecyclingDrafter])
class TestDrafters:
    def draft(self, drafter: Drafting, request_id: str) -> list[int]:
        """After a text that only ``teach`` has seen."""
        return list(ask(drafter, [50, 51, 52, 53], 3, request_id=request_id).token_ids)

    def teach(self, drafter: Drafting, request_id: str) -> None:
        text = [50, 51, 52, 53]
        for token in (54, 55, 56):
            text.append(token)
            tell(drafter, text, 1, [[token, 9]], [[0.9, 0.1]], request_id)

    def test_a_tenant_learns_from_its_other_requests_if_both_ask(
        self, make: type[Drafting]
    ) -> None:
        drafter = make()
        for name, cache_salt, share in (
            ("teacher", "mine", True),
            ("early", "mine", True),
            ("private", "mine", False),
            ("stranger", "theirs", True),
        ):
            drafter.open(name, PROMPT, {"share": share}, cache_salt)
        self.teach(drafter, "teacher")
        drafter.close("teacher")
        drafter.open("late", PROMPT, {"share": True}, "mine")
        drafter.open("late stranger", PROMPT, {"share": True}, "")
        for name in ("early", "late"):
            assert self.draft(drafter, name) == [54, 55, 56]
        for name in ("private", "stranger", "late stranger"):
            assert self.draft(drafter, name) == []

    def test_what_a_private_request_learns_stays_private(self, make: type[Drafting]) -> None:
        drafter = make()
        drafter.open("private", PROMPT, {}, "mine")
        self.teach(drafter, "private")
        assert self.draft(drafter, "private") == [54, 55, 56]
        drafter.open("sharing", PROMPT, {"share": True}, "mine")
        assert self.draft(drafter, "sharing") == []

    def test_more_tenants_than_tables_still_draft(self, make: type[Drafting]) -> None:
        drafter = make()
        for index in range(MAX_TENANTS + 3):
            drafter.open(f"r{index}", PROMPT, {"share": True}, f"tenant {index}")
        last = f"r{MAX_TENANTS + 2}"
        self.teach(drafter, last)
        assert self.draft(drafter, last) == [54, 55, 56]
        assert self.draft(drafter, "r0") == []
        for index in range(MAX_TENANTS + 3):
            drafter.close(f"r{index}")
        drafter.close("r0")  # closing twice does nothing


@given(st.lists(st.integers(0, 30), max_size=200), st.integers(2, 20))
def test_holds_the_newest_and_never_more_than_the_bound(keys: list[int], bound: int) -> None:
    kept: Generations[int] = Generations(bound)
    order: dict[int, int] = {}
    for value, key in enumerate(keys):
        kept.put(key, value)
        order.pop(key, None)
        order[key] = value
        assert len(kept) <= bound
        for newest in list(order)[-(bound // 2) :]:
            assert kept.get(newest) == order[newest]
    held = {key: kept.get(key) for key in order if kept.get(key) is not None}
    assert len(held) == len(kept)
    assert held.items() <= order.items()


def test_what_is_not_written_for_long_goes() -> None:
    kept: Generations[str] = Generations(4)
    kept.put(1, "old")
    for key in (2, 3, 4, 5, 6):
        kept.put(key, "new")
    assert kept.get(1) is None
