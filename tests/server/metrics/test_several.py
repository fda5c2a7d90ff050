"""Figures of several models, read while models come."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import Metric

from server.metrics.prometheus import Metrics, exposition
from server.metrics.several import SeveralMetrics
from worlds.scripted_engine import engine_info


def test_a_model_may_be_loaded_while_figures_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = SeveralMetrics(["a", "b"], lambda: ["a"], lambda: False)
    collect = metrics.of("a", engine_info()).collect

    def collecting() -> Iterator[Metric]:
        metrics.of("b", engine_info())  # as a launcher's thread does
        return collect()

    monkeypatch.setattr(metrics.of("a", engine_info()), "collect", collecting)
    assert b'slipstream_requests_running{model="a"}' in exposition(metrics, "")[0]


def test_gammas_are_counted_while_they_are_read() -> None:
    """Where several processes speak HTTP, steps come in one thread and scrapes in others."""
    metrics = Metrics(engine_info(), "m")
    interval = sys.getswitchinterval()

    def count() -> None:
        for gamma in range(20_000):
            metrics._gammas.observe("ngram", {gamma: 1})

    counting = threading.Thread(target=count)
    sys.setswitchinterval(1e-6)
    try:
        counting.start()
        while counting.is_alive():
            list(metrics._gammas.collect())
    finally:
        sys.setswitchinterval(interval)
        counting.join()
