"""One server with real weights for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from worlds.real_model import real_server
from worlds.served_command import Server


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with real_server(tmp_path_factory.mktemp("smollm2")) as found:
        yield found
