"""The grammar as a logits processor."""

from __future__ import annotations

import pytest
import torch

from drafters.tree import chain
from engine.request.errors import RequestError
from engine.request.params import GenerationRequest, SamplingParams
from engine.sampling.sampler import edited_logits
from engine.sampling.state import SamplingState
from worlds.engine_harness import TINY_VOCAB
from worlds.grammar_world import EOS, json_grammar, tiny_compiler, tiny_tokenizer
from worlds.sampled_rows import RowGroup, sample_tokens, verify_step

BOOLEAN = json_grammar({"type": "boolean"})


def ids(text: str) -> list[int]:
    return list(tiny_tokenizer().encode(text))


def state(**sampling: object) -> SamplingState:
    params = SamplingParams(**{"temperature": 0.0, "grammar": BOOLEAN, **sampling})  # type: ignore[arg-type]
    request = GenerationRequest("r", (3,), params)
    return SamplingState(request, (EOS,), TINY_VOCAB, 64, tiny_compiler().constraint)


def test_every_row_is_masked_after_its_own_path_and_unreachable_ones_are_left() -> None:
    group = RowGroup(state(), 0, chain([*ids("f"), *ids("a"), *ids("n")]))
    logits = torch.randn(4, TINY_VOCAB)
    edited = edited_logits(logits, [group])
    assert (edited[0] > float("-inf")).nonzero()[:, 0].tolist() == sorted(
        {*ids("true"), *ids("t"), *ids("tr"), *ids("f")}
    )
    assert (edited[1] > float("-inf")).nonzero()[:, 0].tolist() == ids("a")
    assert (edited[2] > float("-inf")).nonzero()[:, 0].tolist() == ids("l")
    assert torch.equal(edited[3], logits[3])


def test_where_all_that_is_allowed_was_ruled_out_the_grammar_wins() -> None:
    """Not the least tokens: the text is at its end, and ends."""
    made = state(min_tokens=10, max_tokens=10)
    made.append(ids("true"))
    group = RowGroup(made, 0)
    logits = torch.zeros(1, TINY_VOCAB)
    assert sample_tokens(logits, [group]) == [EOS]
    (outcome,) = verify_step(logits, [group])
    assert (outcome.finish_reason, outcome.emitted_token_ids) == ("stop", ())


def test_min_tokens_holds_as_long_as_the_grammar_can_go_on() -> None:
    made = state(min_tokens=5, max_tokens=10, grammar=json_grammar({"type": "integer"}))
    made.append(ids("12"))
    logits = torch.zeros(1, TINY_VOCAB)
    logits[0, EOS] = 9.0
    (token,) = sample_tokens(logits, [RowGroup(made, 0)])
    assert tiny_tokenizer().decode([token]).isdigit()


def test_a_text_cannot_go_on_after_its_grammar() -> None:
    with pytest.raises(RequestError) as caught:
        state(ignore_eos=True)
    assert caught.value.param == "ignore_eos"


def test_an_engine_without_a_tokenizer_refuses_grammars() -> None:
    request = GenerationRequest("r", (3,), SamplingParams(grammar=BOOLEAN))
    with pytest.raises(RequestError, match="no tokenizer"):
        SamplingState(request, (EOS,), TINY_VOCAB, 64)
