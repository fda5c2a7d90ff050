"""Heads on the target's hidden states, in the engine: no text changes, and right heads are believed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.base import Drafter, DrafterUnavailableError, DraftRequest, DraftSampling, DraftShape
from drafters.model.eagle import EagleDrafter
from drafters.model.medusa import MedusaDrafter
from drafters.model.protocol import Candidates
from drafters.registry import build_drafters
from drafters.tree import ROOT, DraftTree
from engine.build import build_engine
from engine.config import EngineConfig
from engine.drafting.eagle import FeatureLayer, eagle_bytes_per_block, load_layer
from engine.drafting.heads import (
    CONFIG,
    WEIGHTS,
    HeadsRefusedError,
    TargetFacts,
    prepare_heads,
    read_heads,
)
from engine.drafting.medusa import MedusaHeads, ResidualHeads, load_medusa
from engine.model.loader import BUNDLED, load_model
from engine.request.params import PLAIN, GenerationRequest, SamplingParams
from engine.sampling.noise import gumbel_list, request_key
from engine.transfer import Readback, read_now
from worlds.engine_harness import (
    TINY_VOCAB,
    Driver,
    Setup,
    TinyTarget,
    circle_prompt,
    drafting,
    request,
)
from worlds.trained_heads import (
    EAGLE_SIZES,
    HIDDEN_SIZE,
    TARGET,
    eagle_layer,
    eagle_model,
    medusa_heads,
)

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
NUM_TOKENS = 24
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0),
    "sampled": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, top_p=0.95, seed=3),
}


MAKERS: dict[str, Callable[[Setup], Drafter]] = {
    "medusa": lambda _: MedusaDrafter(medusa_heads()),
    "eagle": lambda setup: EagleDrafter(eagle_model(eagle_layer(), setup)),
}


def candidates_of(
    heads: MedusaHeads, hidden: Sequence[torch.Tensor], asks: Sequence[DraftRequest], num: int
) -> list[list[Candidates]]:
    return heads.read_now(partial(heads.begin, hidden, asks, num))


def run(drafter: str, setup: Setup, *requests: GenerationRequest) -> Driver:
    drafters = build_drafters() | {drafter: MAKERS[drafter](setup)}
    return Driver(TARGET.core(setup.but(drafters=drafters))).run(*requests)


def plain(each: GenerationRequest) -> list[int]:
    return TARGET.recomputed(each, NUM_TOKENS)


# --- the same text ---


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("drafter", MAKERS)
def test_drafts_are_drawn_where_the_verification_asks_for_it(drafter: str, width: int) -> None:
    """The law is the verifiers' affair; here: what is drawn is told, and greedy texts stay the same."""
    wanted = replace(
        drafting(drafter, num_tokens=6, width=width),
        verification="rejection",
        options={"min_confidence": 0.0} if drafter == "eagle" else {},
    )
    requests = [
        request(f"r{index}", circle_prompt(index), replace(sampling, seed=index), wanted)
        for index, sampling in enumerate(SAMPLINGS.values())
    ]
    driver = run(drafter, Setup(prefill_chunk=7), *requests)
    for each in requests:
        stats = driver.finishes[each.request_id].speculative
        assert stats.num_failed_drafts == 0
        assert stats.num_draft_tokens > 20
    assert driver.token_ids["r0"] == plain(requests[0])


# --- right heads are believed ---


class OracleHeads:
    """Knows a text by its hidden states and says what follows each of them."""

    num_heads = 4

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        with torch.inference_mode():
            body = TARGET.reference.base_model(torch.tensor([token_ids]))
        self._hidden = body.last_hidden_state[0]

    def read_now(self, begin: Callable[[Readback], Callable[[], Any]]) -> Any:
        return read_now(begin)

    def begin(
        self, hidden: Sequence[torch.Tensor], asks: Sequence[DraftRequest], num: int, readback: Any
    ) -> Callable[[], list[list[Candidates]]]:
        del readback
        assert num > 0
        assert len(asks) == len(hidden)
        return lambda: [self._after(row) for row in hidden]

    def _after(self, row: torch.Tensor) -> list[Candidates]:
        position = int((self._hidden - row).abs().sum(-1).argmin())
        torch.testing.assert_close(row, self._hidden[position], atol=2e-4, rtol=1e-3)
        return [
            Candidates([self._token_ids[position + 2 + head]], [0.99])
            for head in range(self.num_heads)
        ]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_medusas_heads_predict_what_follows_the_anchor(sampling: str) -> None:
    each = request("r", circle_prompt(3), SAMPLINGS[sampling], drafting("medusa", num_tokens=4))
    text = [*each.prompt_token_ids, *TARGET.recomputed(each, NUM_TOKENS + 8)]
    drafters = {"medusa": MedusaDrafter(OracleHeads(text))}
    driver = Driver(TARGET.core(Setup(prefill_chunk=5, drafters=drafters))).run(each)
    assert driver.token_ids["r"] == text[24 : 24 + NUM_TOKENS]
    stats = driver.finishes["r"].speculative
    assert stats.num_draft_tokens > 12
    assert stats.num_accepted_tokens == stats.num_draft_tokens


def test_a_head_that_is_all_zeros_says_what_the_target_says() -> None:
    output_head = TARGET.reference.get_output_embeddings()
    heads = MedusaHeads(ResidualHeads(2, 2, HIDDEN_SIZE), output_head, TINY_VOCAB)
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
    heads = MedusaHeads(ResidualHeads(3, 1, HIDDEN_SIZE), output_head, TINY_VOCAB)
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


def test_each_head_and_row_gets_its_own_product() -> None:
    torch.manual_seed(2)
    heads = ResidualHeads(3, 2, HIDDEN_SIZE).requires_grad_(False)
    torch.nn.init.normal_(heads.weight)
    torch.nn.init.normal_(heads.bias)
    hidden = torch.randn(4, HIDDEN_SIZE)
    states = heads(hidden)
    row, head = random.Random(0).randrange(4), 1
    state = hidden[row]
    for layer in range(2):
        inner = state @ heads.weight[layer, head] + heads.bias[layer, head, 0]
        state = state + inner * torch.sigmoid(inner)
    torch.testing.assert_close(states[head, row], state, atol=1e-4, rtol=1e-4)


class OracleLayer(torch.nn.Module):
    """Knows a text's states: checks what each row reads and answers with the row's own state."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        super().__init__()
        self.token_norm = torch.nn.RMSNorm(HIDDEN_SIZE)
        self._ids = torch.tensor(token_ids)
        with torch.inference_mode():
            self._hidden = TARGET.reference.base_model(self._ids[None]).last_hidden_state[0]
        self.num_rows = 0

    def forward(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        slipstream_plan: object,
    ) -> torch.Tensor:
        assert slipstream_plan is not None
        at = position_ids[0]
        before = torch.where(at[:, None] > 0, self._hidden[at - 1], 0.0)
        torch.testing.assert_close(hidden[0], before, atol=2e-4, rtol=1e-3)
        wanted = TARGET.reference.get_input_embeddings()(self._ids[at])
        torch.testing.assert_close(embeddings[0], wanted)
        self.num_rows += len(at)
        return self._hidden[at][None]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_eagles_rows_read_their_token_and_the_state_before_it(sampling: str) -> None:
    each = request("r", circle_prompt(3), SAMPLINGS[sampling], drafting("eagle", num_tokens=4))
    text = [*each.prompt_token_ids, *TARGET.recomputed(each, NUM_TOKENS + 8)]
    setup = Setup(prefill_chunk=5)
    layer = OracleLayer(text)
    drafters = {"eagle": EagleDrafter(eagle_model(layer, setup))}
    driver = Driver(TARGET.core(setup.but(drafters=drafters))).run(each)
    assert driver.token_ids["r"] == text[24 : 24 + NUM_TOKENS]
    stats = driver.finishes["r"].speculative
    assert stats.num_draft_tokens > 12
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    assert layer.num_rows > len(text)


def test_eagles_candidates_are_those_of_a_forward_over_the_whole_path() -> None:
    """Chunked prompts, trees in rounds, accepted rows fed again: all as if each path were run alone."""
    setup = Setup(prefill_chunk=5)
    layer = eagle_layer()
    model = eagle_model(layer, setup)
    trees: list[tuple[list[int], DraftTree]] = []

    class Watched(EagleDrafter):
        def begin(
            self, requests: Sequence[DraftRequest], readback: Any
        ) -> Callable[[], list[DraftTree]]:
            text, finish = list(requests[0].token_ids), super().begin(requests, readback)

            def watched() -> list[DraftTree]:
                found = finish()
                trees.append((text, found[0]))
                return found

            return watched

    each = request(
        "r",
        circle_prompt(2),
        SAMPLINGS["greedy"],
        drafting("eagle", num_tokens=7, width=2, min_confidence=0.0),
    )
    drafters = {"eagle": Watched(model)}
    Driver(TARGET.core(setup.but(drafters=drafters))).run(each)

    dense = FeatureLayer(HIDDEN_SIZE, EAGLE_SIZES, "sdpa").requires_grad_(False)
    dense.load_state_dict(layer.state_dict())
    num_checked = 0
    for text, tree in trees:
        with torch.inference_mode():
            known = TARGET.reference.base_model(torch.tensor([text])).last_hidden_state[0, :-1]
        for node, parent in enumerate(tree.parents):
            path = path_to(tree, parent)
            ranked = expected_tokens(dense, [*text, *path], known)
            assert tree.token_ids[node] in ranked[:2]
            if list(tree.parents).index(parent) == node:
                assert tree.token_ids[node] == ranked[0]
            num_checked += 1
    assert num_checked > 50


def path_to(tree: DraftTree, node: int) -> list[int]:
    path: list[int] = []
    while node != ROOT:
        path.insert(0, tree.token_ids[node])
        node = tree.parents[node]
    return path


@torch.inference_mode()
def expected_tokens(dense: FeatureLayer, token_ids: list[int], known: torch.Tensor) -> list[int]:
    """Best first: what the layer expects after the tokens, of which all but the last ones have known
    states; theirs are found one by one."""
    embeddings = TARGET.reference.get_input_embeddings()(torch.tensor([token_ids]))
    states = torch.cat([torch.zeros(1, HIDDEN_SIZE), known])
    while len(states) < len(token_ids):
        expected = dense(embeddings[:, : len(states)], states[None])[0]
        states = torch.cat([states, expected[-1:]])
    last = dense(embeddings, states[None])[0, -1]
    logits = TARGET.reference.get_output_embeddings()(last)
    return logits.argsort(descending=True).tolist()  # type: ignore[no-any-return]


# --- the engine's own ---


def test_the_bundled_heads_fit_the_bundled_target() -> None:
    """If this fails, the target changed: train its heads again (docs/drafters/heads.md)."""
    target = load_model(str(BUNDLED / "target"), torch.device("cpu"))
    heads = prepare_heads(target, EngineConfig())
    assert eagle_bytes_per_block(heads) == 2 * 16 * 2 * 64 * target.dtype.itemsize
    for kind in ("medusa", "eagle"):
        folder = read_heads(BUNDLED / kind, kind, heads.facts)
        assert sum(file.stat().st_size for file in folder.path.iterdir()) < 4_000_000
    layer = load_layer(read_heads(BUNDLED / "eagle", "eagle", heads.facts), target.dtype, CPU)
    assert layer.body.rotary_emb.inv_freq.dtype == torch.float32


def test_heads_are_settings_and_refused_where_they_do_not_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = TinyTarget().reference
    with pytest.raises(ValueError, match="medusa_heads: .*does not hold config.json"):
        prepare_heads(target, EngineConfig(model="x", medusa_heads=str(tmp_path)))
    with pytest.raises(ValueError, match="eagle_head: .*hidden_size is 256"):
        prepare_heads(target, EngineConfig(model="x", eagle_head=str(BUNDLED / "eagle")))
    unused = EngineConfig(model="x", drafters=("none",), eagle_head=str(tmp_path / "none"))
    assert eagle_bytes_per_block(prepare_heads(target, unused)) == 0
    others = prepare_heads(target, EngineConfig(model="x"))
    with pytest.raises(DrafterUnavailableError, match="the setting medusa_heads names"):
        load_medusa(others, None)  # type: ignore[arg-type]
    with caplog.at_level("WARNING"):
        prepare_heads(target, EngineConfig())
    assert "no eagle drafter" in caplog.text
    assert "hidden_size is 256" in caplog.text


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_heads_that_lack_a_tensor_or_hold_no_numbers_are_refused_in_one_line(
    tmp_path: Path, kind: str
) -> None:
    shutil.copytree(BUNDLED / kind, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / CONFIG).read_text())
    facts = TargetFacts(config["hidden_size"], config["vocab_size"], config["target_fingerprint"])
    tensors = load_file(tmp_path / WEIGHTS)
    first = min(tensors)
    module = torch.nn.Module()
    save_file({name: each for name, each in tensors.items() if name != first}, tmp_path / WEIGHTS)
    with pytest.raises(HeadsRefusedError, match=r"Unexpected key\(s\)") as refused:
        read_heads(tmp_path, kind, facts).load_into(module)
    assert "\n" not in str(refused.value)
    tensors[first].view(-1)[-1] = float("nan")
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(HeadsRefusedError, match=f"{tmp_path}: .* not finite: {first}"):
        read_heads(tmp_path, kind, facts)
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:999])
    with pytest.raises(HeadsRefusedError, match=f"{tmp_path} cannot be read"):
        read_heads(tmp_path, kind, facts)


@pytest.mark.slow
def test_a_served_model_drafts_with_its_heads() -> None:
    """The bundled model as it is served: its own type, packed layers, exact mode."""
    engine, tokenizer = build_engine(
        EngineConfig(
            drafters=("none", "medusa", "eagle"), num_blocks=64, max_num_batched_tokens=128
        )
    )
    assert {"medusa", "eagle"} <= set(engine.info.drafters)
    prompt = tokenizer("def read_lines(path):\n    with open(path) as handle:\n")["input_ids"]
    sampling = SamplingParams(max_tokens=32, temperature=0.0)
    driver = Driver(engine.core)
    for drafter in ("none", "medusa", "eagle"):
        wanted = drafting(drafter, num_tokens=6, width=2) if drafter != "none" else PLAIN
        driver.run(request(drafter, prompt, sampling, wanted))
    assert driver.token_ids["medusa"] == driver.token_ids["eagle"] == driver.token_ids["none"]
    for drafter in ("medusa", "eagle"):
        assert driver.finishes[drafter].speculative.num_accepted_tokens > 0
