"""Times layers that keep a state: steps of a model of Qwen3.5-0.8B's shape with random weights,
beside those of the same model whose operations with a state cost nothing.

    python -m bench.states [--quantization none] [--rounds 5] [--json FILE]

Both are timed in turns, in one process. ``states_by_bytes``: what states take, beside a copy of as much
memory as they are, which reads and writes it once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from engine.batch import Bucket, RequestRows, build_batch
from engine.build import build_engine_for
from engine.config import EngineConfig
from engine.model.loader import prepare_model, state_shapes
from engine.model.runner import ModelRunner
from engine.states.plan import Convolution, Recurrence
from engine.states.work import StateWork
from kvpool.state_slots import StateRows
from kvpool.state_store import StateStore

_CONTEXT = 256
_SHAPES = {
    "1 request": (1, 1, 0),
    "1 request, 8 drafts": (1, 1, 8),
    "16 requests": (16, 1, 0),
    "a prompt's 512 rows": (1, 512, 0),
}
"""Requests, known rows and drafts of each."""


class NoStates:
    """Operations with a state that cost nothing."""

    can_capture = True
    can_graph = False

    def __init__(self, store: StateStore) -> None:
        self.store = store

    def plan(self, work: StateWork, bucket: Bucket | None = None) -> NoStates:
        del work, bucket
        return self

    def convolve(self, op: int, asked: Convolution) -> torch.Tensor:
        del op
        return asked.rows.contiguous()

    def recur(self, op: int, asked: Recurrence) -> torch.Tensor:
        del op
        return asked.value.contiguous()

    def reserve(self, bucket: Bucket, most_nodes: int) -> None:
        raise NotImplementedError

    def keep(self) -> Callable[[], None]:
        return lambda: None


def make_model(num_layers: int, vocab_size: int) -> Any:
    """Random weights; small ones, so that nothing overflows."""
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    config = Qwen3_5TextConfig(
        **{"vocab_size": vocab_size, "hidden_size": 1024, "intermediate_size": 3584},
        **{"num_hidden_layers": num_layers, "layer_types": (kinds * num_layers)[:num_layers]},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 16, "eos_token_id": None},
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return prepare_model(model, torch.device("cpu"))


def step(runner: ModelRunner, shape: tuple[int, int, int]) -> Callable[[], None]:
    """Returns a forward of requests that have ``_CONTEXT`` tokens each."""
    num_requests, num_known, num_drafts = shape
    size = runner.store.block_size
    num_blocks = -(-(_CONTEXT + num_known + num_drafts) // size)
    requests = [
        RequestRows(
            [0] * (num_known + num_drafts),
            num_known,
            _CONTEXT,
            range(-1, num_drafts - 1),
            range(number * num_blocks, (number + 1) * num_blocks),
            1 + num_drafts,
            states=StateRows(number, (), number, range(number * 8, number * 8 + num_drafts)),
        )
        for number in range(num_requests)
    ]
    return lambda: (runner.forward(build_batch(requests, size)), None)[1]


def seconds_of(run: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


def copy_seconds(num_bytes: int) -> float:
    """Seconds to read and write so many bytes once."""
    source = torch.ones(num_bytes // 4)
    target = torch.empty_like(source)
    return seconds_of(lambda: (target.copy_(source), None)[1], 9)


def measure(runner: ModelRunner, free: ModelRunner, rounds: int) -> dict[str, dict[str, float]]:
    shapes = state_shapes(runner.model)
    found = {}
    for name, shape in _SHAPES.items():
        repeats = 3 if shape[1] > 1 else 15
        both: list[list[float]] = [[], []]
        for number in range(rounds + 1):  # the first warms up
            for times, each in zip(both, (runner, free), strict=True):
                seconds = seconds_of(step(each, shape), repeats)
                if number:
                    times.append(seconds)
        with_states, without = map(median, both)
        moved = copy_seconds(shape[0] * StateStore.bytes_per_slot(shapes))
        found[name] = {
            "milliseconds": 1e3 * with_states,
            "without": 1e3 * without,
            "ratio": with_states / without,
            "share": 1 - without / with_states,
            "states_by_bytes": (with_states - without) / moved,
        }
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quantization", default="int8", choices=["none", "int8", "int4"])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=248320)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    asked = parser.parse_args(arguments)
    config = EngineConfig(
        quantization=asked.quantization, num_blocks=1024, max_num_seqs=16, drafters=("none",)
    )
    engine = build_engine_for(make_model(asked.layers, asked.vocab), None, config)
    runner: Any = engine.core.runner
    free = ModelRunner(runner.model, runner.attention, states=NoStates(runner.states.store))
    found = measure(runner, free, asked.rounds)
    for name, each in found.items():
        print(f"{name:22}", *(f"{key} {value:8.3f}" for key, value in each.items()))
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
