"""One comparison: peers are made ready and loaded, cells are measured, results written as they come."""

from __future__ import annotations

import gc
import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from bench.contenders import ContenderFailedError, Job
from bench.machine import describe_machine
from bench.peers.options import Options
from bench.peers.place import Arm, Peer, PeerUnavailableError, Place, WorkerPlan, make_environment
from bench.peers.report import (
    SCHEMA_VERSION,
    CellFigures,
    best_markdown,
    cell_figures,
    cell_markdown,
    draw,
    gains_markdown,
    to_json,
)
from bench.peers.worker import PeerContender, Worker
from bench.progress import progress_bar
from bench.runner import Cell, contenders_for, measure_cell
from engine.hub.memory import available_bytes

_LEAST_FREE_BYTES = 2 << 30

CellJobs = Sequence[tuple[Cell, tuple[Job, ...]]]


@dataclass
class Results:
    """The results so far. ``unavailable``: why, by peer or worker; ``facts``: what workers said of
    themselves; ``own_benches``: text, by peer; ``groups``: the peer of every arm."""

    options: Options
    cells: list[CellFigures] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    own_benches: dict[str, str] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)

    def write(self) -> None:
        """JSON, Markdown and a picture, where an output is wanted."""
        stem = self.options.output
        if stem is None:
            return
        stem.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_json(), indent=1) + "\n"
        stem.with_name(stem.name + ".json").write_text(text, encoding="utf-8")
        stem.with_name(stem.name + ".md").write_text(self.to_markdown(), encoding="utf-8")
        if self.cells:
            draw(self.cells, stem.with_name(stem.name + ".png"))

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA_VERSION,
            "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": _commit(),
            "machine": machine(self.options.num_threads),
            "settings": self.options.to_json(),
            "workers": self.facts,
            "unavailable": self.unavailable,
            "cells": [to_json(figures) for figures in self.cells],
            "own_benches": self.own_benches,
        }

    def to_markdown(self) -> str:
        parts = ["# Peers, side by side\n", machine_markdown(self.options.num_threads)]
        if self.cells:
            parts.append(best_markdown(self.cells, self.groups))
            parts.append(gains_markdown(self.cells))
        parts += [cell_markdown(figures, self.options.reference) for figures in self.cells]
        parts += [f"### {peer}'s own bench\n\n{text}\n" for peer, text in self.own_benches.items()]
        if self.unavailable:
            lines = [f"- {name}: {reason}" for name, reason in self.unavailable.items()]
            parts.append("\n".join(["### Not measured\n", *lines]) + "\n")
        return "\n".join(parts)


def compare(peers: Sequence[Peer], place: Place, cells: CellJobs, options: Options) -> Results:
    """Measure ``cells`` with every arm of ``peers`` that ``options`` want. Prints as it goes."""
    results = Results(options)
    ready = [peer for peer in peers if _is_ready(peer, place, results)]
    if options.prepare_only:
        return results
    print(machine_markdown(options.num_threads), flush=True)
    with _workers(ready, place, results) as contenders:
        # As the bench does: a full collection would fall into somebody's run.
        gc.collect()
        gc.freeze()
        _measure(cells, contenders, results)
    if options.own_benches:
        for peer in ready:
            _own_bench(peer, place, results)
    results.write()
    return results


def _is_ready(peer: Peer, place: Place, results: Results) -> bool:
    try:
        print(f"{peer.name}: making ready ..", flush=True)
        make_environment(peer, place)
        peer.prepare(place)
    except PeerUnavailableError as error:
        results.unavailable[peer.name] = str(error)
        print(f"{peer.name} cannot be measured: {error}", flush=True)
        results.write()
        return False
    return True


@contextmanager
def _workers(
    peers: Sequence[Peer], place: Place, results: Results
) -> Iterator[Sequence[PeerContender]]:
    """Loaded, one after the other, and ended in any case."""
    workers: list[Worker] = []
    contenders: list[PeerContender] = []
    try:
        for peer in peers:
            for plan in peer.plans(place):
                arms = [arm for arm in plan.arms if _is_wanted(arm, results.options)]
                if not arms:
                    continue
                try:
                    worker = _load(plan, place, results.options.run_seconds, workers)
                except ContenderFailedError as error:
                    results.unavailable[plan.name] = str(error)
                    print(f"{plan.name} cannot be measured: {error}", flush=True)
                    continue
                results.facts[plan.name] = worker.facts
                results.groups |= {arm.name: peer.name for arm in arms}
                contenders += [PeerContender(worker, arm) for arm in arms]
        yield contenders
    finally:
        for worker in workers:
            worker.close()


def _is_wanted(arm: Arm, options: Options) -> bool:
    return any(fnmatchcase(arm.name, pattern) for pattern in options.only)


def _load(plan: WorkerPlan, place: Place, run_seconds: float, workers: list[Worker]) -> Worker:
    if (free := available_bytes()) < _LEAST_FREE_BYTES:
        raise ContenderFailedError(f"only {free / 1e9:.1f} GB of memory are free")
    print(f"{plan.name}: loading ..", flush=True)
    log = place.cache / "logs" / (plan.name.replace(" ", "-") + ".log")
    try:
        worker = Worker(plan, log, run_seconds)
    except OSError as error:
        raise ContenderFailedError(str(error)) from error
    workers.append(worker)
    try:
        worker.load()
    except ContenderFailedError:
        worker.close()
        raise
    return worker


def _measure(cells: CellJobs, contenders: Sequence[PeerContender], results: Results) -> None:
    options = results.options
    arms = {each.name: each.arm for each in contenders}
    num_runs = sum(
        len(jobs) * len(contenders_for(cell, contenders)) * options.num_rounds
        for cell, jobs in cells
    )
    with progress_bar(num_runs) as bar:
        for cell, jobs in cells:
            measured = measure_cell(cell, jobs, contenders, options.num_rounds, bar.step)
            if measured.runs or measured.failed:
                results.cells.append(cell_figures(measured, arms, options.reference))
                bar.write(cell_markdown(results.cells[-1], options.reference))
            results.write()


def _own_bench(peer: Peer, place: Place, results: Results) -> None:
    options = results.options
    try:
        text = peer.own_bench(place, options.concurrency, options.num_new_tokens)
    except PeerUnavailableError as error:
        results.unavailable[f"{peer.name}'s own bench"] = str(error)
        return
    if text is not None:
        results.own_benches[peer.name] = text
        print(f"### {peer.name}'s own bench\n\n{text}", flush=True)


def machine(num_threads: int) -> dict[str, Any]:
    """As the bench describes it, but with the threads that peers are given."""
    return describe_machine(torch.device("cpu")) | {"num_threads": num_threads}


def machine_markdown(num_threads: int) -> str:
    return "\n".join(f"- {key}: {value}" for key, value in machine(num_threads).items()) + "\n"


def _commit() -> str:
    """Returns this code's commit; empty outside git."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
