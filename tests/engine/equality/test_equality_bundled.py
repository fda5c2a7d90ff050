"""Promise 1, in bf16 and in 8 bits on the bundled model: exact mode holds to the bit.

Prompts ask for edits, so that drafts come true. ``tests/real`` has the same on weights that others
trained.
"""

from __future__ import annotations

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
from engine.request.params import SamplingParams
from worlds.engine_harness import Setup, build_core, drafting, request
from worlds.grammar_world import json_grammar
from worlds.situations import LARGE, SITUATIONS, Signature, plain, signature

CPU = torch.device("cpu")
NUM_TOKENS = 60
USUAL = SamplingParams(NUM_TOKENS, temperature=0.0, logprobs=0, ignore_eos=True)
SCHEMA = {
    "type": "object",
    "properties": {
        "function": {"type": "string", "maxLength": 24},
        "variables": {"type": "array", "items": {"type": "string", "maxLength": 12}},
    },
    "required": ["function", "variables"],
    "additionalProperties": False,
}
SAMPLINGS = {
    "greedy": USUAL,
    "t07_top_p": replace(USUAL, temperature=0.7, top_p=0.9),
    "t13": replace(USUAL, temperature=1.3),
    "json": replace(USUAL, temperature=0.7, ignore_eos=False, grammar=json_grammar(SCHEMA)),
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

    setup = Setup(
        num_blocks=160,
        block_size=16,
        max_model_len=1024,
        prefill_chunk=512,
        max_num_batched_tokens=640,
    )

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
    return BundledTarget(request.param)


@cache
def expected_of(bundled: BundledTarget, sampling: str, index: int) -> Signature:
    each = request("plain", bundled.prompts[index], replace(SAMPLINGS[sampling], seed=index))
    return signature(plain(bundled, each), "plain")


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("situation", LARGE)
def test_drafting_changes_no_bit(bundled: BundledTarget, situation: str, sampling: str) -> None:
    asked = SAMPLINGS[sampling]
    requests = [
        request(f"r{index}", bundled.prompts[index % 2], replace(asked, seed=index % 2), params)
        for index, params in enumerate(SPECULATIONS)
    ]
    driver = SITUATIONS[situation](bundled, requests)
    for index, each in enumerate(requests):
        expected = expected_of(bundled, sampling, index % 2)
        assert len(expected) == NUM_TOKENS or sampling == "json"
        assert signature(driver, each.request_id) == expected, each.speculative
    accounts = [driver.finishes[each.request_id].speculative for each in requests]
    num_accepted = sum(account.num_accepted_tokens for account in accounts)
    num_drafted = sum(account.num_draft_tokens for account in accounts)
    assert num_drafted > num_accepted
    assert num_accepted > (NUM_TOKENS if sampling == "greedy" else 0)
