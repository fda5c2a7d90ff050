"""Starts the contenders: plain decoding, the default drafter, ``auto``, and those that may beat both,
each in-process and over HTTP."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from bench.cells.figures import AUTO, HTTP, PLAIN
from bench.cells.options import IN_PROCESS, OVER_HTTP, Options
from bench.contenders import (
    Contender,
    EngineContender,
    Job,
    Run,
    SteppedContender,
    parse_drafter,
)
from bench.models import BUNDLED, OWN, SCALED, BenchModel, load_bench_model
from bench.peers.model_files import model_files
from bench.peers.place import DEFAULT, Arm, WorkerPlan
from bench.peers.slipstream_engine import served_plan
from bench.peers.worker import PeerContender, Worker
from engine.build import with_fastest_weights
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.drafting.drafts import check_names, with_bundled_drafts
from engine.hub.memory import available_bytes
from engine.names import locate
from engine.request.info import EngineInfo
from engine.request.params import PLAIN as PLAIN_DECODING
from engine.request.params import SpeculativeParams
from engine.weights.gguf.file import find_gguf

_FREE = ("suffix", "stand", "recycling")
_RUN_SECONDS = 600.0
_REST_SECONDS = 0.3

Ways = Mapping[str, SpeculativeParams]
"""Ways of decoding, by name; plain first."""


def default_drafter() -> str:
    """Returns the drafter of a request that names none."""
    return SpeculativeParams().draft_strategy


def engine_config(options: Options) -> EngineConfig:
    """As it is served, with the weights that it then has and the drafts that come for the model."""
    config = EngineConfig(
        model=BUNDLED if options.model in OWN else options.model,
        device=options.device,
        determinism=options.determinism,
        quantization=options.quantization,
        draft=options.draft,
        max_num_seqs=max(options.at_once),
    )
    completed = with_bundled_drafts(with_fastest_weights(config))
    return replace(completed, model=_checkpoint(options))


def _checkpoint(options: Options) -> str:
    """The model by its name, or its floats where a file's few bits are to be rounded to others."""
    if options.model in OWN:
        return BUNDLED
    is_rounded = options.quantization not in (None, "none")
    if is_rounded and find_gguf(locate(options.model)) is not None:
        return str(model_files(options.model, None, None, DEFAULT, 1).target)
    return options.model


def load_core(options: Options) -> BenchModel:
    """Raises OSError and UnsupportedModelError as loading does."""
    config = engine_config(options)
    name = options.model if options.model in OWN else str(config.model)
    return load_bench_model(name, config, with_transformers=False)


@contextmanager
def started_contenders(options: Options, model: BenchModel) -> Iterator[list[Contender]]:
    """In-process ones first, the first with the core of ``model``; plain decoding first of each way.
    Exits with a message for a drafter that the engine does not have. Raises ContenderFailedError where
    the server does not start."""
    ways = ways_of(options, model.info)
    contenders: list[Contender] = []
    if IN_PROCESS in options.ways:
        contenders += in_process(options, model.core, ways)
    if OVER_HTTP not in options.ways:
        yield contenders
        return
    worker = Worker(http_plan(options, ways), options.output.with_suffix(".log"), _RUN_SECONDS)
    try:
        worker.load()
        yield [*contenders, *(_RestedContender(worker, arm) for arm in worker.plan.arms)]
    finally:
        worker.close()


def in_process(options: Options, first: EngineCore, ways: Ways) -> list[Contender]:
    """Each with a core of its own, where there is room for so many on this machine and they are to be
    measured."""
    if options.predict_only or not _have_room(options, len(ways)):
        return [EngineContender(name, first, speculative) for name, speculative in ways.items()]
    cores = [first, *(load_core(options).core for _ in range(len(ways) - 1))]
    return [*map(SteppedContender, ways, cores, ways.values())]


def _have_room(options: Options, num_cores: int) -> bool:
    """Whether so many cores fit beside each other, by what this process took with one of them loaded."""
    largest = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if options.device == "cpu" and (num_cores - 1) * largest <= available_bytes():
        return True
    print("one core for all in-process: they take turns run by run", flush=True)
    return False


def check_drafters(options: Options) -> None:
    """Exits with a message for a drafter that no model has: before one is loaded."""
    try:
        known = check_names(EngineConfig(draft=options.draft))
    except ValueError as error:
        raise SystemExit(str(error)) from error
    _parsed(options.drafters or (), known)


def ways_of(options: Options, info: EngineInfo) -> Ways:
    wanted = options.drafters or usual_drafters(info)
    return {PLAIN: PLAIN_DECODING} | _parsed(wanted, info.drafters)


def _parsed(texts: Iterable[str], known: Iterable[str]) -> dict[str, SpeculativeParams]:
    try:
        return dict(parse_drafter(text, sorted(known)) for text in texts)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def usual_drafters(info: EngineInfo) -> tuple[str, ...]:
    """The default, ``auto``, the free ones that gain most on texts, and what comes for the model."""
    wanted = dict.fromkeys((default_drafter(), AUTO, *_FREE, *info.drafts))
    return tuple(name for name in wanted if name in info.drafters)


def http_plan(options: Options, ways: Ways) -> WorkerPlan:
    """The server with the settings of the core; runs are apart as they are in-process, and replies tell
    of their drafts. Of the usual drafters only what has to hold over HTTP: the others tell in-process
    what was best."""
    config = engine_config(options)
    model = str(config.model)
    settings: dict[str, Any] = {"max_num_seqs": config.max_num_seqs, "device": config.device}
    if config.determinism is not None:
        settings["determinism"] = config.determinism
    if config.quantization is not None:
        settings["quantization"] = config.quantization
    if options.model == SCALED:
        model = str(model_files(SCALED, None, None, DEFAULT, 1).target)
    if config.draft:
        settings["draft"] = list(config.draft)
    wanted = (PLAIN, default_drafter(), AUTO)
    arms = tuple(
        Arm(name + HTTP, {"body": _body(speculative)}, name != PLAIN, over_http=True)
        for name, speculative in ways.items()
        if options.drafters is not None or name in wanted
    )
    body = {"stream_options": {"include_usage": True}}
    return served_plan("served", model, settings, arms, body=body, salted=True)


def _body(speculative: SpeculativeParams) -> dict[str, Any]:
    """Returns the fields that ask for this; none for the default."""
    if speculative == PLAIN_DECODING:
        return {"speculative": {"draft_strategy": PLAIN_DECODING.draft_strategy}}
    usual = asdict(SpeculativeParams())
    own = {name: value for name, value in asdict(speculative).items() if value != usual[name]}
    return {"speculative": own} if own else {}


class _RestedContender(PeerContender):
    """Asked only when this process is at rest: Intel's OpenMP lets its threads spin for 0.2 seconds after
    a step, on cores that the server needs."""

    def run(self, job: Job) -> Run:
        time.sleep(_REST_SECONDS)
        return super().run(job)
