"""Promise 1 in the bits that checkpoints bring: every format, loaded and built as it is served, writes
the bits that it writes alone without drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from engine.build import build_engine_for
from engine.config import EngineConfig
from engine.drafting.facts import TargetFacts, target_facts
from engine.kernels.integers import can_multiply
from engine.model.loader import load_model
from engine.request.params import SamplingParams
from worlds.built_engine import BuiltEngine
from worlds.engine_harness import drafting, request
from worlds.packed_models import FLOATS, FORMATS
from worlds.published_blocks import LAYER_CONFIG, SPECULATORS, block_tensors
from worlds.published_eagle3 import IDS, Form, write_folder, written
from worlds.situations import SITUATIONS, Signature, partly_right, plain, signature
from worlds.tiny_models import CPU, random_ids

pytestmark = pytest.mark.skipif(not can_multiply(), reason="this CPU has no AVX2")

NUM_TOKENS = 20
GREEDY = SamplingParams(NUM_TOKENS, temperature=0.0, logprobs=0, ignore_eos=True)
SAMPLINGS = (GREEDY, replace(GREEDY, temperature=0.8))
HEADS = ("eagle3", "p_eagle", "dflash")
SPECULATIONS = [
    drafting("prediction", num_tokens=8),
    drafting("small_model", num_tokens=4),
    drafting("small_model", num_tokens=6, width=3),
    drafting("prefix_layers", num_tokens=3),
    drafting("recycling", num_tokens=8, width=3),
    drafting("prediction", num_tokens=3),
    drafting("ngram", "goodput", num_tokens=6, width=2),
    drafting("small_model", "target_rate", num_tokens=4, width=2),
    drafting("eagle3", num_tokens=6, width=3, min_confidence=0.0),
    drafting("p_eagle", num_tokens=4, min_confidence=0.0),
    drafting("dflash", num_tokens=6, width=2, min_confidence=0.0),
]
USUAL = EngineConfig(
    dtype="auto",
    num_blocks=192,
    max_num_seqs=24,
    max_num_batched_tokens=128,
    prefix_layers="1",
)


class PackedTarget(BuiltEngine):
    """A tiny checkpoint as an engine serves it, with another of the same as its draft model."""

    def __init__(self, path: Path, keeps_inputs: bool) -> None:
        model = load_model(str(path), CPU)
        with TemporaryDirectory() as heads:
            config = replace(
                USUAL,
                draft=(str(path), *random_heads(Path(heads), target_facts(model))),
                quantize_activations=not keeps_inputs,
                num_threads=1,
            )
            engine = build_engine_for(model, None, config)
        super().__init__(engine, max_num_seqs=24, max_num_batched_tokens=128, prefill_chunk=64)
        self.prompts = [random_ids(seed, 40) * 2 for seed in range(2)]


def random_heads(root: Path, facts: TargetFacts) -> list[str]:
    """Writes folders for a target of any size. Their layers get its few bits, and its head is theirs."""
    own: dict[str, Any] = {"facts": facts, "hidden_size": facts.hidden_size, "head_dim": 16}
    sizes = {**own, "draft_vocab": facts.vocab_size, "owns_head": False, "num_states": 2}
    forms = {
        "eagle3": Form(**sizes, more={IDS: [0, 2]}),
        "p_eagle": Form(
            **sizes, method="peagle", prefix="layers.0.", more={IDS: [0, 2], "mask_token_id": 7}
        ),
    }
    folders = [written(root / name, form) for name, form in forms.items()]
    layers = LAYER_CONFIG | {"hidden_size": facts.hidden_size, "vocab_size": facts.vocab_size}
    config = SPECULATORS | {
        "transformer_layer_config": layers,
        "draft_vocab_size": facts.vocab_size,
        "aux_hidden_state_layer_ids": [0, 2],
        "mask_token_id": 7,
    }
    tensors = block_tensors(num_states=2, size=facts.hidden_size)
    folders.append(write_folder(root / "dflash", config, tensors, False))
    return [str(folder) for folder in folders]


@cache
def target_of(path: Path, keeps_inputs: bool) -> PackedTarget:
    torch.set_num_threads(1)
    return PackedTarget(path, keeps_inputs)


@cache
def expected_of(target: PackedTarget, index: int) -> Signature:
    each = request("plain", target.prompts[index], replace(SAMPLINGS[index], seed=index))
    return signature(plain(target, each), "plain")


@pytest.fixture(scope="module", params=FORMATS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    write: Callable[[Path], Path] = FORMATS[request.param]
    return write(tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=[False, True], ids=["rounded", "kept"])
def target(request: pytest.FixtureRequest, path: Path) -> PackedTarget:
    return target_of(path, request.param)


def test_weights_keep_their_bits(target: PackedTarget, request: pytest.FixtureRequest) -> None:
    is_packed = request.node.callspec.params["path"] not in FLOATS
    assert (target.info.quantization is not None) == is_packed


@pytest.mark.parametrize("situation", ["mixed_batch", "prefix_hit", "preempted"])
def test_drafting_changes_no_bit(target: PackedTarget, situation: str) -> None:
    requests = []
    for index, way in enumerate(SPECULATIONS):
        at = index // 2 % 2
        expected = expected_of(target, at)
        each = request(
            f"r{index}",
            target.prompts[at],
            replace(SAMPLINGS[at], seed=at),
            way,
            prediction=partly_right([token for token, _ in expected]),
        )
        requests.append(each)
    driver = SITUATIONS[situation](target, requests)
    for index, each in enumerate(requests):
        expected = expected_of(target, index // 2 % 2)
        assert len(expected) == NUM_TOKENS
        assert signature(driver, each.request_id) == expected, each.speculative
    for head in HEADS:
        (own,) = (each for each in requests if each.speculative.draft_strategy == head)
        assert driver.finishes[own.request_id].speculative.num_draft_tokens > 0
    accounts = [driver.finishes[each.request_id].speculative for each in requests]
    num_accepted = sum(account.num_accepted_tokens for account in accounts)
    assert sum(account.num_draft_tokens for account in accounts) > num_accepted > NUM_TOKENS
