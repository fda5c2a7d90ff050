from __future__ import annotations

import pytest

from worlds.commands import Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)
