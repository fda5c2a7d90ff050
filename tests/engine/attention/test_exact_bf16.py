"""In exact mode a bf16 model gives a row the same bits in any step: alone, in any chunk, in a tree,
beside anyone. Token equality under speculation rests on this: near-ties are common in bf16."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from engine.attention import backend as attention
from engine.machine import can_pack
from engine.model.linear import pack_linears
from engine.model.loader import bundled_path, load_model
from engine.model.runner import ModelRunner
from engine.model.selfcheck import check_exact
from worlds.tiny_models import (
    CPU,
    chunk,
    make_runner,
    path_to,
    run_chunks,
    run_together,
    scattered_table,
    tiny_model,
    tree,
)

pytestmark = pytest.mark.skipif(
    not can_pack(CPU, torch.bfloat16), reason="this CPU has no bf16 instructions"
)
BLOCK_SIZE = 16
# Text beyond a chunk of keys, so that rows see one, and one and a part of another.
NUM_KEYS = 512
NUM_TOKENS = NUM_KEYS + 40
TREE = (-1, -1, 0, 1, 1, 3, 2, 5, 5)


def has_bundled_model() -> bool:
    try:
        bundled_path("target")
    except FileNotFoundError:
        return False
    return True


MODELS = [
    # A down projection longer than 1024, where oneDNN changes its kernel on CPUs without AMX.
    "llama",
    # Soft caps and windows.
    "gemma2",
    pytest.param(
        "bundled", marks=pytest.mark.skipif(not has_bundled_model(), reason="no bundled model here")
    ),
]


@cache
def runner_and_text(name: str) -> tuple[ModelRunner, list[int]]:
    if name == "bundled":
        folder = bundled_path("target")
        model = load_model(str(folder), CPU)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        source = Path(attention.__file__).read_text()
        text: list[int] = tokenizer(source)["input_ids"][:NUM_TOKENS]
    else:
        sizes = {"intermediate_size": 1152, "max_position_embeddings": 1024}
        model = tiny_model(name, torch.bfloat16, **sizes)
        generator = torch.Generator().manual_seed(3)
        text = torch.randint(2, 97, (NUM_TOKENS,), generator=generator).tolist()
    runner = make_runner(model, True, 256, BLOCK_SIZE)
    assert runner.model.dtype == torch.bfloat16
    assert pack_linears(runner.model, 1024, True) == set()
    return runner, text


def table(index: int) -> list[int]:
    return scattered_table(index, 36, first=40 * index, among=40)


@cache
def logits_in_one_go(name: str) -> torch.Tensor:
    runner, text = runner_and_text(name)
    return run_chunks(runner, text, (len(text),), table(0))


@pytest.mark.parametrize("name", MODELS)
def test_chunks_of_any_length_and_single_rows_have_the_bits_of_one_go(name: str) -> None:
    runner, text = runner_and_text(name)
    counts = [1, 2, 31, 32, 33, 1, 1, 64, 65, 7, 130, *(1,) * 6, 100, 3]
    counts += [1] * 12 + [len(text) - sum(counts) - 12]
    assert torch.equal(run_chunks(runner, text, counts, table(1)), logits_in_one_go(name))


@pytest.mark.parametrize("name", MODELS)
def test_rows_keep_their_bits_beside_ragged_neighbours(name: str) -> None:
    """Five requests over the same text at different places, in steps that mix chunks and single rows."""
    runner, text = runner_and_text(name)
    expected = logits_in_one_go(name)
    places = [0, 11, 90, 300, NUM_KEYS - 3]
    for index, place in enumerate(places):
        if place:
            run_chunks(runner, text, (place,), table(index))
    for counts in ((5, 1, 40, 1, 2), (1, 1, 1, 1, 1), (33, 2, 1, 9, 1), (1, 4, 1, 70, 6)):
        steps = [
            chunk(text, place, count, table(index))
            for index, (place, count) in enumerate(zip(places, counts, strict=True))
        ]
        for place, count, got in zip(places, counts, run_together(runner, steps), strict=True):
            assert torch.equal(got, expected[place : place + count])
        places = [place + count for place, count in zip(places, counts, strict=True)]


@pytest.mark.parametrize("base", [3, 200, NUM_KEYS - 4])
@pytest.mark.parametrize("name", MODELS)
def test_draft_rows_have_the_bits_of_the_text_they_guess(name: str, base: int) -> None:
    runner, text = runner_and_text(name)
    known = text[:base]
    # The path through nodes 1, 3, 5, 7 is the text; the others are not.
    right = dict(zip((1, 3, 5, 7), text[base:], strict=False))
    nodes = [right.get(node, (text[base] + 7 + node) % 97) for node in range(len(TREE))]
    leaves = set(range(len(TREE))) - set(TREE)
    run_chunks(runner, text, (base - 1,), table(0))
    run_chunks(runner, text, (40,), table(1))
    neighbour = chunk(text, 40, 9, table(1))
    got, _ = run_together(runner, [tree(known, 1, nodes, TREE, table(0)), neighbour])
    assert torch.equal(got[[0, 2, 4, 6, 8]], logits_in_one_go(name)[base - 1 : base + 4])
    for leaf in leaves:
        path = path_to(leaf, TREE)
        written = known + [nodes[node] for node in path]
        alone = run_chunks(runner, written, (base - 1, *(1,) * (len(path) + 1)), table(2))
        assert torch.equal(got[[0, *(node + 1 for node in path)]], alone[base - 1 :])


@pytest.mark.parametrize("name", MODELS)
def test_the_start_up_check_finds_equal_bits(name: str) -> None:
    runner, _ = runner_and_text(name)
    assert check_exact(runner) is True


def test_the_start_up_check_notices_kernels_that_follow_the_row_count() -> None:
    """Without tiles of fixed shape bits do change: were the check blind, this would pass as exact."""
    runner, _ = runner_and_text("llama")
    loose = make_runner(tiny_model("llama", torch.float32, intermediate_size=1152), False, 256)
    assert check_exact(loose) is False
    small = make_runner(tiny_model("llama"), True, 11)
    assert check_exact(small) is None
    assert runner.attention.name == "paged"
