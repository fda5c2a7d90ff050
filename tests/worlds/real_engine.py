"""SmolLM2 as the engine builds it, with every drafter that can be had for it, under cores of other sizes.

``eagle3`` is the head that comes with it; other heads have random weights. There is no ``mtp``, whose
modules come in the target's own checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.workloads import CODE_FILE, DATA, EDITS_FILE
from drafters.registry import drafter_names
from engine.build import build_engine
from engine.config import EngineConfig
from engine.names import SMOLLM2
from worlds.built_engine import BuiltEngine
from worlds.real_heads import write_random_heads

DRAFTERS = tuple(name for name in drafter_names() if name not in ("none", "mtp"))
"""Those that can be had for it."""
NUM_LAYERS = 30
_NUM_BLOCKS = 768
_SKIPPED_LAYERS = (12, 18)
"""Layers that ``prefix_layers`` leaves out; it takes any: a model that was not trained to end early knows
nothing before its last layers."""
_USUAL = EngineConfig(
    model=SMOLLM2,
    dtype="bfloat16",
    num_blocks=_NUM_BLOCKS,
    max_num_seqs=64,
    max_num_batched_tokens=640,
    num_threads=1,
    draft=(f"small_model={SMOLLM2}",),
    prefix_layers=",".join(str(at) for at in range(NUM_LAYERS) if at not in _SKIPPED_LAYERS),
)
WEIGHTS: dict[str, dict[str, Any]] = {
    "bf16": {"quantization": "none", "quantized": "int8"},
    # A target in 8 bits is not copied once more: this copy is of the draft model.
    "int8": {"quantization": "int8", "quantized": "int4", "quantized_model": "draft"},
    # The file's own bits.
    "q4_1": {"quantized": "int8", "quantized_model": "draft"},
}
"""Settings that an engine is built with beside the usual."""
_LICENCE = Path(__file__).resolve().parents[2] / "LICENSE"
_QUESTIONS = (
    "Why is the sky blue by day and red in the evening? Answer in three sentences.",
    "Write a Python function that reads a file of numbers and returns their mean.",
)
_NUM_EDITS = 2


class RealEngine(BuiltEngine):
    """``prompts``: a conversation, code, edits of code that others wrote, and a licence to repeat."""

    def __init__(self, weights: str) -> None:
        config = replace(_USUAL, **WEIGHTS[weights])
        with TemporaryDirectory() as root:
            heads = [f"{name}={path}" for name, path in write_random_heads(Path(root)).items()]
            engine, self.tokenizer = build_engine(replace(config, draft=(*config.draft, *heads)))
        super().__init__(engine, max_num_seqs=64, max_num_batched_tokens=640, prefill_chunk=512)
        self.prompts: Sequence[Sequence[int]] = [
            self.chat(text) for text in (*_QUESTIONS, *_edits(), _repeat_licence())
        ]

    def chat(self, text: str) -> Sequence[int]:
        """The token ids of a message, up to where the reply begins."""
        message = [{"role": "user", "content": text}]
        found: Sequence[int] = self.tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=False
        )
        return found


def licence(num_characters: int) -> str:
    """The beginning of the Apache License."""
    return _LICENCE.read_text(encoding="utf-8")[:num_characters]


def code(num_characters: int) -> str:
    """The beginning of code that others wrote."""
    lines = (DATA / CODE_FILE).read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return "\n".join(each["prompt"] + each["completion"] for each in found)[:num_characters]


def _repeat_licence() -> str:
    return f"Repeat this text word for word.\n\n{licence(1200)}"


def _edits() -> list[str]:
    """The shortest of those that the bench has."""
    lines = (DATA / EDITS_FILE).read_text(encoding="utf-8").splitlines()
    texts: list[str] = [json.loads(line)["messages"][0]["content"] for line in lines]
    return sorted(texts, key=len)[:_NUM_EDITS]
