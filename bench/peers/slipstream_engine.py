"""This server: in-process and over HTTP, a GGUF file as it is, bf16 and int8, plain and with drafters."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.peers.place import Arm, Peer, Place, WorkerPlan
from bench.peers.protocol import Ask, Clock, Reply, serve

NAME = "slipstream"
WEIGHTS = {"bf16": "none", "int8": "int8"}
FILE = "gguf"
DRAFTERS = ("none", "ngram", "suffix", "stand", "auto")
SMALL_MODEL = "small_model"
PLAIN = "none"
_LARGEST_STEP = 1024


class Slipstream(Peer):
    name = NAME
    what = "this server"

    def plans(self, place: Place) -> list[WorkerPlan]:
        served: dict[str, tuple[Path, dict[str, Any]]] = {
            weights: (place.target, {"quantization": quantization})
            for weights, quantization in WEIGHTS.items()
        }
        if place.gguf is not None:
            served = {FILE: (place.gguf, {}), **served}
        if place.settings:
            said = " ".join(f"{name}={value}" for name, value in place.settings.items())
            for weights, (model, settings) in list(served.items()):
                served[f"{weights} {said}"] = (model, {**settings, **place.settings})
        plans = []
        for weights, (model, own) in served.items():
            settings = {**_common_settings(place), **own}
            plans += [
                self._in_process(place, weights, model, settings),
                self._served(place, weights, model, settings),
            ]
        return plans

    def _in_process(
        self, place: Place, weights: str, model: Path, settings: dict[str, Any]
    ) -> WorkerPlan:
        return WorkerPlan(
            name=f"{NAME} {weights}",
            python=Path(sys.executable),
            module="bench.peers.slipstream_engine",
            load={"model": str(model), **settings},
            arms=tuple(
                Arm(_title(weights, name), {"drafter": name}, speculates=name != PLAIN)
                for name in _drafters(place)
            ),
        )

    def _served(
        self, place: Place, weights: str, model: Path, settings: dict[str, Any]
    ) -> WorkerPlan:
        arms = tuple(
            Arm(
                f"{_title(weights, name)} (HTTP)",
                {"body": {"speculative": {"draft_strategy": name}}},
                speculates=name != PLAIN,
                over_http=True,
            )
            for name in _drafters(place)
        )
        # Salted: what drafters have learned of a prompt in one round is not theirs in the next.
        return served_plan(f"{NAME} {weights} (HTTP)", str(model), settings, arms, salted=True)


def served_plan(
    name: str, model: str, settings: Mapping[str, Any], arms: tuple[Arm, ...], **load: Any
) -> WorkerPlan:
    """Over HTTP, with settings of this server by their names. ``load``: more for the worker, by which
    ``body`` is added to."""
    command = [sys.executable, "-m", "slipstream.cli", "serve", model]
    command += ["--host", "127.0.0.1", "--port", "{port}", "--served-model-name", NAME]
    for setting, value in settings.items():
        flag = setting.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words = ",".join(value) if isinstance(value, list) else str(value)
            command += [f"--{flag}", words]
    return WorkerPlan(
        name=name,
        python=Path(sys.executable),
        module="bench.peers.http_worker",
        load={
            "command": command,
            "ready": "/ready",
            "dialect": "openai",
            **load,
            "body": {"model": NAME, **load.get("body", {})},
        },
        arms=arms,
    )


def _common_settings(place: Place) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "drafters": list(_drafters(place)),
        "max_num_seqs": place.max_running,
        "max_num_batched_tokens": max(_LARGEST_STEP, place.max_running),
        "max_model_len": place.max_tokens,
        "num_threads": place.num_threads,
        # A repeated prompt has to cost what a new one costs.
        "enable_prefix_cache": False,
    }
    drafts = {} if place.draft is None else {SMALL_MODEL: place.draft}
    drafts |= place.heads
    if drafts:
        settings["draft"] = [f"{name}={path}" for name, path in drafts.items()]
    return settings


def _drafters(place: Place) -> tuple[str, ...]:
    small = () if place.draft is None else (SMALL_MODEL,)
    return (*DRAFTERS, *small, *place.heads)


def _title(weights: str, drafter: str) -> str:
    return f"{NAME} {weights} {'plain' if drafter == PLAIN else drafter}"


class SlipstreamRunner:
    """The engine as the server runs it, in a process of its own with what the server preloads, without
    HTTP and text in front."""

    def __init__(self, message: dict[str, Any]) -> None:
        config_type = import_module("engine.config").EngineConfig
        self._params = import_module("engine.request.params")
        for name in ("drafters", "draft"):
            message[name] = tuple(message.get(name, ()))
        preload = import_module("engine.process.preload").preload_environment()
        # Kept: the engine ends when nobody holds its pipe any more.
        self._process = import_module("engine.process.launch").EngineProcess(
            config_type(**message), environment=preload
        )
        self._loop = asyncio.new_event_loop()
        self._engine = import_module("engine.process.client").RemoteEngine(
            self._process.start(), self._process.connect()
        )
        self._loop.run_until_complete(self._engine.start())
        self._num_runs = 0
        info = self._engine.info
        self.facts = {
            "dtype": info.dtype,
            "determinism": info.determinism,
            "exact_verified": info.exact_verified,
            "preloaded": preload.get("LD_PRELOAD", "nothing"),
        }

    def run(self, ask: Ask) -> list[Reply]:
        return self._loop.run_until_complete(self._run(ask))

    async def _run(self, ask: Ask) -> list[Reply]:
        self._num_runs += 1
        clock = Clock()
        streams = [self._stream(self._request(ask, at), clock) for at in range(len(ask.prompts))]
        return list(await asyncio.gather(*streams))

    async def _stream(self, request: Any, clock: Clock) -> Reply:
        reply = Reply()
        async for event in self._engine.generate(request):
            reply.add(clock(), list(event.token_ids))
        return reply

    def _request(self, ask: Ask, at: int) -> Any:
        return self._params.GenerationRequest(
            request_id=f"peers/{self._num_runs}/{at}",
            prompt_token_ids=tuple(ask.prompts[at]),
            sampling=self._params.SamplingParams(
                max_tokens=ask.num_new_tokens,
                temperature=ask.temperature,
                ignore_eos=True,
                seed=ask.seed + at,
            ),
            speculative=self._params.SpeculativeParams(draft_strategy=ask.arm["drafter"]),
        )


if __name__ == "__main__":
    serve(SlipstreamRunner)
