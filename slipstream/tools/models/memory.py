"""Calculates the memory needed to serve a model from its files, without loading it: bytes of weights,
and of keys and values per token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.request.errors import UnsupportedModelError
from engine.weights.gguf.file import read_header

PROCESSES = 700_000_000
"""Bytes of a server and its engine besides a model and its keys and values: most of it is torch."""
CONTEXT = 8192
"""Tokens that a model is taken to be served with, where it has as many."""
_VALUE_BYTES = 2
_MOST_CONFIG_BYTES = 1 << 22
_FAULTS = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class Needs:
    """``weights``: bytes; ``per_token``: bytes of keys and values in 16 bits; ``length``: the most tokens
    of a text."""

    weights: int
    per_token: int
    length: int

    @property
    def num_tokens(self) -> int:
        return min(CONTEXT, self.length)

    @property
    def memory(self) -> int:
        """For one text of ``num_tokens``."""
        return PROCESSES + self.weights + self.per_token * self.num_tokens


def needs_of(path: Path, num_bytes: int) -> Needs | None:
    """Returns what a GGUF file, the first of several or a folder needs; None: its files do not say.
    ``num_bytes``: of all its weights."""
    try:
        found = _of_config(path) if path.is_dir() else _of_header(path)
    except (*_FAULTS, UnsupportedModelError):
        return None
    return Needs(num_bytes, *found)


def _of_header(path: Path) -> tuple[int, int]:
    header = read_header(path)
    own = f"{header.architecture}."
    said = {
        name.removeprefix(own): value
        for name, value in header.metadata.items()
        if name.startswith(own)
    }
    heads, layers = said["attention.head_count"], int(said["block_count"])
    most = max(heads) if isinstance(heads, list) else int(heads)
    width = int(said["embedding_length"]) // max(most, 1)
    key = int(said.get("attention.key_length_mla") or said.get("attention.key_length") or width)
    value = int(
        said.get("attention.value_length_mla") or said.get("attention.value_length") or width
    )
    kv_heads = (
        heads if "attention.key_length_mla" in said else said.get("attention.head_count_kv", heads)
    )
    if not isinstance(kv_heads, list):
        # Others keep a state in place of keys and values.
        every = int(said.get("full_attention_interval", 1))
        kv_heads = [int(kv_heads)] * (layers // every)
    return sum(kv_heads) * (key + value) * _VALUE_BYTES, int(said["context_length"])


def _of_config(folder: Path) -> tuple[int, int]:
    with (folder / "config.json").open(encoding="utf-8") as file:
        config: Mapping[str, Any] = json.loads(file.read(_MOST_CONFIG_BYTES))
    config = config.get("text_config") or config
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    key = value = int(config.get("head_dim") or config["hidden_size"] // heads)
    if config.get("kv_lora_rank"):
        kv_heads = heads
        key = int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"])
        value = int(config["v_head_dim"])
    kinds = config.get("layer_types") or ["full_attention"] * int(config["num_hidden_layers"])
    layers = sum(each.endswith("attention") and each != "linear_attention" for each in kinds)
    layers -= int(config.get("num_kv_shared_layers") or 0)
    per_token = layers * kv_heads * (key + value) * _VALUE_BYTES
    return per_token, int(config.get("max_position_embeddings") or 4096)
