"""The engine's settings: frozen, checked once, filled in by the server's ``Settings`` or by a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Determinism = Literal["exact", "fast"]
Quantization = Literal["int8", "int4", "fp8"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to build an engine. ``None`` means: decide from the model and the machine.

    ``determinism`` "exact" routes every row through the same kernels whatever shares its step, so that
    tokens do not depend on batch, chunking or drafts even in bf16; "fast" lets kernels pick.
    ``drafter_plugins``: names of the drafters that other distributions may bring; None: all, empty: none.
    ``kv_memory_fraction``: share of the memory that is free once the model is loaded.
    ``stand_template``: file with the static tree of the ``stand`` drafter; None: the one shipped.
    ``max_num_batched_tokens``: token budget of a step, prompt rows and draft nodes included.
    ``draft_model``: folder or hub id of a small model with the target's tokenizer; None: none, beside
    the bundled target its own. ``draft_kv_dtype``: "fp8" halves its keys and values. ``quantized``:
    make a copy of ``quantized_model`` with such weights. ``prefix_layers``: a number of first layers, or
    the numbers of layers, that draft ("3", "0,1,4,5").
    ``drafter_settings``: by drafter, those of its own settings that are not left at their defaults.
    ``medusa_heads``, ``eagle_head``: folders of trained heads; None: those of the bundled target.
    """

    model: str | None = None
    device: str = "cpu"
    dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory_fraction: float = 0.5
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    max_model_len: int | None = None
    max_num_waiting: int = 256
    prefill_chunk: int = 512
    determinism: Determinism | None = None
    max_num_nodes: int = 64
    enable_prefix_cache: bool = True
    drafters: tuple[str, ...] | None = None
    drafter_plugins: tuple[str, ...] | None = None
    drafter_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    stand_template: str | None = None
    draft_model: str | None = None
    draft_kv_dtype: Literal["auto", "fp8"] = "auto"
    quantized: Quantization | None = None
    quantized_model: Literal["target", "draft"] = "target"
    prefix_layers: str | None = None
    medusa_heads: str | None = None
    eagle_head: str | None = None
    num_threads: int | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    check_integrity: bool = False

    def __post_init__(self) -> None:
        positive = (
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "prefill_chunk",
            "max_num_waiting",
        )
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("num_blocks", "max_model_len", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.max_num_nodes < 0:
            raise ValueError("max_num_nodes must not be negative")
        if not 0 < self.kv_memory_fraction <= 1:
            raise ValueError("kv_memory_fraction must be above 0 and at most 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                "max_num_batched_tokens must not be below max_num_seqs: each needs a row per step"
            )
