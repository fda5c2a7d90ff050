"""OpenVINO GenAI: weights of 8 or 4 bits, plain, prompt look-up and a draft model, in-process.

Its model server is a binary that PyPI does not carry, so there is nothing to measure over HTTP.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.peers.place import Arm, Peer, Place, WorkerPlan, call, once
from bench.peers.protocol import Ask, Clock, Reply, serve

NAME = "openvino"
_NO_TOP_K = 2**31 - 1
_CACHE_GB = 1
_LOOKUPS = ((6, 4), (4, 2))
_NUM_DRAFTS = 4
_F32 = {"INFERENCE_PRECISION_HINT": "f32"}
_INT8, _INT4 = "int8", "int4-g128"
_COMPRESSIONS: dict[str, dict[str, Any]] = {
    _INT8: {"bits": 8},
    # optimum-intel's default: zero points, groups of 128, the embedding and the head in 8 bits. Where
    # 128 does not divide a row, the largest power of two that does, from 32.
    _INT4: {"bits": 4, "sym": False, "group_size": 128, "group_size_fallback": "adjust"},
}


class OpenVino(Peer):
    name = NAME
    what = "OpenVINO GenAI, continuous batching"
    requirements = ("openvino-genai", "optimum-intel[openvino]", "openvino-tokenizers")
    # Its builds for CUDA do not fit a torch for CPUs, and importing transformers would fail on it.
    unwanted = ("torchvision",)

    def prepare(self, place: Place) -> None:
        for kind in _COMPRESSIONS:
            self._export(place, place.target, kind)
        if place.draft is not None:
            self._export(place, place.draft, _INT8)

    def plans(self, place: Place) -> list[WorkerPlan]:
        """Plans f32 beside the default: bf16 on a CPU with units for it, and not always its best."""
        kinds = [
            ("int8", _INT8, {}),
            ("int8 f32", _INT8, _F32),
            ("int4", _INT4, {}),
            ("int4 f32", _INT4, _F32),
        ]
        plans = []
        for name, kind, properties in kinds:
            for mode in ("plain", "lookup"):
                plans.append(self._plan(place, name, kind, properties, mode))
        if place.draft is not None:
            plans.append(self._plan(place, "int8 f32", _INT8, _F32, "draft"))
        return plans

    def _plan(self, place: Place, name: str, kind: str, properties: Any, mode: str) -> WorkerPlan:
        title = f"{NAME} {name}"
        arms: tuple[Arm, ...]
        if mode == "lookup":
            arms = tuple(
                Arm(
                    f"{title} lookup {tokens}/{ngram}",
                    {"num_assistant_tokens": tokens, "max_ngram_size": ngram},
                    speculates=True,
                )
                for tokens, ngram in _LOOKUPS
            )
        elif mode == "draft":
            options = {"num_assistant_tokens": _NUM_DRAFTS}
            arms = (Arm(f"{title} draft {_NUM_DRAFTS}", options, speculates=True),)
        else:
            arms = (Arm(f"{title} plain"),)
        return WorkerPlan(
            name=f"{title} {mode}",
            python=place.python(NAME),
            module="bench.peers.openvino_genai",
            load={
                "model": str(place.export(NAME, place.target, kind)),
                "draft": None
                if mode != "draft" or place.draft is None
                else str(place.export(NAME, place.draft, _INT8)),
                "lookup": mode == "lookup",
                "properties": {**properties, "INFERENCE_NUM_THREADS": place.num_threads},
                "max_num_seqs": place.max_running,
            },
            arms=arms,
        )

    def _export(self, place: Place, source: Path, kind: str) -> None:
        once(
            place.export(NAME, source, kind),
            partial(_export_into, str(place.python(NAME)), source, _COMPRESSIONS[kind]),
        )


_EXPORT = """
import json, sys
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
source, target, quantization = sys.argv[1:]
config = OVWeightQuantizationConfig(**json.loads(quantization))
OVModelForCausalLM.from_pretrained(
    source, export=True, quantization_config=config, compile=False
).save_pretrained(target)
"""


def _export_into(python: str, source: Path, how: Any, folder: Path) -> None:
    call([python, "-c", _EXPORT, str(source), str(folder), json.dumps(how)])
    for path in source.glob("tokenizer*"):
        shutil.copy(path, folder)
    converter = str(Path(python).with_name("convert_tokenizer"))
    call([converter, str(folder), "--with-detokenizer", "-o", str(folder)])


class OpenVinoRunner:
    """One pipeline, stepped by hand."""

    def __init__(self, message: dict[str, Any]) -> None:
        self._numpy = import_module("numpy")
        self._ov = import_module("openvino")
        self._genai = import_module("openvino_genai")
        properties: dict[str, Any] = dict(message["properties"])
        if message["lookup"]:
            properties["prompt_lookup"] = True
        if message["draft"]:
            properties["draft_model"] = self._genai.draft_model(
                message["draft"], "CPU", **message["properties"]
            )
        self._pipeline = self._genai.ContinuousBatchingPipeline(
            message["model"], self._scheduler(message), "CPU", properties
        )
        self._num_requests = 0
        self.facts = {
            "openvino": self._ov.__version__,
            "openvino_genai": self._genai.__version__,
            "properties": message["properties"],
        }

    def run(self, ask: Ask) -> list[Reply]:
        config = self._config(ask)
        tensors = [
            self._ov.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64))
            for prompt in ask.prompts
        ]
        replies = [Reply() for _ in tensors]
        clock = Clock()
        handles = []
        for tensor in tensors:
            self._num_requests += 1
            handles.append(self._pipeline.add_request(self._num_requests, tensor, config))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for handle, reply in zip(handles, replies, strict=True):
                if handle.can_read():
                    for output in handle.read().values():
                        reply.add(clock(), list(output.generated_ids))
        return replies

    def _scheduler(self, message: dict[str, Any]) -> Any:
        config = self._genai.SchedulerConfig()
        config.cache_size = _CACHE_GB
        config.max_num_seqs = message["max_num_seqs"]
        # A repeated prompt has to cost what a new one costs.
        config.enable_prefix_caching = False
        return config

    def _config(self, ask: Ask) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = ask.num_new_tokens
        config.ignore_eos = True
        config.do_sample = ask.temperature > 0
        if config.do_sample:
            config.temperature = ask.temperature
            config.top_k = _NO_TOP_K
            config.top_p = 1.0
            config.rng_seed = ask.seed
        for name, value in ask.arm.items():
            setattr(config, name, value)
        return config


if __name__ == "__main__":
    serve(OpenVinoRunner)
