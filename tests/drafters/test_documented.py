"""The drafter that docs/extend.md writes is one file, and works as the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "extend.md"
USE = """
import drafters.copying
drafters.copying.__path__.append(sys.argv[1])
from drafters.base import DrafterContext, DraftRequest, DraftShape
from drafters.registry import build_drafters, drafter_names, drafter_settings

assert "echo" in drafter_names()
assert drafter_settings()["echo"]().most == 8
echo = build_drafters(["echo"], DrafterContext(0, {"echo": {"most": 3}}))["echo"]
assert list(echo.info.resolve({})) == ["period"] and not echo.info.drafts_trees
echo.open("r", [7, 5, 6], {"period": 2}, "")
(tree,) = echo.propose([DraftRequest("r", [7, 5, 6], 9, DraftShape(1, 9))])
assert list(tree.token_ids) == [5, 6, 5], tree
assert echo.num_top_tokens("r") == 0
echo.close("r")
try:
    echo.info.resolve({"period": 17})
except ValueError as error:
    assert "period must be at most 16" in str(error)
else:
    raise AssertionError("17 was taken")
"""


def test_the_pages_drafter_is_one_file(tmp_path: Path) -> None:
    (source,) = (
        block
        for block in re.findall(
            r"```python[^\n]*\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
        )
        if '"echo"' in block
    )
    (tmp_path / "echo.py").write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", "import sys\n" + USE, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
