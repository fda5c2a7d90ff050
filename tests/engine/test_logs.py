"""Log lines as objects: whole, one each, and not to be forged."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pytest

from engine.logs import JsonLines, TextLines, add_log_fields, log_fields

HOSTILE = 'x"}\n{"level": "critical"}\r\u2028\u0085\ud800\x1b[31m'


def line(message: str = "said", *arguments: Any, **more: Any) -> dict[str, Any]:
    record = logging.LogRecord("some.room", logging.INFO, "f", 1, message, arguments, None)
    vars(record).update(more)
    text = JsonLines().format(record)
    assert text.isascii()
    assert len(text.splitlines()) == 1
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_line_says_when_who_and_what() -> None:
    before = datetime.now(UTC)
    found = line("%d of %s", 3, "four")
    assert found["message"] == "3 of four"
    assert (found["logger"], found["level"]) == ("some.room", "info")
    assert found["time"].endswith("Z")
    assert abs((datetime.fromisoformat(found["time"]) - before).total_seconds()) < 60


def test_no_text_of_a_client_begins_a_line_or_changes_another_field() -> None:
    found = line("%s", HOSTILE, fields={"user": HOSTILE, "level": "none", "time": "never"})
    assert found["message"] == found["user"] == HOSTILE
    assert found["level"] == "info"
    assert found["time"] != "never"


def test_an_exception_is_part_of_its_line() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        assert "Traceback" in line(exc_info=sys.exc_info())["exception"]


def test_no_text_begins_a_line_in_text_either() -> None:
    record = logging.LogRecord("room", logging.INFO, "f", 1, "for %s", (HOSTILE,), None)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record.exc_info = sys.exc_info()
    first, *rest = TextLines("%(levelname)s %(message)s").format(record).splitlines()
    assert first == r'INFO for x"}\n{"level": "critical"}\r\u2028\x85\ud800\x1b[31m'
    assert rest
    assert all(each.startswith("  ") and each.isprintable() for each in rest)


def test_a_value_that_json_does_not_know_is_written_as_text() -> None:
    assert line(fields={"where": {1}})["where"] == "{1}"


async def _ids() -> list[str]:
    async def work(name: str, gate: asyncio.Event) -> str:
        add_log_fields(x_request_id=name, user=None)
        await gate.wait()
        assert "user" not in line()
        # What a task begins belongs to it.
        found = await asyncio.ensure_future(asyncio.to_thread(line))
        return str(found["x_request_id"])

    gate = asyncio.Event()
    tasks = [asyncio.create_task(work(name, gate)) for name in ("a", "b")]
    gate.set()
    return await asyncio.gather(*tasks)


def test_lines_of_tasks_at_once_keep_their_ids_apart() -> None:
    assert asyncio.run(_ids()) == ["a", "b"]
    assert log_fields.get() == {}


@pytest.mark.parametrize("form", ["json", "text"])
def test_all_that_a_process_says_by_itself_has_the_form(form: str) -> None:
    code = (
        "import logging, threading, warnings\n"
        "from engine.logs import LogOptions, log_through_root\n"
        f"LogOptions('warning', {form!r}).begin()\n"
        "library = logging.getLogger('library')\n"
        "library.addHandler(logging.StreamHandler()); library.propagate = False\n"
        "log_through_root('library'); library.warning('one')\n"
        "logging.getLogger().info('not said')\n"
        "warnings.warn('two')\n"
        "def fall(): raise ValueError('three')\n"
        "thread = threading.Thread(target=fall); thread.start(); thread.join()\n"
        "raise ValueError('four')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "not said" not in result.stderr
    if form == "text":
        assert result.stderr.splitlines()[0].endswith(" WARNING library: one")
        return
    lines = [json.loads(each) for each in result.stderr.splitlines()]
    assert [each["level"] for each in lines] == ["warning", "warning", "critical", "critical"]
    said = [each["message"] + each.get("exception", "") for each in lines]
    for text, found in zip(("one", "two", "three", "four"), said, strict=True):
        assert text in found
