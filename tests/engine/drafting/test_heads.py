"""Heads on the target's hidden states, in the engine: what is drawn is told, which heads fit a target,
and no text changes. That rows read what they have to is shown in ``test_head_drafts.py``."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType

from drafters.base import NORMED, DrafterUnavailableError, DraftRequest, DraftSampling, DraftShape
from drafters.model.protocol import Candidates
from drafters.registry import draft_methods
from engine.build import build_engine, build_engine_for
from engine.config import EngineConfig
from engine.drafting.drafts import SMALL_MODEL, find_drafts, with_bundled_drafts
from engine.drafting.heads import DraftHeads, prepare_heads, quantize_head
from engine.drafting.medusa import MedusaHeads
from engine.drafting.published.medusa import ResidualHeads
from engine.drafting.published.mtp import MtpNetwork
from engine.model.loader import BUNDLED, load_model
from engine.model.quantization import packed_weights, quantize_linears
from engine.request.params import PLAIN, SamplingParams
from engine.sampling.noise import gumbel_list, request_key
from engine.weights.rounding.int8 import is_exact
from worlds.changed_folders import configure
from worlds.engine_harness import (
    TINY_VOCAB,
    Driver,
    Setup,
    circle_prompt,
    drafting,
    request,
    tiny_llama,
)
from worlds.every_drafter import DRAFTERS, EveryDrafterTarget
from worlds.gguf_files import write_gguf
from worlds.situations import signature
from worlds.trained_heads import (
    BLOCK_CONFIGS,
    EAGLE3_FORMS,
    HIDDEN_SIZE,
    TARGET,
    bound_heads,
    eagle_network,
    write_checkpoint,
    write_heads,
)

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
NUM_TOKENS = 24
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0),
    "sampled": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, top_p=0.95, seed=3),
}
HEADS = [
    name
    for name in DRAFTERS
    if name in {*draft_methods(), *EAGLE3_FORMS, *BLOCK_CONFIGS} - {SMALL_MODEL}
]


def prepared(target: Any, config: EngineConfig) -> DraftHeads:
    return prepare_heads(target, config, find_drafts(config))


def candidates_of(
    heads: MedusaHeads, hidden: Sequence[torch.Tensor], asks: Sequence[DraftRequest], num: int
) -> list[list[Candidates]]:
    return heads.read_now(partial(heads.begin, hidden, asks, num))


# --- the same text ---


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("drafter", HEADS)
def test_drafts_are_drawn_where_the_verification_asks_for_it(
    target: EveryDrafterTarget, drafter: str, width: int
) -> None:
    """The law is the verifiers' affair; here: what is drawn is told, and greedy texts stay the same."""
    options = {} if drafter == "medusa" else {"min_confidence": 0.0}
    for verification in ("rejection", *(["block"] if width == 1 else [])):
        wanted = replace(
            drafting(drafter, num_tokens=6, width=width, **options), verification=verification
        )
        requests = [
            request(f"r{index}", circle_prompt(index), replace(sampling, seed=index), wanted)
            for index, sampling in enumerate(SAMPLINGS.values())
        ]
        driver = Driver(target.core(Setup(prefill_chunk=7))).run(*requests)
        for each in requests:
            stats = driver.finishes[each.request_id].speculative
            assert stats.num_failed_drafts == 0
            assert stats.num_draft_tokens > 12
        assert driver.token_ids["r0"] == TARGET.recomputed(requests[0], NUM_TOKENS)


def test_a_head_that_is_all_zeros_says_what_the_target_says() -> None:
    output_head = TARGET.reference.get_output_embeddings()
    heads = bound_heads(ResidualHeads(2, 2, HIDDEN_SIZE))
    hidden = torch.randn(3, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        probs = output_head(hidden).softmax(-1)
    asks = [DraftRequest("r", [1, 2, 3], 4, DraftShape()) for _ in hidden]
    for row, by_head in enumerate(candidates_of(heads, list(hidden), asks, 5)):
        wanted = probs[row].topk(5)
        for candidates in by_head:
            assert candidates.token_ids == wanted.indices.tolist()
            assert candidates.confidences == pytest.approx(wanted.values.tolist(), abs=1e-5)


def test_heads_draw_with_the_noise_of_the_positions_they_predict() -> None:
    output_head = TARGET.reference.get_output_embeddings()
    heads = bound_heads(ResidualHeads(3, 1, HIDDEN_SIZE))
    hidden = torch.randn(HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    key = request_key(7, 0)
    sampling = DraftSampling(0.7, noise=partial(gumbel_list, key), key=key)
    ask = DraftRequest("r", [1, 2, 3, 4, 5], 4, DraftShape(), sampling)
    (by_head,) = candidates_of(heads, [hidden], [ask], 4)
    with torch.inference_mode():
        logits = output_head(hidden[None])[0] / 0.7
    for head, candidates in enumerate(by_head):
        noise = torch.tensor(gumbel_list(key, 5 + head, range(TINY_VOCAB)))
        assert candidates.token_ids == (logits + noise).topk(4).indices.tolist()


# --- the engine's own ---


def test_the_bundled_heads_fit_the_bundled_target() -> None:
    """If this fails, the target changed: train its heads again (docs/drafters/heads.md)."""
    whole = load_model(str(BUNDLED / "target"), CPU)
    heads = prepared(whole, with_bundled_drafts(EngineConfig()))
    assert heads.facts.num_layers == len(whole.model.layers)
    assert heads.reasons == {}
    assert heads.networks.keys() == {"medusa"}
    assert heads.sizes.keys() == heads.networks.keys()
    for name in heads.networks:
        assert sum(file.stat().st_size for file in (BUNDLED / name).iterdir()) < 4_000_000


def test_heads_are_refused_where_they_do_not_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = TARGET.reference
    folder = shutil.copytree(BUNDLED / "medusa", tmp_path / "copy")
    with pytest.raises(ValueError, match="draft mine: .*it was trained for other weights"):
        prepared(tiny, EngineConfig(model="x", draft=(f"mine={folder}",)))
    configure(folder, target_fingerprint=None)
    with pytest.raises(ValueError, match="draft mine: .*hidden_size is 256"):
        prepared(tiny, EngineConfig(model="x", draft=(f"mine={folder}",)))
    assert prepared(tiny, EngineConfig(model="x")).bytes_per_block() == 0
    with caplog.at_level("WARNING"):
        bundled = prepared(tiny, with_bundled_drafts(EngineConfig()))
    assert "no medusa drafter" in caplog.text
    assert "trained for other weights" in caplog.text
    with pytest.raises(DrafterUnavailableError, match="trained for other weights"):
        bundled.load("medusa", None, 256)  # type: ignore[arg-type]
    with pytest.raises(DrafterUnavailableError, match="the setting draft names one"):
        bundled.load("p_eagle", None, 256)  # type: ignore[arg-type]


def test_heads_of_one_method_serve_side_by_side(tmp_path: Path) -> None:
    folder = write_heads(tmp_path)["eagle3"]
    config = EngineConfig(model="x", draft=(f"left={folder}",))
    one = prepared(TARGET.reference, config)
    both = prepared(TARGET.reference, replace(config, draft=(*config.draft, f"right={folder}")))
    assert [*both.networks] == ["left", "right"]
    assert both.networks["left"] is not both.networks["right"]
    # Keys and values of a block's tokens, and the states behind its last one.
    size = (config.block_size * 2 * 2 * 16 + 3 * HIDDEN_SIZE) * 4
    assert (one.bytes_per_block(), both.bytes_per_block()) == (size, 2 * size)
    assert both.sizes["right"] == sum(map(torch.Tensor.numel, eagle_network().parameters()))


def test_mtp_is_read_from_the_checkpoint_that_is_served(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "target", tiny_llama())
    heads = prepared(TARGET.reference, EngineConfig(model=str(folder), draft=("second=mtp",)))
    assert isinstance(heads.networks["second"], MtpNetwork)
    tiny_llama().save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="draft mtp: .*bare: the checkpoint has no MTP module"):
        prepared(TARGET.reference, EngineConfig(model=str(tmp_path / "bare"), draft=("mtp",)))
    file = write_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0)
    with pytest.raises(ValueError, match="tiny.gguf: its MTP module: the file has no multi-token"):
        prepared(TARGET.reference, EngineConfig(model=str(file), draft=("mtp",)))


@pytest.mark.skipif(not is_exact(), reason="this CPU has no products in 8 bits that are exact")
@pytest.mark.parametrize(("method", "num_bits"), [("int4", 4), ("int8", 8)])
def test_a_head_has_no_more_bits_than_its_target_but_where_tokens_are_chosen(
    method: str, num_bits: int
) -> None:
    target = tiny_llama()
    names = [name for name, each in target.named_modules() if isinstance(each, torch.nn.Linear)]
    # An output head in 8 bits leaves a target in 4 bits one of 4 bits.
    quantize_linears(target, [each for each in names if each != "lm_head"], target.dtype, method)
    quantize_linears(target, ["lm_head"], target.dtype)
    network = eagle_network()
    network.lm_head = torch.nn.Linear(HIDDEN_SIZE, TINY_VOCAB, bias=False)
    quantize_head(network, target)
    bits = {name: packed.format.bits for name, packed in packed_weights(network)}
    assert bits.pop("lm_head") == 8
    assert set(bits.values()) == {num_bits}
    assert network.lm_head(torch.ones(1, HIDDEN_SIZE)).dtype == torch.float32


@pytest.mark.skipif(not is_exact(), reason="this CPU has no products in 8 bits that are exact")
def test_a_target_in_8_bits_keeps_its_text_under_all_heads(tmp_path: Path) -> None:
    """Its heads get 8 bits where they are large enough, and its output head is that of some."""
    folder = write_checkpoint(tmp_path / "target", tiny_llama())
    heads = write_heads(tmp_path)
    config = EngineConfig(
        model=str(folder),
        dtype="bfloat16",
        quantization="int8",
        draft=("mtp", *(f"{name}={path}" for name, path in heads.items())),
        num_blocks=64,
        max_num_batched_tokens=128,
        num_threads=1,
    )
    engine = build_engine_for(load_model(str(folder), CPU, "bfloat16"), None, config)
    assert engine.info.quantization is not None
    assert engine.info.determinism == "exact"
    sampling = SamplingParams(NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
    driver = Driver(engine.core).run(request("none", circle_prompt(1), sampling))
    for drafter in ("mtp", *heads):
        for width in (1, 3):
            name = f"{drafter}-{width}"
            wanted = drafting(drafter, num_tokens=6, width=width)
            driver.run(request(name, circle_prompt(1), sampling, wanted))
            assert signature(driver, name) == signature(driver, "none"), name
        accounts = [driver.finishes[f"{drafter}-{width}"].speculative for width in (1, 3)]
        num_accepted = sum(each.num_accepted_tokens for each in accounts)
        assert 0 < num_accepted < sum(each.num_draft_tokens for each in accounts), drafter


def test_a_served_model_drafts_with_its_heads() -> None:
    """The bundled model as it is served: its own type, packed layers, exact mode."""
    engine, tokenizer = build_engine(
        EngineConfig(drafters=("none", "medusa"), num_blocks=64, max_num_batched_tokens=128)
    )
    assert "medusa" in engine.info.drafters
    assert engine.info.drafts.keys() == {"medusa"}
    assert engine.info.drafts["medusa"].hidden_layers == (NORMED,)
    prompt = tokenizer("def read_lines(path):\n    with open(path) as handle:\n")["input_ids"]
    sampling = SamplingParams(max_tokens=32, temperature=0.0)
    driver = Driver(engine.core).run(request("none", prompt, sampling, PLAIN))
    driver.run(request("heads", prompt, sampling, drafting("medusa", num_tokens=6, width=2)))
    assert driver.token_ids["heads"] == driver.token_ids["none"]
    assert driver.finishes["heads"].speculative.num_accepted_tokens > 0
    assert (engine.info.drafts["medusa"].agreement or 0) > 0
