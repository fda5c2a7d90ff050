"""Two ranks that share a model write what transformers writes with the whole of it, whatever drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.backend import AttentionBackend
from engine.batch import NORMED, build_batch
from engine.config import EngineConfig
from engine.model.loader import BUNDLED, load_model
from engine.ranks.group import LeadingRunner, Step
from engine.request.errors import EngineDeadError
from engine.request.params import SamplingParams, SpeculativeParams
from worlds.engine_driver import ORACLE, PLAIN, OracleDrafter, register_oracle, write_all
from worlds.engine_harness import circle_prompt, drafting, request, tiny_llama
from worlds.tiny_models import (
    VOCAB_SIZE,
    chunk,
    greedy_text,
    own_states,
    random_ids,
    reference_model,
)
from worlds.trained_heads import TARGET, write_checkpoint, write_heads
from worlds.two_ranks import SecondRank, build, kept_logits, saved_model

NUM_WRITTEN = 16
PROMPTS = [random_ids(1, 19), random_ids(2, 6) * 2, random_ids(3, 3)]
SIZES: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "dtype": "float32",
    "num_blocks": 32,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 40,
    "prefill_chunk": 5,
    "check_integrity": True,
}


@pytest.fixture(scope="module")
def second() -> Iterator[SecondRank]:
    rank = SecondRank()
    yield rank
    rank.stop()


def attention_of(runner: Any) -> AttentionBackend:
    assert isinstance(runner, LeadingRunner)
    return runner.attention


# Heads divided; norms of heads and tied embeddings; experts; heads that are not divided.
@pytest.mark.parametrize(
    ("name", "num_kv_heads"), [("llama", 1), ("qwen3", 1), ("mixtral", 1), ("phi3", 2)]
)
def test_trees_of_drafts_change_no_text(
    name: str,
    num_kv_heads: int,
    second: SecondRank,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = [greedy_text(reference_model(name), prompt, NUM_WRITTEN) for prompt in PROMPTS]
    texts = [prompt + text for prompt, text in zip(PROMPTS, expected, strict=True)]
    register_oracle(monkeypatch, lambda: OracleDrafter(texts, VOCAB_SIZE))
    config = EngineConfig(model=saved_model(name, tmp_path), drafters=("none", "oracle"), **SIZES)
    with kept_logits(LeadingRunner) as logits, second.shared(config) as engine:
        written, num_accepted = write_all(engine, PROMPTS, NUM_WRITTEN, ORACLE)
        assert attention_of(engine.core.runner).store.key[0].shape[1] == num_kv_heads
    assert written == expected
    assert num_accepted > NUM_WRITTEN * len(PROMPTS) / 2
    assert engine.info.tensor_parallel_size == 2
    assert engine.info.num_parameters == reference_model(name).num_parameters()
    # Every rank could have sampled: all of them have the same bits of every step.
    assert second.logits == logits
    assert len({*logits}) > NUM_WRITTEN / 2


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_hidden_states_leave_the_first_rank_as_whole_as_they_are(
    name: str, second: SecondRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, layers = random_ids(5, 12), (1, NORMED, 0)
    config = EngineConfig(model=saved_model(name, tmp_path), drafters=("none",), **SIZES)
    with second.shared(config) as engine:
        runner = engine.core.runner
        assert isinstance(runner, LeadingRunner)
        told: list[tuple[int, ...]] = []
        tell = runner.ranks.tell

        def heard(step: Step | None) -> None:
            assert step is not None
            told.append(step.batch.hidden_layers)
            tell(step)

        rows = [chunk(text, 0, len(text), range(1))]
        with monkeypatch.context() as patch:
            patch.setattr(runner.ranks, "tell", heard)
            runner.prepare(layers)
            hidden = runner.forward(build_batch(rows, config.block_size, layers)).hidden
    expected = own_states(reference_model(name), text)
    for layer, states in zip(layers, hidden, strict=True):
        torch.testing.assert_close(states, expected[layer], rtol=1e-3, atol=2e-4)
    # The others keep none.
    assert told == [(), ()]


def test_models_and_heads_that_draft_stay_with_the_first_rank(second: SecondRank) -> None:
    """The bundled heads fit the weights that both ranks hold together."""
    whole = load_model(str(BUNDLED / "target"), torch.device("cpu"), "float32")
    prompts = [[40, 41, 42, 43, 44] * 3, random_ids(4, 12, 4096)]
    expected = [greedy_text(whole, prompt, NUM_WRITTEN) for prompt in prompts]
    drafters = ("none", "ngram", "small_model", "medusa")
    with second.shared(EngineConfig(drafters=drafters, **SIZES)) as engine:
        assert {*engine.info.drafters} >= {*drafters}
        core = engine.core
        for name in drafters:
            fixed = SpeculativeParams(
                draft_strategy=name, adaptive_depth="fixed", num_speculative_tokens=4
            )
            written, num_accepted = write_all(
                type(engine)(core, engine.info, 8), prompts, NUM_WRITTEN, fixed
            )
            assert written == expected, name
            assert (num_accepted > 0) == (name != "none"), name


def test_published_heads_draft_for_a_divided_target(second: SecondRank, tmp_path: Path) -> None:
    """With whole embeddings and output heads, which ranks have parts of."""
    prompts = [circle_prompt(index) for index in range(2)]
    asked = SamplingParams(NUM_WRITTEN, temperature=0.0)
    expected = [TARGET.recomputed(request("r", each, asked), NUM_WRITTEN) for each in prompts]
    folder = write_checkpoint(tmp_path / "target", tiny_llama())
    heads = write_heads(tmp_path)
    config = EngineConfig(
        model=str(folder), draft=("mtp", *(f"{name}={heads[name]}" for name in heads)), **SIZES
    )
    with second.shared(config) as engine:
        assert engine.info.drafts.keys() == {"mtp", *heads}
        for name in engine.info.drafts:
            fixed = drafting(name, num_tokens=4, width=2)
            runs = type(engine)(engine.core, engine.info, 8)
            written, num_accepted = write_all(runs, prompts, NUM_WRITTEN, fixed)
            assert written == expected, name
            assert num_accepted > 0, name


@pytest.mark.slow
def test_ranks_with_different_settings_refuse_each_other(second: SecondRank) -> None:
    ours, theirs = (EngineConfig(**SIZES | {"num_blocks": each}) for each in (32, 48))
    with second.beside(ours, theirs), pytest.raises(ValueError, match="different settings"):
        build(ours)
    assert "different settings" in second.outcome()


def test_a_rank_that_goes_ends_the_engine(second: SecondRank, tmp_path: Path) -> None:
    """Last, since nobody follows after it."""
    config = EngineConfig(model=saved_model("llama", tmp_path), drafters=("none",), **SIZES)
    with second.beside(config):
        engine = build(config)
        write_all(type(engine)(engine.core, engine.info, 8), PROMPTS, 2, PLAIN)
        second.process.kill()
        second.process.wait()
        with pytest.raises(EngineDeadError, match="the ranks are no longer in step"):
            write_all(engine, PROMPTS, NUM_WRITTEN, PLAIN)
