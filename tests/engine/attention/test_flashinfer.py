"""Attention by FlashInfer, over a stand-in that takes and answers what the package says: every row
against a plain sum over what it may see and against torch's own kernels."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.backend import (
    AttentionNeeds,
    AttentionOptions,
    KVShape,
    build_attention,
    choose_backend,
)
from engine.batch import InputBuffers
from engine.build import build_engine_for
from engine.config import EngineConfig
from engine.errors import UnsupportedModelError
from worlds.attended import CPU, PLAIN, TOLERANCE, Part, World, parts
from worlds.engine_driver import ORACLE, OracleDrafter, register_oracle, write_all
from worlds.fake_flashinfer import PagedPrefill, fake_flashinfer
from worlds.lanes import examples
from worlds.tiny_models import VOCAB_SIZE, random_ids, tiny_model

TREE = (-1, -1, 0, 1, 1, 3, 2)
HALF = torch.bfloat16


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with fake_flashinfer():
        yield


def world(
    *shape: int,
    dtype: torch.dtype = HALF,
    size: int = 16,
    kv_dtype: torch.dtype | None = None,
    backend: str = "flashinfer",
) -> World:
    heads, kv_heads, dim = shape
    return World(heads, kv_heads, dim, dim, dtype, size, kv_dtype, backend, "fast")


@settings(deadline=None, max_examples=examples(30))
@given(
    asked=parts(),
    shape=st.sampled_from([(4, 2, 64), (3, 3, 64), (5, 1, 128)]),
    dtype=st.sampled_from([torch.float16, HALF]),
    kv_dtype=st.sampled_from([None, None, torch.float8_e4m3fn]),
    window=st.sampled_from([None, None, 1, 7, 40]),
    softcap=st.sampled_from([None, None, 3.0]),
    has_sinks=st.booleans(),
    size=st.sampled_from([16, 5]),
)
def test_every_row_gets_what_a_plain_sum_over_its_text_gives(
    asked: list[Part],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    size: int,
) -> None:
    made: dict[str, Any] = {"dtype": dtype, "size": size, "kv_dtype": kv_dtype}
    mine = world(*shape, **made)
    sinks = torch.linspace(-1, 2, shape[0]).to(dtype) if has_sinks else None
    options = AttentionOptions(0.1, window, softcap, sinks)
    reference = world(*shape, **made, backend="sdpa").step(asked, options)
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    for got, part, theirs in zip(mine.step(asked, options), asked, reference, strict=True):
        torch.testing.assert_close(got.double(), mine.expected(part, options), **close)
        torch.testing.assert_close(got, theirs, **{name: 2 * most for name, most in close.items()})


@pytest.mark.parametrize("window", [None, 2, 39])
@pytest.mark.parametrize("stored", [1, 4])
def test_nodes_that_steps_before_have_stored_are_seen(stored: int, window: int | None) -> None:
    mine, options = world(4, 2, 64), replace(PLAIN, window=window)
    (whole,) = mine.step([(0, 37, 0, TREE)], options)
    (rest,) = mine.step([(0, 37, 0, TREE)], options, stored=stored)
    torch.testing.assert_close(rest, whole[stored:], rtol=1e-2, atol=1e-2)


def test_layers_of_a_kind_share_a_plan_and_chains_and_trees_have_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned: list[tuple[bool, int]] = []
    plain = PagedPrefill.plan

    def counted(self: PagedPrefill, *arguments: Any, **named: Any) -> None:
        planned.append((named["custom_mask"] is not None, named["window_left"]))
        plain(self, *arguments, **named)

    monkeypatch.setattr(PagedPrefill, "plan", counted)
    mine = world(4, 2, 64)
    store, batch, rows = mine.lay([(0, 37, 2, ()), (1, 9, 1, TREE), (2, 30, 1, (-1, 0))])
    backend: Any = build_attention(mine.needs, store, "flashinfer")
    windowed = replace(PLAIN, window=8)
    for _ in range(2):
        plan = backend.plan(batch, InputBuffers(CPU, 64).fill(batch))
        outputs = [plan.attend(0, *rows, each) for each in (PLAIN, windowed) * 3]
        for first, again in zip(outputs[:2], outputs[2:4], strict=True):
            assert torch.equal(first, again)
        # A tree's window is in its mask.
        assert planned == [(False, -1), (True, -1), (False, 7), (True, -1)]
        planned.clear()
    assert len(backend._wrappers) == 4


# --- whole models ---

SMALL: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 40,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 2,
    "max_model_len": 64,
    "check_integrity": True,
    "determinism": "fast",
    "attention_backend": "flashinfer",
}


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_drafted_texts_are_gamma_0_s(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With windows in every other layer, and with soft caps, or sinks. Before, the engine's own check at
    start has compared logits with transformers', in chunks and in a tree."""
    model = tiny_model(name, HALF, head_dim=64)
    prompts = [random_ids(1, 9), random_ids(2, 20)]
    plain = build_engine_for(model, None, EngineConfig(**SMALL))
    assert plain.info.attention_backend == "flashinfer"
    expected, _ = write_all(plain, prompts, 12)
    texts = [prompt + written for prompt, written in zip(prompts, expected, strict=True)]
    register_oracle(monkeypatch, lambda: OracleDrafter(texts, VOCAB_SIZE))
    model = tiny_model(name, HALF, head_dim=64)
    engine = build_engine_for(model, None, EngineConfig(**SMALL))
    written, num_accepted = write_all(engine, prompts, 12, ORACLE)
    assert written == expected
    assert num_accepted > 0


@pytest.mark.parametrize(
    ("name", "forgotten", "where"),
    [("llama", "custom_mask", "draft tree"), ("gemma2", "window_left", "in chunks")],
)
def test_the_check_at_start_sees_what_the_package_gets_wrong(
    name: str, forgotten: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = PagedPrefill.plan

    def forgetful(self: PagedPrefill, *arguments: Any, **named: Any) -> None:
        named.pop(forgotten)
        plain(self, *arguments, **named | {"causal": True})

    monkeypatch.setattr(PagedPrefill, "plan", forgetful)
    with pytest.raises(UnsupportedModelError, match=where):
        build_engine_for(tiny_model(name, HALF, head_dim=64), None, EngineConfig(**SMALL))


# --- who it serves ---


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"shapes": [KVShape(4, 2, 64, 64), KVShape(2, 1, 96, 96)]}, "not 96 and 96"),
        ({"shapes": [KVShape(2, 2, 128, 64)]}, "64, 128 or 256 dimensions, not 128 and 64"),
        ({"dtype": torch.float32}, "float16 and bfloat16, not in torch.float32"),
        ({"kv_dtype": torch.float8_e5m2}, "no keys and values of torch.float8_e5m2"),
        ({"determinism": "exact"}, "determinism fast, not exact"),
        ({"device": torch.device("meta")}, "it runs on cpu, not on meta"),
    ],
)
def test_what_it_does_not_serve_is_refused_with_the_reason(
    changed: dict[str, Any], reason: str
) -> None:
    needs = replace(world(4, 2, 64).needs, **changed)
    with pytest.raises(ValueError, match=reason):
        choose_backend("flashinfer", needs)


def test_it_serves_those_who_ask_for_it_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs: AttentionNeeds = world(4, 2, 64).needs
    assert choose_backend("flashinfer", needs).name == "flashinfer"
    assert choose_backend(None, needs).name != "flashinfer"
    monkeypatch.setattr("engine.attention.flashinfer.find_spec", lambda _: None)
    with pytest.raises(ValueError, match="needs flashinfer-python, which is not installed"):
        choose_backend("flashinfer", needs)


def test_what_the_stand_in_takes_the_package_takes() -> None:
    """Where it is installed: a name or a default of its that changes is seen here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "flashinfer")
        package = pytest.importorskip("flashinfer")
    theirs = package.BatchPrefillWithPagedKVCacheWrapper
    for name in ("__init__", "plan", "run"):
        wanted = inspect.signature(getattr(PagedPrefill, name)).parameters
        found = inspect.signature(getattr(theirs, name)).parameters
        for each, parameter in wanted.items():
            default = found[each].default
            if isinstance(default, str) and isinstance(parameter.default, torch.dtype):
                default = getattr(torch, default)
            assert default == parameter.default, f"{name}, {each}"
