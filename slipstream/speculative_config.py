"""``SpeculativeConfig``: the draft-verify module's own way of asking for speculation.

Every field has an effect, or a value of it is refused with the reason: docs/draft_verify.md lists
which. ``engine_config`` says what to load, ``speculative_params`` how to draft, ``sampling_params``
how to choose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from drafters.options import FIXED_POLICY, NO_DRAFTER, SpeculativeParams, TreeStrategy, check_ranges
from engine.config import USUAL_GRAPH_ROWS, EngineConfig, Quantization
from engine.request.params import SamplingParams

_REFUSED: dict[tuple[str, Any], str] = {
    ("share_kv_cache", False): (
        "drafter and target always share blocks and prefix cache, and their keys and values where "
        "they have the same weights"
    ),
    ("reuse_draft_kv", False): (
        "a drafter's keys and values of accepted tokens are always kept in its own store, and the "
        "target's are always the target's"
    ),
    ("verify_in_parallel", False): "all drafts of a step are verified in one forward",
    (
        "early_rejection",
        False,
    ): "what follows a rejected token is never accepted: it would not be lossless",
    (
        "prefill_with_verify",
        False,
    ): "prompts always go through the target, which has to answer for them",
    ("fuse_draft_verify", True): "a draft has to be there before it can be verified",
}
_MODELS = ("small_model", "quantized")
_USUAL_QUANT_DTYPE = "int8"
_NODE_TYPE = "decode_speculative"
_NODE_NAMES = {
    "draft_model": "draft_model_path",
    "num_tokens": "num_speculative_tokens",
    "adaptive": "adaptive_depth",
    "strategy": "draft_strategy",
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """Names and defaults are the module's. Raises ValueError naming the field at fault.

    ``draft_strategy`` is any drafter of this engine. ``quantized`` copies the target, or the model at
    ``draft_model_path``, in ``draft_quant_dtype`` (default int8). ``adaptive_depth`` moves gamma within
    ``min_speculative_tokens``..``max_speculative_tokens`` around ``target_acceptance_rate``, from
    ``num_speculative_tokens``; without it gamma is ``num_speculative_tokens``.
    """

    draft_strategy: str = "small_model"
    draft_model_path: str | None = None
    draft_num_layers: int | None = None
    draft_quant_dtype: str | None = None

    num_speculative_tokens: int = 4
    max_speculative_tokens: int = 8
    min_speculative_tokens: int = 2
    adaptive_depth: bool = True
    target_acceptance_rate: float = 0.7

    tree_strategy: TreeStrategy = "none"
    tree_width: int = 2
    tree_depth: int = 3

    share_kv_cache: bool = True
    reuse_draft_kv: bool = True
    kv_compression: bool = False

    verify_in_parallel: bool = True
    early_rejection: bool = True
    temperature: float = 1.0
    top_p: float = 1.0

    prefill_with_verify: bool = True
    fuse_draft_verify: bool = False
    use_cuda_graph: bool = False

    log_acceptance_rate: bool = True
    log_speedup: bool = True

    def __post_init__(self) -> None:
        for (name, value), reason in _REFUSED.items():
            if getattr(self, name) == value:
                raise ValueError(f"{name}={value} is not supported: {reason}")
        self._check_ranges()
        self._check_draft_model()

    @classmethod
    def from_node(cls, node: Mapping[str, Any]) -> SpeculativeConfig:
        """From a scheduler's node ``{"type": "decode_speculative", "config": {"speculative": {..}}}``.

        The inner object takes this class's fields and the node's own short names (``draft_model``,
        ``num_tokens``, ``adaptive``, ``strategy``). Without a strategy, a draft model means
        ``small_model`` and none means ``ngram``. Raises ValueError naming what does not belong.
        """
        if node.get("type") != _NODE_TYPE:
            raise ValueError(f"type must be {_NODE_TYPE!r}, not {node.get('type')!r}")
        _refuse_unknown("", node, {"type", "config"})
        config = _mapping("config", node.get("config"))
        _refuse_unknown("config.", config, {"speculative"})
        given = _mapping("config.speculative", config.get("speculative"))
        known = {field.name for field in fields(cls)}
        _refuse_unknown("config.speculative.", given, known | set(_NODE_NAMES))
        values: dict[str, Any] = {}
        for name, value in given.items():
            field = _NODE_NAMES.get(name, name)
            if field in values:
                raise ValueError(f"config.speculative.{name} says {field} a second time")
            values[field] = value
        has_model = values.get("draft_model_path") is not None
        values.setdefault("draft_strategy", "small_model" if has_model else "ngram")
        # A depth that was not given gives way to the one that was.
        depth = values.get("num_speculative_tokens", cls.num_speculative_tokens)
        if isinstance(depth, int):
            values.setdefault("min_speculative_tokens", min(cls.min_speculative_tokens, depth))
            values.setdefault("max_speculative_tokens", max(cls.max_speculative_tokens, depth))
        return cls(**values)

    def engine_config(self, verify_model_path: str, base: EngineConfig) -> EngineConfig:
        """``base`` with the target and what the drafter needs loaded. Raises ValueError for graphs
        without a device that has them."""
        if self.use_cuda_graph and not base.device.startswith("cuda"):
            raise ValueError(
                f"use_cuda_graph needs a CUDA device, and this engine's is {base.device}"
            )
        graph_rows = (base.cuda_graph_rows or USUAL_GRAPH_ROWS) if self.use_cuda_graph else 0
        changes: dict[str, Any] = {
            "model": verify_model_path,
            "cuda_graph_rows": graph_rows,
            "drafters": tuple(dict.fromkeys((NO_DRAFTER, self.draft_strategy))),
        }
        if self.draft_strategy in _MODELS and self.draft_model_path is not None:
            changes["draft"] = (f"small_model={self.draft_model_path}",)
        if self.draft_strategy == "quantized":
            changes["quantized"] = self.draft_quant_dtype or _USUAL_QUANT_DTYPE
            changes["quantized_model"] = "target" if self.draft_model_path is None else "draft"
        if self.draft_num_layers is not None:
            changes["prefix_layers"] = str(self.draft_num_layers)
        if self.kv_compression:
            changes["draft_kv_dtype"] = "fp8"
        return replace(base, **changes)

    def speculative_params(self, depth: int | None = None) -> SpeculativeParams:
        """``depth`` replaces ``num_speculative_tokens``."""
        given = self._options()
        num = given["num_speculative_tokens"] if depth is None else depth
        given |= {"num_speculative_tokens": num, "adaptive_depth": "target_rate"}
        if not self.adaptive_depth:
            given |= {
                "adaptive_depth": FIXED_POLICY,
                "min_speculative_tokens": 0,
                "max_speculative_tokens": num,
                "target_acceptance_rate": None,
            }
        return SpeculativeParams(**given)

    def _options(self) -> dict[str, Any]:
        """The fields that a request's ``speculative`` object has, too."""
        shared = {field.name for field in fields(SpeculativeParams)}
        return {
            field.name: getattr(self, field.name) for field in fields(self) if field.name in shared
        }

    def sampling_params(self, max_new_tokens: int, seed: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_new_tokens, temperature=self.temperature, top_p=self.top_p, seed=seed
        )

    def _check_ranges(self) -> None:
        check_ranges(SpeculativeParams, self._options())
        low, num, high = (
            self.min_speculative_tokens,
            self.num_speculative_tokens,
            self.max_speculative_tokens,
        )
        if self.adaptive_depth and not low <= num <= high:
            raise ValueError(
                f"num_speculative_tokens {num} must lie between min_speculative_tokens {low} "
                f"and max_speculative_tokens {high}"
            )
        if not 0 <= self.temperature < math.inf:
            raise ValueError("temperature must be a number from 0")
        if not 0 < self.top_p <= 1:
            raise ValueError("top_p must be above 0 and at most 1")

    def _check_draft_model(self) -> None:
        """Fields of one strategy are refused under another, where they could have no effect."""
        strategy = self.draft_strategy
        for name, takers in (
            ("draft_model_path", _MODELS),
            ("draft_num_layers", ("prefix_layers",)),
            ("draft_quant_dtype", ("quantized",)),
        ):
            if getattr(self, name) is not None and strategy not in takers:
                raise ValueError(f"{name} has no effect with draft_strategy {strategy!r}")
        if self.kv_compression and strategy != "small_model":
            raise ValueError(
                "kv_compression needs draft_strategy 'small_model': only that has a store of its own"
            )
        if self.draft_quant_dtype not in (None, *get_args(Quantization)):
            known = ", ".join(get_args(Quantization))
            raise ValueError(f"draft_quant_dtype must be one of: {known}")
        if strategy == "prefix_layers" and (self.draft_num_layers or 0) < 1:
            raise ValueError("draft_strategy 'prefix_layers' needs draft_num_layers of at least 1")


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object")
    return value


def _refuse_unknown(prefix: str, given: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(
            f"{prefix}{unknown[0]} is not known; there are: {', '.join(sorted(known))}"
        )
