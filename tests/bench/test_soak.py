"""The account that ``bench.soak`` gives of a run: every promise that can be broken is seen to be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.soak.__main__ import Figures, Sample
from bench.soak.clients import Told, refusal
from bench.soak.server import FAULTY, install_plugin
from drafters.registry import find_plugins


def figures() -> Figures:
    told = [Told("whole", "complete", 1.0), Told("stream", "refused", 0.1, detail="429 queue_full")]
    return Figures(
        seconds=60.0,
        capacity=2.0,
        rate=4.0,
        told=told,
        samples=[Sample(float(at), 1000, 3.0) for at in range(8)],
        num_kills=2,
        blocks={"free": 90.0, "cached": 10.0, "committed": 0.0},
        total_blocks=100.0,
        num_different=0,
        limits={"queue": 4, "deadline": 10.0},
    )


def lose(made: Figures) -> None:
    made.told.append(Told("whole", "lost", 1.0, detail="500 internal_error"))


def differ(made: Figures) -> None:
    made.num_different = 1


def leak(made: Figures) -> None:
    made.blocks = {"free": 80.0, "cached": 10.0, "committed": 10.0}


def grow(made: Figures) -> None:
    made.samples[-2:] = [Sample(9.0, 2000, 3.0)] * 2


def wait(made: Figures) -> None:
    made.samples[3] = Sample(3.0, 1000, 5.0)


def linger(made: Figures) -> None:
    made.told = [Told("whole", "complete", 11.0)]


def test_nothing_is_broken_where_all_held() -> None:
    assert figures().broken() == []
    assert "1 complete" in figures().report()
    assert "429 queue_full" in figures().report()


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (lose, "1 replies lost"),
        (differ, "1 texts differ"),
        (leak, "10 blocks leaked"),
        (grow, "memory grew 2.00x"),
        (wait, "5 waited"),
        (linger, "p99 is 11.0 s"),
    ],
)
def test_each_broken_promise_is_named(breaks: Callable[[Figures], None], said: str) -> None:
    made = figures()
    breaks(made)
    (found,) = made.broken()
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
