"""The engine's settings: frozen, checked once, filled in by the server's ``Settings`` or by a test."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from drafters.options import check_ranges, described
from engine.hub.name import called
from engine.names import BUNDLED_MODEL, BUNDLED_NAME
from engine.request.info import Determinism
from engine.request.params import Pooling

ShedSpeculation = Literal["never", "unpaid", "all"]
Quantization = Literal["int8", "int4", "fp8"]
USUAL_GRAPH_ROWS = 256
"""Rows of the largest step that is captured as a CUDA graph where nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to build an engine: what has words here is a setting of the server. ``None`` means: decide
    from the model and the machine.

    ``draft``: models and heads that draft, each ``[NAME=]PATH`` (``engine.drafting.drafts``).
    ``drafter_plugins``: names of the drafters that other distributions may bring; None: all, empty: none.
    ``drafter_settings``: by drafter, those of its own settings that are not left at their defaults.
    """

    model: str | None = None
    device: str = described("cpu", "cpu, cuda or cuda:N.")
    dtype: str = described("auto", "auto, float32, bfloat16 or float16.")
    quantization: Literal["int8", "int4", "none"] | None = described(
        None,
        "int8: linear layers in 8 bits; int4: in 4, calibrated on the model's own texts, minutes"
        " at each start; none: a quantized checkpoint as floats. Default: the checkpoint's own; "
        "for the bundled model the fastest.",
    )
    quantize_head: bool = described(
        True, "With quantized weights: an output head that has none of its own in 8 bits, too."
    )
    quantize_activations: bool = described(
        True,
        "On CPUs: round inputs of quantized layers to 8 bits; else they keep their type, which is "
        "slower.",
    )
    tensor_parallel_size: int = described(
        1,
        "GPUs that share the model, one process each; torchrun may launch them, too. Needs accelerate.",
        ge=1,
    )
    block_size: int = described(
        16, "Tokens in a KV block; CPUs read multiples of 16 twice as fast.", ge=1
    )
    num_blocks: int | None = described(None, "KV blocks; default: what memory allows.", ge=1)
    kv_memory_fraction: float = described(0.5, "Share of free memory for KV blocks.", gt=0, le=1)
    kv_cache_dtype: Literal["auto", "fp8"] = described(
        "auto",
        "Type of keys and values; auto: the model's. fp8 (e4m3) halves them, at a small loss of quality.",
    )
    max_num_seqs: int = described(64, "Most requests in a batch.", ge=1)
    max_num_batched_tokens: int = described(
        1024, "Most tokens in a step: prompt, decode and drafts.", ge=1
    )
    max_model_len: int | None = described(
        None, "Prompt plus output; default: the model's, which is also the most.", ge=1
    )
    max_num_waiting: int = described(256, "Longest queue; more requests get a 429.", ge=1)
    shed_speculation: ShedSpeculation = described(
        "unpaid",
        "Drafts that yield while many requests wait; unpaid: those granted at any cost (fixed, "
        "target_rate, min_speculative_tokens); all: also those that pay; never.",
    )
    shed_queue: int | None = described(
        None, "So many have to wait for that; default: half of max_num_waiting.", ge=1
    )
    prefill_chunk: int = described(512, "Most prompt tokens of a request in a step.", ge=1)
    determinism: Determinism | None = described(
        None,
        "exact: tokens never depend on what else is in the batch. "
        "Default: exact on a CPU, fast elsewhere.",
    )
    attention_backend: str | None = described(
        None,
        "triton (GPUs), paged (CPUs), sdpa (any device), or a further one; default: the best for the "
        "machine and determinism.",
    )
    cuda_graph_rows: int | None = described(
        None,
        "Largest step captured as a CUDA graph, in rows; 0: none. Default: 256 where device and "
        "backend allow it.",
        ge=0,
    )
    embeddings: Pooling = described(
        "none",
        "What /v1/embeddings makes of a text's hidden states: their mean, or the last one; none: "
        "there are no embeddings.",
    )
    max_num_nodes: int = described(64, "Most draft tokens per request and step.", ge=0)
    enable_prefix_cache: bool = described(True, "Reuse the KV of prompts that begin alike.")
    state_snapshot_tokens: int = described(
        512,
        "For models with states: tokens of a prompt between two snapshots.",
        ge=1,
    )
    kv_offload_bytes: int | None = described(
        None,
        "Keep evicted blocks of the prefix cache in so many bytes (4GiB), of host memory or of "
        "kv_offload_file.",
        ge=1,
    )
    kv_offload_file: str | None = described(
        None,
        "File for kv_offload_bytes, for one server, warm after a restart with the same model.",
    )
    kv_events_endpoint: str | None = described(
        None,
        "Publish the prefix cache's blocks, with their token ids, over ZeroMQ: tcp://*:PORT or "
        "tcp://HOST:PORT (extra kv-events). Default: off.",
    )
    kv_events_replay_endpoint: str | None = described(
        None, "tcp://*:PORT on which the latest KV events can be asked for once more."
    )
    kv_events_topic: str | None = described(
        None,
        "With kv_events_endpoint: kv@POD@MODEL, by which consumers know whose events they are; MODEL as "
        "clients name it.",
    )
    kv_events_salted: bool = described(
        False,
        "Tell of blocks of tenants and of requests with a cache_salt, too, and their salts.",
    )
    drafters: tuple[str, ...] | None = None
    drafter_plugins: tuple[str, ...] | None = None
    drafter_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    draft: tuple[str, ...] = ()
    lora: tuple[str, ...] = ()
    min_draft_agreement: float | None = described(
        None,
        "Refuse to start if a draft agrees with the target less often than that. Default: a "
        "warning below 0.2.",
        ge=0,
        le=1,
    )
    draft_kv_dtype: Literal["auto", "fp8"] = described(
        "auto", "Type of the KV of small models that draft; fp8 halves it and may cost acceptance."
    )
    quantized: Quantization | None = described(
        None, "Make a copy with such weights for the quantized drafter (needs torchao)."
    )
    quantized_model: Literal["target", "draft"] = described(
        "target", "What the quantized drafter copies; draft: the draft that is called small_model."
    )
    prefix_layers: str | None = described(
        None,
        "Layers of the target for the prefix_layers drafter: how many of the first "
        "(3), or which (0,1,4,5).",
    )
    num_threads: int | None = described(
        None, "CPU threads of the model; default: torch's choice.", ge=1
    )
    trust_remote_code: bool = described(
        False, "Run Python code that comes with a model on the hub."
    )
    revision: str | None = described(None, "Branch, tag or commit of the model on the hub.")
    check_integrity: bool = False
    promised_bytes: int = 0
    """Bytes of the memory free at start that other engines on this host will still take."""

    def __post_init__(self) -> None:
        check_ranges(type(self), {each.name: getattr(self, each.name) for each in fields(self)})
        if self.model == "":
            raise ValueError("model: an empty name is none")
        if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", self.device):
            raise ValueError(f"device: {self.device!r} is none of cpu, cuda and cuda:N")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                "max_num_batched_tokens must not be below max_num_seqs: each needs a row per step"
            )
        if self.tensor_parallel_size > 1:
            self._check_with_ranks()
        self._check_kv_events()
        self._check_offload()

    @property
    def served_model(self) -> str:
        """Name, folder, file or hub id of the model."""
        return self.model or BUNDLED_MODEL

    @property
    def is_bundled(self) -> bool:
        """Whether the model served is the one that comes with Slipstream."""
        return self.served_model == BUNDLED_MODEL

    @property
    def model_name(self) -> str:
        """The engine's name for the model."""
        return BUNDLED_NAME if self.is_bundled else called(self.served_model)

    def _check_kv_events(self) -> None:
        """Raises ValueError naming a setting of KV events that cannot be or is without effect."""
        for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            given = getattr(self, name)
            if given is None:
                continue
            found = re.fullmatch(r"tcp://[^/]+:(\d{1,5})|ipc://.+", given)
            # ZeroMQ takes a port that is too large modulo 65536.
            if found is None or int(found[1] or 0) > 65535:
                raise ValueError(f"{name}: {given!r} is not tcp://HOST:PORT, HOST * to listen")
        if self.kv_events_endpoint is None:
            for name in ("kv_events_replay_endpoint", "kv_events_topic", "kv_events_salted"):
                if getattr(self, name):
                    raise ValueError(f"{name} is without effect: there is no kv_events_endpoint")
            return
        if not self.enable_prefix_cache:
            raise ValueError("kv_events_endpoint: there is no prefix cache to tell of")
        if not re.fullmatch(r"[^@]+@[^@]+@[^@]+", self.kv_events_topic or ""):
            raise ValueError("kv_events_topic: kv_events_endpoint needs one, kv@POD@MODEL")

    def _check_offload(self) -> None:
        """Raises ValueError naming a setting of the offload that is without effect."""
        if self.kv_offload_bytes is None and self.kv_offload_file is not None:
            raise ValueError("kv_offload_file: say by kv_offload_bytes how large it may be")
        if self.kv_offload_bytes is not None and not self.enable_prefix_cache:
            raise ValueError("kv_offload_bytes: there is no prefix cache whose blocks to keep")

    def _check_with_ranks(self) -> None:
        """Raises ValueError naming a setting that needs the whole model in one process."""
        at_odds = {
            "device": self.device not in ("cpu", "cuda"),
            "quantization": self.quantization in ("int8", "int4"),
            "determinism": self.determinism == "exact",
            "quantized": self.quantized is not None and self.quantized_model == "target",
            "cuda_graph_rows": bool(self.cuda_graph_rows),
            "prefix_layers": self.prefix_layers is not None,
            "lora": bool(self.lora),
            "kv_offload_bytes": self.kv_offload_bytes is not None,
        }
        for name, reason in _AT_ODDS_WITH_RANKS.items():
            if at_odds[name]:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, which tensor_parallel_size > 1 rules out: {reason}"
                )


_AT_ODDS_WITH_RANKS = {
    "device": "each rank takes its own; say cpu or cuda",
    "quantization": "products in few bits join layers that ranks divide",
    "determinism": "the row counts of a rank's part of a product are not held to those of equal bits",
    "quantized": "a rank has no whole model to copy; quantized_model=draft copies the draft",
    "cuda_graph_rows": "forwards that wait for other ranks are not captured",
    "kv_offload_bytes": "each rank has a part of every block, and no rank copies another's",
    "prefix_layers": "its layers are divided among ranks, and drafts are made by one of them",
    "lora": "an adapter is not divided among ranks as the layers are",
}
