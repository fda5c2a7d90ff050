"""Commands of ``slipstream`` as they are typed, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from slipstream.cli import main


class Said(NamedTuple):
    out: str
    err: str


@dataclass
class Run:
    """Runs a command that has to end with this status, and returns what it said."""

    capsys: pytest.CaptureFixture[str]
    main: Callable[[Sequence[str]], int] = main

    def __call__(self, *arguments: object, status: int = 0) -> Said:
        try:
            found: object = self.main([*map(str, arguments)])
        except SystemExit as ended:
            found = ended.code
        said = Said(*self.capsys.readouterr())
        assert found == status, said.err
        return said
