"""The draft-verify module's configuration: every field has an effect or is refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from engine.config import EngineConfig
from slipstream.speculative_config import SpeculativeConfig

# field -> a value other than the default, what else it takes, and where it has its effect.
EFFECTIVE: dict[str, tuple[Any, dict[str, Any], str]] = {
    "draft_strategy": ("ngram", {}, "params"),
    "draft_model_path": ("some/folder", {}, "engine"),
    "draft_quant_dtype": ("int4", {"draft_strategy": "quantized"}, "engine"),
    "num_speculative_tokens": (5, {}, "params"),
    "max_speculative_tokens": (6, {}, "params"),
    "min_speculative_tokens": (1, {}, "params"),
    "adaptive_depth": (False, {}, "params"),
    "target_acceptance_rate": (0.5, {}, "params"),
    "tree_strategy": ("tree", {}, "params"),
    "tree_width": (4, {"tree_strategy": "tree"}, "params"),
    "tree_depth": (5, {"tree_strategy": "tree"}, "params"),
    "kv_compression": (True, {}, "engine"),
    "temperature": (0.5, {}, "sampling"),
    "top_p": (0.9, {}, "sampling"),
}
REFUSED = {
    "share_kv_cache": False,
    "reuse_draft_kv": False,
    "verify_in_parallel": False,
    "early_rejection": False,
    "prefill_with_verify": False,
    "fuse_draft_verify": True,
}
# tests/slipstream/test_speculative_decoder.py
IN_THE_REPORT = {"log_acceptance_rate", "log_speedup"}


def seen(config: SpeculativeConfig) -> dict[str, object]:
    return {
        "engine": config.engine_config("target", EngineConfig()),
        "params": config.speculative_params(),
        "sampling": config.sampling_params(10, 0),
    }


def test_every_field_is_listed_here() -> None:
    names = {field.name for field in fields(SpeculativeConfig)}
    own_tests = {"draft_num_layers", "use_cuda_graph"}
    assert names == set(EFFECTIVE) | set(REFUSED) | IN_THE_REPORT | own_tests


def test_graphs_are_captured_where_they_are_asked_for_and_can_be_had() -> None:
    on_gpu = EngineConfig(device="cuda:1")
    assert SpeculativeConfig(use_cuda_graph=True).engine_config("t", on_gpu).cuda_graph_rows == 256
    assert SpeculativeConfig().engine_config("t", on_gpu).cuda_graph_rows == 0
    with pytest.raises(ValueError, match="use_cuda_graph needs a CUDA device"):
        SpeculativeConfig(use_cuda_graph=True).engine_config("t", EngineConfig())


@pytest.mark.parametrize("name", EFFECTIVE)
def test_a_field_changes_what_it_should(name: str) -> None:
    value, others, where = EFFECTIVE[name]
    without = SpeculativeConfig(**others)
    changed = SpeculativeConfig(**others, **{name: value})
    assert seen(changed)[where] != seen(without)[where]


def test_the_number_of_layers_says_what_is_loaded() -> None:
    config = SpeculativeConfig(draft_strategy="prefix_layers", draft_num_layers=3)
    assert config.engine_config("target", EngineConfig()).prefix_layers == "3"


def test_a_quantised_copy_is_one_of_the_target_or_of_a_small_model() -> None:
    config = SpeculativeConfig(draft_strategy="quantized")
    assert config.engine_config("t", EngineConfig()).quantized == "int8"
    assert config.engine_config("t", EngineConfig()).quantized_model == "target"
    config = SpeculativeConfig(draft_strategy="quantized", draft_model_path="small")
    assert config.engine_config("t", EngineConfig()).quantized_model == "draft"


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_have_no_effect_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=.* is not supported: "):
        SpeculativeConfig(**{name: REFUSED[name]})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_speculative_tokens": 9}, "num_speculative_tokens 9 must lie between"),
        ({"min_speculative_tokens": -1}, "negative"),
        ({"target_acceptance_rate": 1.0}, "target_acceptance_rate"),
        ({"tree_strategy": "star"}, "tree_strategy"),
        ({"tree_width": 0}, "tree_width"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"draft_strategy": "ngram", "draft_model_path": "x"}, "draft_model_path has no effect"),
        ({"draft_num_layers": 2}, "draft_num_layers has no effect"),
        ({"draft_quant_dtype": "int8"}, "draft_quant_dtype has no effect"),
        ({"draft_strategy": "quantized", "kv_compression": True}, "kv_compression"),
        ({"draft_strategy": "prefix_layers", "draft_num_layers": 0}, "draft_num_layers"),
        ({"draft_strategy": "prefix_layers"}, "draft_num_layers"),
        ({"draft_strategy": "quantized", "draft_quant_dtype": "int3"}, "draft_quant_dtype"),
    ],
)
def test_impossible_values_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**values)


def node(**speculative: Any) -> dict[str, Any]:
    return {"type": "decode_speculative", "config": {"speculative": speculative}}


def test_a_schedulers_node_becomes_a_config() -> None:
    asked = {"draft_model": "small/folder", "num_tokens": 12, "adaptive": False}
    config = SpeculativeConfig.from_node(node(**asked))
    assert (config.draft_strategy, config.draft_model_path) == ("small_model", "small/folder")
    params = config.speculative_params()
    assert (params.num_speculative_tokens, params.adaptive_depth) == (12, "fixed")
    assert SpeculativeConfig.from_node(node()).draft_strategy == "ngram"
    assert SpeculativeConfig.from_node(node(num_tokens=12)).max_speculative_tokens == 12


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "decode"}, "type must be"),
        ({"type": "decode_speculative"}, "config must be an object"),
        ({"type": "decode_speculative", "config": {}}, "config.speculative must be an object"),
        ({"type": "decode_speculative", "config": {"other": 1}}, "config.other is not known"),
        (node(depth=3), "config.speculative.depth is not known"),
        (node(num_tokens=3, num_speculative_tokens=3), "a second time"),
        (node() | {"x": 1}, "x is not known"),
    ],
)
def test_a_node_that_says_something_else_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.from_node(given)
