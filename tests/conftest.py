"""Lanes: pinned examples of hypothesis where tests must pass, fresh ones where faults are sought; slow
tests by turns. And what has to be said before a library is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from worlds.turns import has_turn

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Triton reads this once, when it is first imported, by whomever: where there is no GPU, its programs
# run under its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples on every run and machine. A busy machine is no fault, so that there is no deadline.
settings.register_profile("pinned", derandomize=True, deadline=None, max_examples=100)
# `scripts/test --fuzz`; worlds.lanes.examples multiplies what tests ask for alike. What is left out here,
# hypothesis takes from where it runs: with CI set, its examples would be the same ones every time.
settings.register_profile(
    "fuzz", derandomize=False, deadline=None, max_examples=1000, print_blob=True
)
# `--hypothesis-profile` comes later and wins.
settings.load_profile("pinned")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from worlds.browser_visit import opened_browser  # for few tests: its libraries take a while

    with opened_browser() as opened:
        yield opened


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--turn",
        type=int,
        metavar="N",
        help="of the slow tests, run only those whose turn it is: consecutive numbers run them all",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    turn = config.getoption("--turn")
    if turn is None:
        return
    waiting = {each for each in items if not _has_turn(each, turn)}
    items[:] = [each for each in items if each not in waiting]
    config.hook.pytest_deselected(items=list(waiting))


def _has_turn(item: pytest.Item, turn: int) -> bool:
    """Cells that share what a fixture makes of a parameter (``by``) have a turn together."""
    mark = item.get_closest_marker("slow")
    if mark is None:
        return True
    by = mark.kwargs.get("by")
    if by is None:
        return has_turn(item.nodeid, turn)
    value = item.callspec.params[by]  # type: ignore[attr-defined]
    return has_turn(f"{item.path.name}[{value}]", turn)
