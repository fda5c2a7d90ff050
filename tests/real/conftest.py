"""One server and one engine of each kind with real weights for all tests of a process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

from engine.model.quantization import refusal
from engine.names import SMOLLM2_REQUIREMENT
from worlds.real_engine import WEIGHTS, RealEngine
from worlds.real_model import is_installed, real_server
from worlds.served_command import Server

COUNTED = "equal_texts"
REQUIRED = "REQUIRE_REAL"


class ByModel(LoadScopeScheduling):  # type: ignore[misc]
    """Tests that share an engine share a process, and those that ask a server share another."""

    def _split_scope(self, nodeid: str) -> str:
        weights = re.search(r"\[(\w+)", nodeid)
        return weights[1] if weights and weights[1] in WEIGHTS else "server"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where turns are taken, engines with one kind of weights are built, each kind in its turn."""
    turn = config.getoption("--turn")
    if turn is None:
        return
    kinds = [each for at, each in enumerate(WEIGHTS) if at != turn % len(WEIGHTS)]
    waiting = [each for each in items if re.search(rf"\[({'|'.join(kinds)})\b", each.nodeid)]
    items[:] = [each for each in items if each not in set(waiting)]
    config.hook.pytest_deselected(items=waiting)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByModel:
    return ByModel(config, log)


def pytest_configure() -> None:
    """Raises pytest.UsageError where the model is required and not there."""
    if os.environ.get(REQUIRED) and not is_installed():
        raise pytest.UsageError(f"{REQUIRED} is set, and {SMOLLM2_REQUIREMENT} is not installed")


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with real_server(tmp_path_factory.mktemp("smollm2")) as found:
        yield found


@pytest.fixture(scope="session", params=list(WEIGHTS))
def engine(request: pytest.FixtureRequest) -> RealEngine:
    """In this process, by its weights."""
    if request.param != "bf16":
        reason = refusal(torch.device("cpu"))
        if reason is not None:
            pytest.skip(reason)
    torch.set_num_threads(1)
    return RealEngine(request.param)


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Callable[[int], None]:
    """Say how many texts were found equal."""
    return lambda number: record_property(COUNTED, number)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many texts were compared, over all processes."""
    passed = terminalreporter.stats.get("passed", [])
    told = [value for report in passed for name, value in report.user_properties if name == COUNTED]
    if told:
        terminalreporter.write_line(f"{sum(told)} drafted texts equal their undrafted twins")
