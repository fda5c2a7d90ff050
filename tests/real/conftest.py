"""One server and one engine of each kind with real weights for all tests of a process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.model.quantization import refusal
from engine.model_names import SMOLLM2_REQUIREMENT
from worlds.real_engine import WEIGHTS, RealEngine
from worlds.real_model import is_installed, real_server
from worlds.served_command import Server

COUNTED = "equal_texts"
REQUIRED = "REQUIRE_REAL"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever asks a server stays in the process that has it. Raises pytest.UsageError where the model is
    required and not there."""
    if os.environ.get(REQUIRED) and not is_installed():
        raise pytest.UsageError(f"{REQUIRED} is set, and {SMOLLM2_REQUIREMENT} is not installed")
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and "engine" not in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("server"))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with real_server(tmp_path_factory.mktemp("smollm2")) as found:
        yield found


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in WEIGHTS],
)
def engine(request: pytest.FixtureRequest) -> RealEngine:
    """In this process, by its weights."""
    if request.param == "int8":
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
