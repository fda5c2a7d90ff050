"""transformers: ``generate``, its prompt look-up, its assisted generation and its continuous
batching, in our own environment and in-process; its server is no part of what is compared.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.peers.place import Arm, Peer, Place, WorkerPlan
from bench.peers.protocol import Ask, Reply, serve

NAME = "transformers"
_LOOKUP_TOKENS = 10
_PAGE_TOKENS = 128
_LARGEST_STEP = 1024
_ALONE = 1
"""Its look-up and its assistant refuse more than one sequence."""


class Transformers(Peer):
    name = NAME
    what = "transformers, bf16"

    def plans(self, place: Place) -> list[WorkerPlan]:
        arms: tuple[Arm, ...] = (
            Arm(f"{NAME} generate", {"mode": "generate"}),
            Arm(
                f"{NAME} lookup {_LOOKUP_TOKENS}",
                {"mode": "generate", "lookup_tokens": _LOOKUP_TOKENS},
                speculates=True,
                max_batch_size=_ALONE,
            ),
        )
        if place.draft is not None:
            assisted = {"mode": "generate", "assisted": True}
            arms += (Arm(f"{NAME} assisted", assisted, speculates=True, max_batch_size=_ALONE),)
        continuous = (Arm(f"{NAME} continuous batching", {"mode": "continuous"}),)
        # A worker each: continuous batching sets the model's attention to its own.
        return [
            self._plan(place, f"{NAME} generate", arms),
            self._plan(place, f"{NAME} continuous batching", continuous),
        ]

    def _plan(self, place: Place, name: str, arms: tuple[Arm, ...]) -> WorkerPlan:
        return WorkerPlan(
            name=name,
            python=Path(sys.executable),
            module="bench.peers.transformers_generate",
            load={
                "model": str(place.target),
                "draft": None if place.draft is None else str(place.draft),
                "num_threads": place.num_threads,
                "max_running": place.max_running,
                "max_tokens": place.max_tokens,
            },
            arms=arms,
        )


class TransformersRunner:
    """The bench's contender, and what it has not: continuous batching."""

    def __init__(self, message: dict[str, Any]) -> None:
        self._torch = import_module("torch")
        transformers = import_module("transformers")
        self._contenders = import_module("bench.contenders")
        self._torch.set_num_threads(message["num_threads"])
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(message["model"], dtype=self._torch.bfloat16).eval()
        self._draft: Any = None
        self._pad = self._model.config.pad_token_id or 0
        self._config_type = transformers.GenerationConfig
        if message["draft"] is not None:
            self._draft = load(message["draft"], dtype=self._torch.bfloat16).eval()
            # What it says about ending would win over None.
            self._draft.generation_config = self._config_type(pad_token_id=self._pad)
        # Unset it takes most of the memory there is.
        self._batching = transformers.ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS,
            num_blocks=message["max_running"] * -(-message["max_tokens"] // _PAGE_TOKENS),
            max_batch_tokens=_LARGEST_STEP,
            allow_block_sharing=False,
        )
        self._modes: dict[str, Callable[..., list[Reply]]] = {
            "generate": self._generate,
            "continuous": self._continuous,
        }
        self.facts = {"transformers": transformers.__version__, "torch": self._torch.__version__}

    def run(self, ask: Ask) -> list[Reply]:
        options = dict(ask.arm)
        return self._modes[options.pop("mode")](ask, **options)

    def _generate(self, ask: Ask, lookup_tokens: int = 0, assisted: bool = False) -> list[Reply]:
        contender = self._contenders.TransformersContender(
            self._model, self._pad, lookup_tokens, self._draft if assisted else None
        )
        job = self._contenders.Job(
            prompts=tuple(map(tuple, ask.prompts)),
            num_new_tokens=ask.num_new_tokens,
            sampling=self._contenders.Sampling("", ask.temperature),
            seed=ask.seed,
        )
        outputs, marks = contender.complete(job)
        # One count for all: generate's batch goes in step.
        return [Reply(list(output), list(marks)) for output in outputs]

    def _continuous(self, ask: Ask) -> list[Reply]:
        self._torch.manual_seed(ask.seed)
        config = self._config_type(
            max_new_tokens=ask.num_new_tokens,
            eos_token_id=-1,
            pad_token_id=self._pad,
            do_sample=ask.temperature > 0,
        )
        if ask.temperature > 0:
            config.temperature, config.top_k, config.top_p = ask.temperature, 0, 1.0
        start = time.perf_counter()
        outputs = self._model.generate_batch(
            inputs=ask.prompts,
            generation_config=config,
            continuous_batching_config=self._batching,
            record_timestamps=True,
        )
        replies = []
        for output in outputs.values():
            times = [seconds - start for seconds in output.timestamps]
            marks = [(seconds, at + 1) for at, seconds in enumerate(times)]
            replies.append(Reply(list(output.generated_tokens), marks))
        return replies


if __name__ == "__main__":
    serve(TransformersRunner)
