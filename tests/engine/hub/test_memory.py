"""Memory that is left within a container's limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.hub.memory import available_bytes


@pytest.mark.parametrize(
    ("limit", "cached", "left"),
    [("10000", "0", 1000), ("10000", "4000", 5000), ("8000", "500", 0), ("max", "0", None)],
)
def test_files_that_were_read_leave_their_memory(
    tmp_path: Path, limit: str, cached: str, left: int | None
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("9000\n")
    (tmp_path / "memory.stat").write_text(f"anon 100\ninactive_file {cached}\nslab 7\n")
    found = available_bytes(tmp_path)
    assert found == left if left is not None else found > 9000
