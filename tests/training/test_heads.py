"""Training heads: for a model that counts in circles of eight, in seconds, and served afterwards."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from engine.config import EngineConfig
from engine.drafting.heads import (
    CONFIG,
    HeadsRefusedError,
    prepare_heads,
    read_heads,
    target_facts,
    weights_fingerprint,
)
from engine.model.loader import load_model
from training import heads
from training.head_data import batches, load_texts, read_prompts, write_samples
from training.head_losses import MedusaLearner, Target
from training.tokenizer import encode, save_tokenizer, train_tokenizer

VOCAB, HIDDEN = 320, 32
TEXTS = ["def total(prices):\n    return sum(prices)\n", "for name in names:\n    print(name)\n"]


def counting_model(seed: int = 0) -> LlamaForCausalLM:
    """Token t is followed by the next of its circle: the first eight dimensions say where on the
    circle, the others which circle."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            bos_token_id=0,
            eos_token_id=None,
        )
    )
    place = torch.nn.functional.one_hot(torch.arange(VOCAB) % 8, 8).float() * 3
    circle = torch.randn(VOCAB // 8, HIDDEN - 8).repeat_interleave(8, 0)
    embeddings = torch.cat([place, circle], dim=1)
    before = [token // 8 * 8 + (token - 1) % 8 for token in range(VOCAB)]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.copy_(embeddings[before])
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    counting_model().save_pretrained(path)
    save_tokenizer(train_tokenizer(TEXTS, VOCAB), path)
    lines = [json.dumps({"prompt": text[: 6 + i]}) for i in range(6) for text in TEXTS]
    lines.append(json.dumps({"messages": [{"role": "user", "content": "count"}]}))
    (path / "prompts.jsonl").write_text("\n".join(lines))
    return path


def arguments(folder: Path, kind: str, out: Path, max_steps: int) -> list[str]:
    found = ["--model", str(folder), "--prompts", str(folder / "prompts.jsonl"), "--kind", kind]
    found += ["--out", str(out), "--max-steps", str(max_steps), "--minutes", "5", "--lr", "0.01"]
    found += ["--written", "48", "--new-tokens", "16", "--num-heads", "2", "--save-every", "0.02"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "steps"), [("medusa", 160), ("eagle", 50)])
def test_heads_learn_what_the_target_says_and_are_served(
    folder: Path, tmp_path: Path, kind: str, steps: int
) -> None:
    first = heads.main(arguments(folder, kind, tmp_path, 2))
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["step"] == 2
    samples = (tmp_path / "samples.jsonl").read_text()
    accuracy = heads.main(arguments(folder, kind, tmp_path, steps))
    assert (tmp_path / "samples.jsonl").read_text() == samples, "a later run writes them again"
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == steps
    assert min(accuracy) > 0.8 > first[0]
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["num_training_steps"] == steps
    assert config["held_out_top1"] == pytest.approx(accuracy, abs=1e-4)

    setting = {"medusa": "medusa_heads", "eagle": "eagle_head"}[kind]
    target = load_model(str(folder), torch.device("cpu"))
    config_of_engine = EngineConfig(model=str(folder), drafters=(kind,), **{setting: str(tmp_path)})
    assert prepare_heads(target, config_of_engine).facts == target_facts(target)
    other = counting_model(seed=1)
    with pytest.raises(ValueError, match=f"{setting}: .*other weights"):
        prepare_heads(other, config_of_engine)
    with pytest.raises(ValueError, match=f"holds a run with kind {kind}"):
        heads.main(arguments(folder, {"medusa": "eagle", "eagle": "medusa"}[kind], tmp_path, 3))


def test_the_target_writes_greedily_and_by_chance(folder: Path, tmp_path: Path) -> None:
    tok = AutoTokenizer.from_pretrained(folder)
    texts = load_texts(tok, None, folder / "prompts.jsonl", "")
    model = load_model(str(folder), torch.device("cpu"))
    path = tmp_path / "samples.jsonl"
    written = write_samples(model, texts, random.Random(0), 32, 8, path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == written
    assert {len(each) > 8 for each in written} == {True}
    prompts = {tuple(prompt) for prompt in texts.prompts}
    assert {tuple(each[:-8]) for each in written} <= prompts
    greedy = written[0]
    for token, after in zip(greedy[-8:], greedy[-7:], strict=False):
        assert after == token // 8 * 8 + (token + 1) % 8
    groups = batches(texts, written, random.Random(0), 100, 4)
    for _ in range(5):
        group = next(groups)
        assert len(group) * max(map(len, group)) <= 100 or len(group) == 1


def test_a_prompt_file_that_says_neither_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_prompts(AutoTokenizer.from_pretrained(folder), path)
    assert read_prompts(None, None) == []
    with pytest.raises(SystemExit):
        heads.parse(["--model", "m", "--kind", "medusa", "--out", "o", "--minutes", "1"])


def test_untrained_medusa_heads_repeat_the_target() -> None:
    """Head i at row t is judged by what the target says at row t + 1 + i."""
    model = counting_model()
    target = Target(model.requires_grad_(False))
    circle = [8 + step % 8 for step in range(24)]
    batch = target.read([circle])
    learner = MedusaLearner(HIDDEN, 2, 1)
    result = learner.run(target, batch, random.Random(0), 100)
    assert result.num_rows == 22
    assert result.num_hits == [0, 0], "an untrained head names the anchor again"
    logits = target.logits(batch.hidden[0])
    assert logits.argmax(-1).tolist() == [8 + (step + 1) % 8 for step in range(24)]


def test_a_folder_is_refused_with_the_reason(folder: Path, tmp_path: Path) -> None:
    facts = target_facts(load_model(str(folder), torch.device("cpu")))
    config = tmp_path / CONFIG

    def expect_refusal(told: str) -> None:
        with pytest.raises(HeadsRefusedError, match=told):
            read_heads(tmp_path, "medusa", facts).sizes("num_heads")

    expect_refusal("does not hold config.json")
    heads.main(arguments(folder, "medusa", tmp_path, 1))
    read_heads(tmp_path, "medusa", facts)
    good = json.loads(config.read_text())
    wrong = {"kind": "eagle", "hidden_size": 64, "vocab_size": None, "num_heads": 0}
    for field, value in wrong.items():
        config.write_text(json.dumps(good | {field: value}))
        expect_refusal(f"{field} is ")
    config.write_text("[")
    expect_refusal("cannot be read")


def test_a_fingerprint_is_of_values_not_of_their_type() -> None:
    model = counting_model()
    fingerprint = weights_fingerprint(model)
    assert weights_fingerprint(model.to(torch.bfloat16)) == fingerprint
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.1)
    assert weights_fingerprint(model) != fingerprint


def test_texts_are_tokens_of_the_corpus(folder: Path, tmp_path: Path) -> None:
    tok = AutoTokenizer.from_pretrained(folder)
    rows = [json.dumps({"text": text, "path": "a", "package": "b"}) for text in TEXTS]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    texts = load_texts(tok, tmp_path, None, "train.jsonl")
    assert texts.edits
    sequence = texts.sequence(random.Random(3))
    assert sequence[0] == tok.bos_token_id
    prompt = texts.prompt(random.Random(3))
    assert sequence[: len(prompt)] == prompt or encode(tok, "<|assistant|>")[0] == prompt[-1]
