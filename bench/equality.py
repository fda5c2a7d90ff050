"""Does speculation leave every token as it was? Compared stream by stream against gamma 0.

Tiny random models in fp32 must agree everywhere. In bf16 a device's kernels may pick other bits for
other row counts, so there the share of equal streams is a finding and not a failure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bench.models import core_of
from engine.build import build_engine_for
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model.loader import prepare_model
from engine.request.events import TokenEvent
from engine.request.params import PLAIN, GenerationRequest, SamplingParams, SpeculativeParams

_VOCAB_SIZE = 48
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # Large enough for logits that differ clearly: random models write near-ties otherwise.
    "initializer_range": 0.3,
}


@dataclass(frozen=True, slots=True)
class EqualityResult:
    """``num_accepted_tokens`` of 0 would mean that nothing was tested."""

    model: str
    drafter: str
    sampling: str
    batch_size: int
    num_streams: int
    num_equal: int
    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def holds(self) -> bool:
        return self.num_equal == self.num_streams


SPECULATIONS: Mapping[str, SpeculativeParams] = {
    "ngram, goodput": SpeculativeParams(draft_strategy="ngram"),
    "ngram, chain of 4": SpeculativeParams(
        draft_strategy="ngram", adaptive_depth="fixed", num_speculative_tokens=4
    ),
    "ngram, tree of 8": SpeculativeParams(
        draft_strategy="ngram",
        adaptive_depth="fixed",
        num_speculative_tokens=8,
        tree_strategy="tree",
        tree_width=2,
        tree_depth=16,
    ),
    "nasd, chain of 6": SpeculativeParams(
        draft_strategy="nasd", adaptive_depth="fixed", num_speculative_tokens=6
    ),
    "nasd, tree of 12": SpeculativeParams(
        draft_strategy="nasd",
        adaptive_depth="fixed",
        num_speculative_tokens=12,
        tree_strategy="tree",
        tree_width=3,
        tree_depth=16,
    ),
}
"""A tree and a chain of each drafter, fixed so that rejections are met too."""

TINY_SAMPLINGS: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "T 0.7, top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "T 1.3": SamplingParams(temperature=1.3),
}


_TINY: Mapping[str, Callable[[], PreTrainedModel]] = {
    "tiny Llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES | {"head_dim": 64})),
    "tiny Qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES)),
    "tiny Gemma-2": lambda: Gemma2ForCausalLM(Gemma2Config(**_SIZES, sliding_window=24)),
}
TINY_MODELS = tuple(_TINY)


def tiny_models(
    names: Sequence[str] = TINY_MODELS,
) -> Iterator[tuple[str, PreTrainedModel]]:
    """Random weights, the same ones every time: plain, with query norms, and with sliding windows
    and soft caps."""
    for name in names:
        torch.manual_seed(11)
        yield name, _TINY[name]()


def check_tiny_models(
    device: torch.device,
    num_new_tokens: int,
    backend: str | None = None,
    models: Sequence[str] = TINY_MODELS,
    samplings: Sequence[str] = tuple(TINY_SAMPLINGS),
) -> list[EqualityResult]:
    """Every speculation against gamma 0 in fp32, alone and several at a time. ``backend``: of
    attention; None: the device's best."""
    results = []
    for name, model in tiny_models(models):
        core = _tiny_core(model, device, backend)
        for sampling in samplings:
            for batch_size in (1, 4):
                named = (sampling, TINY_SAMPLINGS[sampling])
                results += compare(
                    core, name, named, repetitive_prompts(batch_size), num_new_tokens
                )
    return results


def _tiny_core(model: PreTrainedModel, device: torch.device, backend: str | None) -> EngineCore:
    config = EngineConfig(
        device=str(device),
        attention_backend=backend,
        num_blocks=256,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        prefill_chunk=32,
        # fp32 kernels offer no equal bits for all row counts; tokens have to be equal all the same.
        determinism="fast",
        enable_prefix_cache=False,
        check_integrity=True,
    )
    return core_of(build_engine_for(prepare_model(model.float(), device), None, config))


def repetitive_prompts(count: int) -> list[tuple[int, ...]]:
    """A few phrases over and over, so that drafters find what to copy; every length different."""
    rng = random.Random(5)
    prompts = []
    for index in range(count):
        phrases = [[rng.randrange(_VOCAB_SIZE) for _ in range(6)] for _ in range(3)]
        tokens = [token for _ in range(6) for token in rng.choice(phrases)]
        prompts.append(tuple(tokens[: 25 + 3 * index]))
    return prompts


def compare(
    core: EngineCore,
    model: str,
    named_sampling: tuple[str, SamplingParams],
    prompts: Sequence[tuple[int, ...]],
    num_new_tokens: int,
    speculations: Mapping[str, SpeculativeParams] = SPECULATIONS,
) -> list[EqualityResult]:
    """Gamma 0's streams once, then every speculation's against them.

    The reference runs each prompt alone; what is compared runs all prompts in one batch.
    """
    sampling_name, sampling = named_sampling
    expected: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        alone = {index: (prompt, PLAIN)}
        expected |= _streams(core, alone, sampling, num_new_tokens).token_ids
    results = []
    for name, speculative in speculations.items():
        batch = {index: (prompt, speculative) for index, prompt in enumerate(prompts)}
        written = _streams(core, batch, sampling, num_new_tokens)
        results.append(
            EqualityResult(
                model=model,
                drafter=name,
                sampling=sampling_name,
                batch_size=len(prompts),
                num_streams=len(prompts),
                num_equal=sum(written.token_ids[i] == expected[i] for i in expected),
                num_draft_tokens=written.num_draft_tokens,
                num_accepted_tokens=written.num_accepted_tokens,
            )
        )
    return results


@dataclass(slots=True)
class _Written:
    token_ids: dict[int, list[int]]
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


def _streams(
    core: EngineCore,
    batch: Mapping[int, tuple[tuple[int, ...], SpeculativeParams]],
    sampling: SamplingParams,
    num_new_tokens: int,
) -> _Written:
    for index, (prompt, speculative) in batch.items():
        params = SamplingParams(
            max_tokens=num_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            ignore_eos=True,
            seed=100 + index,
        )
        core.submit(core.prepare(GenerationRequest(str(index), prompt, params, speculative)))
    written = _Written({index: [] for index in batch})
    while core.has_work:
        for event in core.step().events:
            if not isinstance(event, TokenEvent):
                raise RuntimeError(f"a request failed: {event}")
            written.token_ids[int(event.request_id)].extend(event.token_ids)
            if event.finish is not None:
                written.num_draft_tokens += event.finish.speculative.num_draft_tokens
                written.num_accepted_tokens += event.finish.speculative.num_accepted_tokens
    return written
