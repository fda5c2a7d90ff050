"""Promise 1, in bf16 and in 8 bits on the bundled model: exact mode holds to the bit.

Not only tokens are compared but the bits of their log-probabilities: a row that was computed in
another way than alone would show long before it changes a token. Prompts ask for edits, so that
drafts come true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from engine.attention.backend import AttentionNeeds, build_attention
from engine.core import EngineCore
from engine.grammar.compiler import GrammarCompiler
from engine.machine import can_pack
from engine.model.linear import pack_linears
from engine.model.loader import BUNDLED, attach_attention, load_model, load_tokenizer
from engine.model.quantization import quantize_model, refusal
from engine.model.runner import ModelRunner
from engine.params import GenerationRequest, SamplingParams, SpeculativeParams
from worlds.engine_harness import Driver, Setup, build_core, drafting, request
from worlds.grammar_world import json_grammar

CPU = torch.device("cpu")
NUM_TOKENS = 60
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=0, ignore_eos=True),
    "t07_top_p": SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.7, top_p=0.9, logprobs=0, ignore_eos=True
    ),
    "t13": SamplingParams(max_tokens=NUM_TOKENS, temperature=1.3, logprobs=0, ignore_eos=True),
    "json": SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=0.7,
        logprobs=0,
        grammar=json_grammar(
            {
                "type": "object",
                "properties": {
                    "function": {"type": "string", "maxLength": 24},
                    "variables": {"type": "array", "items": {"type": "string", "maxLength": 12}},
                },
                "required": ["function", "variables"],
                "additionalProperties": False,
            }
        ),
    ),
}
SPECULATIONS = [
    drafting("ngram", num_tokens=8),
    drafting("ngram", num_tokens=16, width=3),
    drafting("nasd_one_level", "target_rate", num_tokens=4),
    drafting("nasd", "goodput", width=2, filler_top_k=2),
    drafting("nasd", num_tokens=5, stop_if_unknown=False),
]
CODE = '''def read_table(path, separator=","):
    """Return the rows of a table."""
    rows = []
    with open(path) as handle:
        for line in handle:
            values = line.strip().split(separator)
            if values:
                rows.append(values)
    return rows
'''
INSTRUCTIONS = ("Rename the variable rows to table.", "Repeat the code.")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not can_pack(CPU, torch.bfloat16), reason="this CPU has no bf16 kernels to pack weights for"
    ),
    pytest.mark.skipif(
        not (BUNDLED / "target" / "model.safetensors").is_file(),
        reason="the bundled model is not in this checkout",
    ),
]


class BundledTarget:
    """The bundled model in exact mode, and prompts that it understands."""

    def __init__(self, bits: int) -> None:
        folder = str(BUNDLED / "target")
        self._model = load_model(folder, CPU)
        if bits == 8:
            quantize_model(self._model)
        self.vocab_size = int(self._model.config.vocab_size)
        self._shapes = attach_attention(self._model)
        pack_linears(self._model, 256, exact=True)
        tokenizer = load_tokenizer(folder)
        self._eos_token_ids = (tokenizer.eos_token_id,)
        compiler = GrammarCompiler(tokenizer, self.vocab_size, self._eos_token_ids)
        self._constrain = compiler.constraint
        self.prompts = [
            list(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": f"{instruction}\n\n{CODE}"}],
                    add_generation_prompt=True,
                    return_dict=False,
                )
            )
            for instruction in INSTRUCTIONS
        ]

    def core(self, setup: Setup) -> EngineCore:
        needs = AttentionNeeds.of(self._model, self._shapes, "exact", setup.block_size)
        runner = ModelRunner(self._model, build_attention(needs, setup.num_blocks))
        known = setup.but(eos_token_ids=self._eos_token_ids, constrain=self._constrain)
        return build_core(runner, self.vocab_size, known)


@pytest.fixture(scope="module", params=[16, 8])
def bundled(request: pytest.FixtureRequest) -> BundledTarget:
    if request.param == 8 and refusal(CPU) is not None:
        pytest.skip("this CPU has no products in 8 bits")
    torch.set_num_threads(1)
    return BundledTarget(request.param)


SETUP = Setup(
    num_blocks=160, block_size=16, max_model_len=1024, prefill_chunk=512, max_num_batched_tokens=640
)


def subjects(bundled: BundledTarget, sampling: SamplingParams) -> list[GenerationRequest]:
    return [
        request(f"r{index}", bundled.prompts[index % 2], replace(sampling, seed=index % 2), params)
        for index, params in enumerate(SPECULATIONS)
    ]


def signature(driver: Driver, request_id: str) -> list[tuple[int, float]]:
    """Tokens, and the exact log-probabilities they were given."""
    return [(told.token_id, told.logprob) for told in driver.logprobs[request_id]]


def alone(bundled: BundledTarget, requests: Sequence[GenerationRequest]) -> Driver:
    """One after the other; the first of each prompt computes it, which is dear."""
    driver = Driver(bundled.core(SETUP))
    for each in requests:
        driver.run(each)
    return driver


def mixed_batch(bundled: BundledTarget, requests: Sequence[GenerationRequest]) -> Driver:
    odd = request("odd", bundled.prompts[0][:37], SAMPLINGS["t13"], drafting("ngram"))
    return Driver(bundled.core(SETUP)).run(odd, *requests)


def chunked(bundled: BundledTarget, requests: Sequence[GenerationRequest]) -> Driver:
    setup = SETUP.but(prefill_chunk=23, max_num_batched_tokens=70, prefix_cache=False)
    driver = Driver(bundled.core(setup)).run(*requests)
    least = len(min(bundled.prompts, key=len)) // 23
    assert min(driver.first_step.values()) > least
    return driver


def prefix_hit(bundled: BundledTarget, requests: Sequence[GenerationRequest]) -> Driver:
    driver = Driver(bundled.core(SETUP))
    driver.run(*(request(f"first-{i}", prompt) for i, prompt in enumerate(bundled.prompts)))
    driver.run(*requests)
    assert min(driver.finishes[each.request_id].num_cached_tokens for each in requests) > 0
    return driver


def preempted(bundled: BundledTarget, requests: Sequence[GenerationRequest]) -> Driver:
    num_blocks = 3 * (len(bundled.prompts[0]) // 16 + 3)
    driver = Driver(bundled.core(SETUP.but(num_blocks=num_blocks, prefix_cache=False)))
    driver.submit(*requests)
    for index in range(4):
        for _ in range(5):
            driver.step()
        driver.submit(request(f"important-{index}", bundled.prompts[0], priority=-1))
    driver.run()
    times = [driver.finishes[each.request_id].timings for each in requests]
    assert sum(each.num_preemptions for each in times) > 1
    return driver


SITUATIONS = {
    function.__name__: function for function in (alone, mixed_batch, chunked, prefix_hit, preempted)
}


@cache
def plain(bundled: BundledTarget, sampling: str, index: int) -> list[tuple[int, float]]:
    each = request(
        "plain",
        bundled.prompts[index],
        replace(SAMPLINGS[sampling], seed=index),
        SpeculativeParams(),
    )
    return signature(Driver(bundled.core(SETUP)).run(each), "plain")


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_drafting_changes_no_bit(bundled: BundledTarget, situation: str, sampling: str) -> None:
    requests = subjects(bundled, SAMPLINGS[sampling])
    driver = SITUATIONS[situation](bundled, requests)
    for index, each in enumerate(requests):
        expected = plain(bundled, sampling, index % 2)
        assert len(expected) == NUM_TOKENS or sampling == "json"
        assert signature(driver, each.request_id) == expected, each.speculative
    accounts = [driver.finishes[each.request_id].speculative for each in requests]
    num_accepted = sum(account.num_accepted_tokens for account in accounts)
    num_drafted = sum(account.num_draft_tokens for account in accounts)
    assert num_drafted > num_accepted
    assert num_accepted > (NUM_TOKENS if sampling == "greedy" else 0)
