"""Attention backends: one more is one file, asked for by name, and refused with the reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import attention
from engine.attention import backend
from engine.attention.backend import (
    AttentionBackend,
    AttentionNeeds,
    KVShape,
    attention_backend,
    attention_backends,
    build_attention,
    choose_backend,
)
from engine.batch import InputBatch, InputTensors, build_batch
from engine.build import build_engine, build_engine_for
from engine.config import EngineConfig
from engine.model.loader import attach_attention
from engine.model.runner import ModelRunner
from kvpool.store import KVStore
from worlds.engine_driver import ORACLE, OracleDrafter, register_oracle, write_all
from worlds.tiny_models import CPU, VOCAB_SIZE, chunk, random_ids, tiny_model

ROOT = Path(__file__).resolve().parents[3]
NEEDS = AttentionNeeds("fast", CPU, torch.float32, 4, [KVShape(4, 2, 8, 4)] * 2)
SMALL: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 64,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "check_integrity": True,
}


@pytest.fixture
def one_more_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The file of the documentation's page, beside those of ``engine/attention``, and nothing else."""
    monkeypatch.setattr(backend, "_BACKENDS", dict(attention_backends()))
    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    source = page.partition('row_by_row.py"\n')[2].partition("```")[0]
    (tmp_path / "row_by_row.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(attention, "__path__", [*attention.__path__, str(tmp_path)])
    yield "row_by_row"
    sys.modules.pop("engine.attention.row_by_row", None)


def test_a_file_in_the_folder_is_a_backend_that_serves_the_same_text(
    one_more_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_ids(1, 9) * 2, random_ids(2, 40), random_ids(3, 4) * 3]
    usual = build_engine_for(tiny_model("llama"), None, EngineConfig(**SMALL))
    assert usual.info.attention_backend == "paged"
    expected, _ = write_all(usual, prompts, 24)
    texts = [prompt + written for prompt, written in zip(prompts, expected, strict=True)]
    register_oracle(monkeypatch, lambda: OracleDrafter(texts, VOCAB_SIZE))
    config = EngineConfig(**SMALL, attention_backend=one_more_file)
    engine = build_engine_for(tiny_model("llama"), None, config)
    assert engine.info.attention_backend == one_more_file
    used: Any = engine.core.runner
    assert type(used.attention).__module__ == "engine.attention.row_by_row"
    written, num_accepted = write_all(engine, prompts, 24, ORACLE)
    assert written == expected
    assert num_accepted > 0


def test_names_that_nothing_has_are_refused_before_a_model_is_loaded() -> None:
    config = EngineConfig(model="/nowhere/at/all", attention_backend="flash")
    with pytest.raises(ValueError, match=r"no 'flash'; there are paged, .*sdpa"):
        build_engine(config)


@pytest.mark.parametrize(
    ("name", "needs", "reason"),
    [
        ("sdpa", {"determinism": "exact"}, "sdpa: it is for determinism fast, not exact"),
        ("row_by_row", {"device": torch.device("meta")}, "row_by_row: it runs on cpu, not on meta"),
        ("paged", {"dtype": torch.float64}, "paged: it knows no torch.float64"),
    ],
)
@pytest.mark.usefixtures("one_more_file")
def test_what_a_backend_cannot_serve_is_refused_with_the_reason(
    name: str, needs: dict[str, Any], reason: str
) -> None:
    wanted = replace(NEEDS, **needs)
    with pytest.raises(ValueError, match=reason):
        build_attention(wanted, 8, name)
    # A draft model takes another one instead.
    expected = "paged" if wanted == replace(NEEDS, determinism="exact") else "sdpa"
    assert choose_backend(name, wanted, strict=False).name == expected
    assert choose_backend(None, wanted).name == expected


def test_an_engine_refuses_a_backend_that_does_not_keep_its_determinism() -> None:
    config = EngineConfig(**SMALL, attention_backend="sdpa", determinism="exact")
    with pytest.raises(ValueError, match="sdpa: it is for determinism fast, not exact"):
        build_engine_for(tiny_model("llama"), None, config)


def test_a_backend_brings_the_layout_of_its_store(one_more_file: str) -> None:
    row_by_row: Any = attention_backends()[one_more_file]

    class OwnStore(KVStore):
        """Another layout of keys and values."""

    @attention_backend("own")
    class Own(row_by_row):
        store_class = OwnStore
        rank = 2

        dim_multiple = 8

    made = build_attention(NEEDS, 6)
    assert (type(made), type(made.store)) == (Own, OwnStore)
    assert (made.store.num_blocks, made.store.block_size, len(made.store.key)) == (6, 4, 2)
    assert made.store.num_bytes == 6 * Own.bytes_per_block(NEEDS) == 6 * 2 * 2 * (8 + 8) * 4 * 4
    # Over a store of the plain layout it is not taken, and asked for by name refused.
    plain = build_attention(NEEDS, 6, "sdpa").store
    assert build_attention(NEEDS, plain).name == "sdpa"
    with pytest.raises(ValueError, match="own: it does not read a store of this layout"):
        build_attention(NEEDS, plain, "own")


def test_two_backends_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two attention backends are called 'sdpa'"):
        attention_backend("sdpa")(Watching)


def test_a_backend_whose_steps_can_be_run_again_says_so() -> None:
    able = {name for name, each in attention_backends().items() if each.can_capture}
    assert able == {"paged"}
    able = {name for name, each in attention_backends().items() if each.can_graph}
    assert able == {"triton"}


class Watching(AttentionBackend):
    """Keeps the addresses of every step's inputs."""

    determinisms = frozenset({"fast"})

    def __init__(self, store: KVStore, needs: AttentionNeeds) -> None:
        super().__init__(store, needs)
        self.inner = build_attention(needs, store, "sdpa")
        self.addresses: list[list[int]] = []

    def plan(self, batch: InputBatch, inputs: InputTensors) -> Any:
        assert inputs.slot_mapping.tolist() == batch.slot_mapping
        self.addresses.append([each.data_ptr() for each in inputs])
        return self.inner.plan(batch, inputs)


def test_inputs_of_equal_steps_reach_a_backend_at_the_same_addresses() -> None:
    model = tiny_model("llama")
    needs = AttentionNeeds.of(model, attach_attention(model), "fast", 4)
    watching = Watching(KVStore(num_blocks=16, device=CPU, **needs.store_sizes()), needs)
    runner = ModelRunner(model, watching)
    text = random_ids(1, 30)
    base = 0
    for count in (9, 1, 17, 1, 2):
        runner.forward(build_batch([chunk(text, base, count, range(8))], 4))
        base += count
    assert len(watching.addresses) == 5
    assert watching.addresses[1] == watching.addresses[3]
