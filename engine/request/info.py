"""Facts of a built engine; the server shows them and validates against them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from drafters.base import DrafterInfo
from engine.request.params import Pooling

Determinism = Literal["exact", "fast"]
"""Whether a row's bits depend on what is computed beside it: under "exact" they do not."""
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The sampling parameters for which models may bring defaults."""


@dataclass(frozen=True, slots=True)
class QuantizationInfo:
    """The quantized part of a model. ``method``: the checkpoint's format, or "int8" or "int4" if
    rounded. ``source``: "checkpoint", or "start": rounded when the model was loaded. ``bits``: per
    weight, on average, without scales; ``activation_bits``: of the inputs. ``schemes``: number of
    weights by description of their codes and scales. ``num_quantized`` of ``num_parameters`` weights,
    in ``num_layers`` linear layers; ``num_bytes``: of all weights as they are held. ``head``: whether
    the output head is quantized."""

    method: str
    source: Literal["checkpoint", "start"]
    bits: float
    activation_bits: int
    schemes: Mapping[str, int]
    num_layers: int
    num_quantized: int
    num_parameters: int
    num_bytes: int
    head: bool

    @property
    def share(self) -> float:
        """Share of the parameters that are quantised."""
        return self.num_quantized / self.num_parameters


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """A model or heads that draft for the target. ``name``: of their drafter; ``method``: the drafter of
    the core that it is one of; ``path``: where they came from. ``hidden_layers``: the target's states
    that they read, as in ``InputBatch``. ``agreement``: the share of its tokens at the check at start
    that the target would have written itself, 0 to 1; None: not checked. ``note``: what that check
    found besides."""

    name: str
    method: str
    path: str
    num_parameters: int
    hidden_layers: tuple[int, ...] = ()
    agreement: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter of low rank that requests may have. ``path``: of its folder; ``digest``: of what it
    adds to the model, SHA-256; ``rank``: the highest of its ``num_layers`` layers; ``num_bytes``: in
    memory; ``base_model``: what its folder says that it was made for."""

    name: str
    path: str
    digest: str
    rank: int
    num_layers: int
    num_parameters: int
    num_bytes: int
    base_model: str | None


@dataclass(frozen=True, slots=True)
class StatesInfo:
    """Room for the states of a model's layers. ``num_seats``: requests that may run at a time;
    ``num_snapshots``: states that are kept for others, beside theirs; ``bytes_per_slot``: of one of
    either; ``snapshot_tokens``: from one to the next within a long prompt."""

    num_seats: int
    num_snapshots: int
    bytes_per_slot: int
    snapshot_tokens: int

    @property
    def num_slots(self) -> int:
        return self.num_seats + self.num_snapshots


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """``max_model_len`` counts prompt plus output tokens. ``max_num_open``: requests that run or wait
    at a time. ``exact_verified``: whether the start-up probe found bit-identical results (None: not
    probed, or no room to complete it); ``exact_probed``: what it compared, ``exact_failed``: what
    differed. ``unserved``: the checkpoint's parts other than text, as "vision". ``drafts``: the
    setting's drafts, for drafters with a model or heads. ``adapters``: the loaded ones; None:
    unsupported. ``architecture``: the model's kind in its configuration's word, as "llama";
    ``hidden_size``: features of a hidden state; ``embeddings``: how states are pooled, if requests may
    ask for that. ``sampling_defaults``: ``SAMPLED`` parameters from the model's files, unchecked.
    ``states``: None if the model's layers keep none. ``kv_bytes``: size of keys and values, including
    drafts', once all of their memory has been used."""

    model: str
    vocab_size: int
    max_model_len: int
    max_num_nodes: int
    eos_token_ids: tuple[int, ...]
    drafters: Mapping[str, DrafterInfo]
    device: str
    dtype: str
    num_blocks: int
    block_size: int
    max_num_open: int
    num_parameters: int
    determinism: Determinism
    attention_backend: str
    exact_verified: bool | None
    exact_probed: tuple[str, ...] = ()
    exact_failed: tuple[str, ...] = ()
    quantization: QuantizationInfo | None = None
    tensor_parallel_size: int = 1
    unserved: tuple[str, ...] = ()
    drafts: Mapping[str, DraftInfo] = field(default_factory=dict)
    adapters: tuple[AdapterInfo, ...] | None = None
    architecture: str = ""
    hidden_size: int = 0
    embeddings: Pooling = "none"
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    states: StatesInfo | None = None
    kv_bytes: int = 0
