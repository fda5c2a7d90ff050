"""Tiny checkpoints in few bits as an engine serves them, with drafts of every published kind, and what
they have to write."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from engine.build import build_engine_for
from engine.config import EngineConfig
from engine.drafting.facts import TargetFacts, target_facts
from engine.model.loader import load_model
from engine.request.params import SamplingParams
from worlds.built_engine import BuiltEngine
from worlds.engine_harness import drafting, request
from worlds.published_blocks import LAYER_CONFIG, SPECULATORS, block_tensors
from worlds.published_eagle3 import IDS, Form, write_folder, written
from worlds.situations import SITUATIONS, Signature, partly_right, plain, signature
from worlds.tiny_models import random_ids

_NUM_TOKENS = 20
_GREEDY = SamplingParams(_NUM_TOKENS, temperature=0.0, logprobs=0, ignore_eos=True)
_SAMPLINGS = (_GREEDY, replace(_GREEDY, temperature=0.8))
_HEADS = ("eagle3", "p_eagle", "dflash")
_SPECULATIONS = [
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
_USUAL = EngineConfig(
    dtype="auto", num_blocks=192, max_num_seqs=24, max_num_batched_tokens=128, prefix_layers="1"
)


class PackedTarget(BuiltEngine):
    """A tiny checkpoint as an engine serves it, with another of the same as its draft model."""

    def __init__(self, path: Path, keeps_inputs: bool, device: torch.device) -> None:
        model = load_model(str(path), device)
        with TemporaryDirectory() as heads:
            config = replace(
                _USUAL,
                device=str(device),
                determinism="exact",
                draft=(str(path), *random_heads(Path(heads), target_facts(model))),
                quantize_activations=not keeps_inputs,
                num_threads=1,
            )
            engine = build_engine_for(model, None, config)
        super().__init__(engine, max_num_seqs=24, max_num_batched_tokens=128, prefill_chunk=64)
        self.prompts = [random_ids(seed, 40) * 2 for seed in range(2)]

    @cached_property
    def expected(self) -> list[Signature]:
        """The texts of all prompts, written alone and without drafts."""
        found = []
        for index, (prompt, sampling) in enumerate(zip(self.prompts, _SAMPLINGS, strict=True)):
            each = request("plain", prompt, replace(sampling, seed=index))
            found.append(signature(plain(self, each), "plain"))
        return found


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


def check_no_bit_changes(target: PackedTarget, situation: str) -> None:
    """Checks that drafts of all kinds, accepted and refused ones, change no bit."""
    requests = []
    for index, way in enumerate(_SPECULATIONS):
        at = index // 2 % 2
        each = request(
            f"r{index}",
            target.prompts[at],
            replace(_SAMPLINGS[at], seed=at),
            way,
            prediction=partly_right([token for token, _ in target.expected[at]]),
        )
        requests.append(each)
    driver = SITUATIONS[situation](target, requests)
    for index, each in enumerate(requests):
        expected = target.expected[index // 2 % 2]
        assert len(expected) == _NUM_TOKENS
        assert signature(driver, each.request_id) == expected, each.speculative
    for head in _HEADS:
        (own,) = (each for each in requests if each.speculative.draft_strategy == head)
        assert driver.finishes[own.request_id].speculative.num_draft_tokens > 0
    accounts = [driver.finishes[each.request_id].speculative for each in requests]
    num_accepted = sum(account.num_accepted_tokens for account in accounts)
    assert sum(account.num_draft_tokens for account in accounts) > num_accepted > _NUM_TOKENS
