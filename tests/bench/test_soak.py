"""The account that ``bench.soak`` gives of a run: every promise that can be broken is seen to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.soak.__main__ import Figures, Sample
from bench.soak.clients import Told, refusal
from bench.soak.server import FAULTY, install_plugin
from drafters.registry import find_plugins

TOLD = [Told("whole", "complete", 1.0), Told("stream", "refused", 0.1, detail="429 queue_full")]
SAMPLES = [Sample(float(at), 1000, 3.0) for at in range(8)]


def figures(**changes: Any) -> Figures:
    held: dict[str, Any] = {
        "seconds": 60.0,
        "capacity": 2.0,
        "rate": 4.0,
        "told": TOLD,
        "samples": SAMPLES,
        "num_kills": 2,
        "blocks": {"free": 90.0, "cached": 10.0, "committed": 0.0},
        "total_blocks": 100.0,
        "num_different": 0,
        "limits": {"queue": 4, "deadline": 10.0},
    }
    return Figures(**(held | changes))


def test_nothing_is_broken_where_all_held() -> None:
    assert figures().broken() == []
    assert "1 complete" in figures().report()
    assert "429 queue_full" in figures().report()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"told": [*TOLD, Told("whole", "lost", 1.0, detail="500")]}, "1 replies lost"),
        ({"num_different": 1}, "1 texts differ"),
        ({"blocks": {"free": 80.0, "cached": 10.0, "committed": 10.0}}, "10 blocks leaked"),
        ({"samples": [*SAMPLES[:-2], *[Sample(9.0, 2000, 3.0)] * 2]}, "memory grew 2.00x"),
        ({"samples": [*SAMPLES, Sample(8.0, 1000, 5.0)]}, "5 waited"),
        ({"told": [Told("whole", "complete", 11.0)]}, "p99 is 11.0 s"),
    ],
)
def test_each_broken_promise_is_named(changes: dict[str, Any], said: str) -> None:
    (found,) = figures(**changes).broken()
    assert found.startswith(said)


@pytest.mark.parametrize(
    ("status", "text", "outcome"),
    [
        (429, '{"error": {"code": "queue_full"}}', "refused"),
        (503, '{"error": {"code": "engine_dead"}}', "refused"),
        (500, '{"error": {"code": "internal_error"}}', "lost"),
        (503, "Service Unavailable", "lost"),
        (200, "[]", "lost"),
    ],
)
def test_only_what_is_documented_counts_as_an_answer(status: int, text: str, outcome: str) -> None:
    assert refusal("whole", status, text).outcome == outcome


def test_the_faulty_drafter_can_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert FAULTY in find_plugins(None)
