"""``slipstream pull`` and ``slipstream models``, on a stand-in hub and a cache of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.tools.models.memory import PROCESSES, Needs, needs_of
from worlds.commands import Run
from worlds.gguf_files import write_gguf
from worlds.hub import Hub, pointed_at, running

CONFIG = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
CONFIG |= {"hidden_size": 64, "max_position_embeddings": 1024}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    tiny = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    checkpoint = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": b"w" * 5000}
    repos = {"org/tiny-GGUF": {"tiny-Q4_K_M.gguf": tiny}, "org/plain": checkpoint}
    with running(Hub(repos)) as found:
        pointed_at(monkeypatch, found, tmp_path)
        yield found


def test_what_was_pulled_is_listed_with_what_it_takes(hub: Hub, run: Run) -> None:
    assert run("models") == ("", "no models are here: slipstream pull NAME\n")
    found = run("pull", "hf.co/org/tiny-GGUF")
    assert found.out.strip().endswith("tiny-Q4_K_M.gguf")
    assert found.err.endswith("slipstream serve org/tiny-GGUF:Q4_K_M\n")
    run("pull", "org/plain")
    plain, tiny = json.loads(run("models", "--json").out)
    assert (plain["name"], tiny["name"]) == ("org/plain", "org/tiny-GGUF:Q4_K_M")
    assert (plain["tokens"], tiny["tokens"]) == (1024, 256)
    # Of the second: two layers of two heads of 16, keys and values, in 16 bits.
    assert [each["per_1000_tokens"] for each in (plain, tiny)] == ["0.256 MB"] * 2
    lines = run("models").out.splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", "org/plain", "org/tiny-GGUF:Q4_K_M"]
    assert hub.served


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("org/tiny-GGUF:Q9", "org/tiny-GGUF:Q9: there is no Q9 in it; there are Q4_K_M ("),
        ("org/none", "org/none: there is no such model on the hub"),
        ("tiny", "'tiny' is not org/repo[:QUANT], nor its address on the hub"),
        ("https://example.com/a/b", "'https://example.com/a/b' is not org/repo[:QUANT]"),
    ],
)
def test_what_cannot_be_pulled_is_said_in_a_line(hub: Hub, name: str, said: str, run: Run) -> None:
    found = run("pull", name, status=2)
    assert found.out == ""
    (line,) = found.err.splitlines()
    assert line.startswith(f"slipstream: {said}")
    assert not hub.served


def test_what_is_recommended_is_a_table(run: Run) -> None:
    lines = run("models", "--recommend").out.splitlines()
    assert lines[0].startswith("MACHINE")
    assert len(lines) > 5
    refused = run("models", "--recommend", "--memory-speed", 0, status=2)
    assert "--memory-speed" in refused.err
    refused = run("models", "--memory-speed", 100, status=2)
    assert "--memory-speed is for --recommend" in refused.err


def needs(folder: Path, **config: object) -> Needs | None:
    (folder / "config.json").write_text(json.dumps(config))
    return needs_of(folder, 10)


def test_needs_are_read_off_configurations(tmp_path: Path) -> None:
    assert needs(tmp_path, **CONFIG) == Needs(10, 4 * 2 * 2 * 8 * 2, 1024)
    assert needs(tmp_path, text_config=CONFIG) == needs(tmp_path, **CONFIG)
    assert needs(tmp_path, **CONFIG | {"head_dim": 16}) == Needs(10, 4 * 2 * 2 * 16 * 2, 1024)
    kinds = ["linear_attention", "linear_attention", "sliding_attention", "full_attention"]
    hybrid = needs(tmp_path, **CONFIG, layer_types=kinds)
    assert hybrid == Needs(10, 2 * 2 * 2 * 8 * 2, 1024)
    # As Granite 4 spells them.
    assert (
        needs(tmp_path, **CONFIG, layer_types=["mamba", "mamba", "attention", "attention"])
        == hybrid
    )
    latent = {"kv_lora_rank": 4, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 4}
    assert needs(tmp_path, **CONFIG | latent) == Needs(10, 4 * 8 * (8 + 4) * 2, 1024)
    assert needs(tmp_path, hidden_size=4) is None
    assert needs(tmp_path, **CONFIG | {"layer_types": [1, 1]}) is None
    no_heads = {"num_attention_heads": 0, "head_dim": None}
    assert needs(tmp_path, **CONFIG | no_heads) is None
    (tmp_path / "config.json").write_text("[]")
    assert needs_of(tmp_path, 10) is None
    assert needs_of(tmp_path / "none.gguf", 10) is None


def test_needs_are_read_off_headers(tmp_path: Path) -> None:
    length = 32_768
    path = write_gguf(tmp_path / "a.gguf", values={"llama.context_length": length})
    found = needs_of(path, 1000)
    assert found == Needs(1000, 2 * 2 * 2 * 16 * 2, length)
    assert found.memory == PROCESSES + 1000 + 8192 * found.per_token
    every = write_gguf(tmp_path / "b.gguf", values={"llama.full_attention_interval": 2})
    assert needs_of(every, 1) == Needs(1, 2 * 2 * 16 * 2, 256)
    latent = {"llama.attention.key_length_mla": 8, "llama.attention.value_length_mla": 4}
    path = write_gguf(tmp_path / "c.gguf", values=latent)
    assert needs_of(path, 1) == Needs(1, 2 * 4 * 12 * 2, 256)
