"""Draft models in a real engine: the same tokens as without, and drafts that know their text.

Targets are the tiny models whose next token hangs on every earlier one; the near draft model is the
target with noise on its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from bench.census import tiny_model as census_model
from drafters.model.protocol import Candidates, DraftRows, Levels
from drafters.tree import ROOT
from engine.build import build_engine_for
from engine.build import sizes as build_sizes
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.drafting.draft_model import EngineDraftModel
from engine.drafting.models import prepare_drafts
from engine.model.loader import prepare_model
from engine.model.quantization import quantize_model, refusal
from engine.request.errors import UnsupportedModelError
from engine.request.info import DraftInfo
from engine.request.params import GenerationRequest, SamplingParams, SpeculativeParams
from engine.transfer import Readback
from worlds.engine_harness import Driver, drafting, request
from worlds.model_world import Forwards
from worlds.tiny_models import CPU, VOCAB_SIZE, own_logits, random_ids, tiny_model

pytestmark = pytest.mark.slow

NUM_TOKENS = 20
KINDS = ("small_model", "quantized", "prefix_layers")
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0),
    "sampled": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.95, top_k=60),
}
SIZES: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 160,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "check_integrity": True,
}
PROMPTS = [random_ids(seed, 9 + 5 * seed) for seed in range(3)]


def target() -> PreTrainedModel:
    return tiny_model("llama", num_hidden_layers=4)


@torch.no_grad()
def near_target(noise: float) -> PreTrainedModel:
    model = target()
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Saved draft models: the target's own weights, and some near them."""
    root: Path = tmp_path_factory.mktemp("drafts")
    for name, noise in (("same", 0.0), ("near", 0.02)):
        near_target(noise).save_pretrained(root / name)
    return {name: str(root / name) for name in ("same", "near")}


def core_of(**changes: Any) -> EngineCore:
    return build_engine_for(target(), None, EngineConfig(**SIZES | changes)).core


def full_core(folders: dict[str, str], **changes: Any) -> EngineCore:
    """With all three drafters, and those that need no model."""
    settings = {"draft": (folders["near"],), "quantized": "int8", "prefix_layers": "0,1,3"}
    return core_of(**settings | changes)


@cache
def plain_stream(sampling: str, index: int) -> list[int]:
    core = core_of(drafters=("none",))
    each = request("r", PROMPTS[index], replace(SAMPLINGS[sampling], seed=index))
    return Driver(core).run(each).token_ids["r"]


def every_prompt(sampling: str, speculation: SpeculativeParams) -> list[GenerationRequest]:
    return [
        request(f"r{index}", prompt, replace(SAMPLINGS[sampling], seed=index), speculation)
        for index, prompt in enumerate(PROMPTS)
    ]


def subjects(sampling: str, kinds: Sequence[str] = KINDS) -> list[GenerationRequest]:
    found = []
    for kind in kinds:
        for width, gamma in ((1, 5), (3, 9)):
            index = len(found) % len(PROMPTS)
            params = replace(SAMPLINGS[sampling], seed=index)
            speculation = drafting(kind, "fixed", gamma, width, min_confidence=0.02)
            found.append(request(f"{kind}-{width}", PROMPTS[index], params, speculation))
    return found


def check(driver: Driver, requests: Sequence[GenerationRequest], sampling: str) -> None:
    for each in requests:
        index = each.sampling.seed
        assert driver.token_ids[each.request_id] == plain_stream(sampling, index), each.request_id
        account = driver.finishes[each.request_id].speculative
        assert account.num_failed_drafts == 0
        assert account.num_draft_tokens > 0


def num_accepted(driver: Driver, prefix: str) -> int:
    return sum(
        finish.speculative.num_accepted_tokens
        for name, finish in driver.finishes.items()
        if name.startswith(prefix)
    )


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("width", [1, 3])
def test_the_target_as_its_own_draft_is_always_right(
    folders: dict[str, str], sampling: str, width: int
) -> None:
    """Under shared noise, sampled text too: the draft draws what the target will draw."""
    driver = Driver(core_of(draft=(folders["same"],)))
    speculation = drafting("small_model", "fixed", 4, width, min_confidence=0.0)
    driver.run(*every_prompt(sampling, speculation))
    for index in range(len(PROMPTS)):
        assert driver.token_ids[f"r{index}"] == plain_stream(sampling, index)
        account = driver.finishes[f"r{index}"].speculative
        if width == 1:
            assert account.num_accepted_tokens == account.num_draft_tokens
        assert account.num_accepted_tokens / account.num_steps > (3 if width == 1 else 1)


class Watched(Forwards):
    """An ``EngineDraftModel`` whose every candidate is compared with a fresh forward over its text."""

    def __init__(self, model: EngineDraftModel, reference: PreTrainedModel) -> None:
        self.model = model
        self.reference = reference
        self.texts: dict[int, list[int]] = {}
        self.num_compared = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, rows: Sequence[DraftRows]) -> list[list[Candidates]]:
        found: list[list[Candidates]] = self.model.read_now(
            partial(self.model.begin, [rows])
        ).candidates[0]
        for part, candidates in zip(rows, found, strict=True):
            texts = self._texts(part)[len(part.token_ids) - part.num_scored :]
            for text, each in zip(texts, candidates, strict=True):
                self._compare(text, each)
        return found

    def _compare(self, text: list[int], each: Candidates) -> None:
        probs = own_logits(self.reference, text)[-1].softmax(-1)
        for token_id, confidence in zip(each.token_ids, each.confidences, strict=True):
            assert confidence == pytest.approx(float(probs[token_id]), abs=2e-3)
        assert probs[each.token_ids[0]] > probs.max() - 2e-3
        self.num_compared += 1

    def _texts(self, rows: DraftRows) -> list[list[int]]:
        known = list(rows.ask.token_ids)
        texts: list[list[int]] = []
        nodes: list[list[int]] = []
        for index, token_id in enumerate(rows.token_ids):
            if rows.parents:
                node = rows.num_stored + index
                while len(nodes) < rows.num_stored:
                    nodes.append(self.texts[self._slot(rows, rows.base + len(nodes))])
                parent = rows.parents[node]
                above = known if parent == ROOT else nodes[parent]
                text, place = [*above, token_id], rows.base + node
                nodes.append(text)
            else:
                place = rows.base + index
                above = known[:place]
                if place > len(known):
                    above = self.texts[self._slot(rows, place - 1)]
                text = [*above, token_id]
            self.texts[self._slot(rows, place)] = text
            texts.append(text)
        return texts

    def _slot(self, rows: DraftRows, position: int) -> int:
        return rows.ask.block_table[position // 4] * 4 + position % 4


@pytest.mark.parametrize("kind", ["small_model", "prefix_layers"])
@pytest.mark.parametrize("width", [1, 3])
def test_draft_logits_are_those_of_a_fresh_forward_over_the_same_text(
    folders: dict[str, str], kind: str, width: int
) -> None:
    from engine.drafting.layer_subset import layer_subset

    # Of first layers without a gap: what is left out in the middle was there for committed rows.
    core = full_core(folders, prefill_chunk=8, prefix_layers="3")
    drafter: Any = core.speculation.drafters[kind]
    reference = near_target(0.02) if kind == "small_model" else layer_subset(target(), [0, 1, 2])
    watched = drafter._model = Watched(drafter._model, reference)
    speculation = drafting(kind, "fixed", 7, width, min_confidence=0.0)
    driver = Driver(core)
    driver.run(*every_prompt("greedy", speculation))
    driver.run(request("again", PROMPTS[2] + [5], SAMPLINGS["greedy"], speculation))
    assert watched.num_compared > 100
    assert all(each.speculative.num_failed_drafts == 0 for each in driver.finishes.values())


def test_a_failing_draft_model_costs_only_its_drafts(folders: dict[str, str]) -> None:
    core = full_core(folders)
    drafter: Any = core.speculation.drafters["small_model"]
    healthy, calls = drafter._model.begin, []

    def begin(levels: Sequence[Sequence[DraftRows]], readback: Readback) -> Callable[[], Levels]:
        calls.append(len(levels))
        if len(calls) % 3 == 0:
            raise RuntimeError("told to fail")
        return healthy(levels, readback)  # type: ignore[no-any-return]

    drafter._model.begin = begin
    requests = subjects("greedy")
    driver = Driver(core).run(*requests)
    for each in requests:
        assert driver.token_ids[each.request_id] == plain_stream("greedy", each.sampling.seed)
    failures = [driver.finishes[f"small_model-{w}"].speculative.num_failed_drafts for w in (1, 3)]
    assert sum(failures) > 0
    assert driver.finishes["quantized-1"].speculative.num_failed_drafts == 0


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_drawn_drafts_are_verified_by_their_distributions(
    folders: dict[str, str], verification: str
) -> None:
    core = core_of(draft=(folders["same"],))
    speculation = drafting("small_model", "fixed", 4, min_confidence=0.0)
    speculation = replace(speculation, verification=verification)
    driver = Driver(core).run(*every_prompt("sampled", speculation))
    for finish in driver.finishes.values():
        account = finish.speculative
        assert account.num_failed_drafts == 0
        # Where both distributions are the same, nothing drawn is ever refused.
        assert account.num_accepted_tokens >= 0.95 * account.num_draft_tokens > 0


# --- settings ---


def test_an_8_bit_store_drafts_and_changes_nothing_but_what_is_accepted(
    folders: dict[str, str],
) -> None:
    core = core_of(draft=(folders["same"],), draft_kv_dtype="fp8")
    requests = subjects("sampled", ["small_model"])
    driver = Driver(core).run(*requests)
    check(driver, requests, "sampled")
    assert num_accepted(driver, "small_model") > 5


def test_several_small_models_draft_side_by_side_each_under_its_name(
    folders: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    drafts = (folders["same"], f"near={folders['near']}")
    with caplog.at_level("INFO", "engine"):
        engine = build_engine_for(target(), None, EngineConfig(**SIZES, draft=drafts))
    names = ["small_model", "near"]
    size = sum(each.numel() for each in target().parameters())
    for name, folder in zip(names, ("same", "near"), strict=True):
        found = engine.info.drafts[name]
        expected = DraftInfo(name, "small_model", folders[folder], size, agreement=found.agreement)
        assert found == expected
        assert found.agreement == 1 if folder == "same" else 0 < (found.agreement or 0) < 1
        assert f"draft {name}: small_model of" in caplog.text
        assert engine.info.drafters[name].name == name
    drafters: Any = engine.core.speculation.drafters
    stores = {drafters[name]._model._runner.store for name in names}
    assert len(stores) == 2
    requests = subjects("sampled", names)
    driver = Driver(engine.core).run(*requests)
    check(driver, requests, "sampled")
    for each in requests:
        name = each.request_id.rpartition("-")[0]
        assert driver.finishes[each.request_id].speculative.drafter == name
        assert num_accepted(driver, name) > 5


@pytest.mark.parametrize(("kv_dtype", "share"), [("auto", 2.0), ("fp8", 1.25)])
def test_the_pool_leaves_room_for_the_draft_models_rows(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, kv_dtype: str, share: float
) -> None:
    monkeypatch.setattr(build_sizes, "free_bytes", lambda _: 100 * 4 * 4 * 2 * 2 * 16 * 4)
    sizes: dict[str, Any] = {"num_blocks": None, "kv_memory_fraction": 1.0}
    assert build_engine_for(target(), None, EngineConfig(**SIZES | sizes)).info.num_blocks == 100
    sizes |= {"draft": (folders["near"],), "draft_kv_dtype": kv_dtype}
    engine = build_engine_for(target(), None, EngineConfig(**SIZES | sizes))
    assert engine.info.num_blocks == int(100 / share)


def test_drafters_without_a_model_are_left_out_or_refused_with_the_reason() -> None:
    engine = build_engine_for(target(), None, EngineConfig(**SIZES))
    assert not set(KINDS) & set(engine.info.drafters)
    for kind, reason in (
        ("small_model", "the setting draft names one"),
        ("quantized", "the setting quantized makes one"),
        ("prefix_layers", "the setting prefix_layers does"),
    ):
        with pytest.raises(ValueError, match=f"{kind}.*{reason}"):
            core_of(drafters=(kind,))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantized": "int8"}, "quantized is set, but drafters leaves out quantized"),
        ({"prefix_layers": "2"}, "prefix_layers is set"),
        ({"draft": ("x",)}, "draft small_model is set, but drafters leaves out small_model and"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        core_of(drafters=("ngram",), **settings)


def test_a_draft_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    tiny_model("llama", vocab_size=VOCAB_SIZE + 3).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="vocabulary has 100 tokens, the target's 97"):
        core_of(draft=(str(tmp_path),))


def test_layers_that_do_not_run_without_the_others_are_refused_in_words() -> None:
    """Gemma 4 embeds each token once for every layer."""
    model = prepare_model(census_model("gemma4_text"), torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="^prefix_layers: .* with some of its layers"):
        build_engine_for(model, None, EngineConfig(**SIZES | {"prefix_layers": "2"}))


def test_8_bit_floats_are_for_cuda() -> None:
    with pytest.raises(ValueError, match="fp8 needs a CUDA device"):
        core_of(quantized="fp8")


def test_without_torchao_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    with pytest.raises(ValueError, match=r"torchao is not installed \(pip install"):
        core_of(quantized="int4")


def test_a_target_in_8_bits_is_not_copied_in_8_bits() -> None:
    if refusal(CPU) is not None:
        pytest.skip("this CPU has no products in 8 bits")
    model = prepare_model(target(), CPU)
    quantize_model(model)
    with pytest.raises(ValueError, match="the target's weights are in few bits"):
        prepare_drafts(model, None, EngineConfig(quantized="int8"), {})


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantised_copy_shares_what_is_not_quantised(kind: Any) -> None:
    from engine.drafting.models import quantized_copy

    if kind == "int4":
        pytest.importorskip("torchao")
    model = prepare_model(target(), CPU)
    before = own_logits(model, PROMPTS[1])
    twin = quantized_copy(model, kind)
    assert twin.get_input_embeddings().weight is model.get_input_embeddings().weight
    after = own_logits(twin, PROMPTS[1])
    torch.testing.assert_close(own_logits(model, PROMPTS[1]), before)
    error = float((after - before).norm() / before.norm())
    assert 0 < error < (0.25 if kind == "int8" else 0.9)


def test_the_small_model_can_be_the_quantised_one(folders: dict[str, str]) -> None:
    core = core_of(draft=(folders["same"],), quantized="int8", quantized_model="draft")
    requests = subjects("greedy", ["quantized"])
    driver = Driver(core).run(*requests)
    check(driver, requests, "greedy")
    assert num_accepted(driver, "quantized") > 5
    with pytest.raises(ValueError, match="quantized_model: the setting draft names no small_model"):
        core_of(quantized="int8", quantized_model="draft")
