"""Every architecture writes the logits, and the text, that transformers' own forward writes."""

from __future__ import annotations

import pytest
import torch

from engine.build import build_engine_for
from engine.config import EngineConfig
from worlds.engine_driver import ORACLE, OracleDrafter, register_oracle, write_all
from worlds.tiny_models import (
    ARCHITECTURES,
    VOCAB_SIZE,
    WINDOW,
    chunk,
    greedy_text,
    own_logits,
    path_to,
    random_ids,
    reference_model,
    run_chunks,
    run_together,
    scattered_table,
    tiny_model,
    tiny_runner,
    tree,
)

pytestmark = pytest.mark.slow

# Logits have a spread of about 2.5; float32 leaves errors of 3e-5.
TOLERANCE = {"rtol": 0.0, "atol": 2e-4}
TEXT = random_ids(1, 40)
OTHER_TEXT = random_ids(2, 40)
# Odd lengths, the longest beyond the window, so that a chunk's first keys leave it midway.
NUM_WRITTEN = 24
CHUNKS = (13, 1, 9, 11, 6)
# Two branches with siblings at most depths. Nodes lie further apart in slots than in positions, and one
# path is longer than the window, so that a window counted in slots would show.
PARENTS = (-1, -1, 0, 1, 1, 3, 2, 5, 5, 7, 9, 6, 10, 12, 13, 13, 15, 11)
NODES = tuple(range(5, 5 + 4 * len(PARENTS), 4))

every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)
both_modes = pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])


def reference(name: str, token_ids: list[int]) -> torch.Tensor:
    return own_logits(reference_model(name), token_ids)


@both_modes
@every_architecture
def test_logits_in_one_go_and_in_odd_chunks_equal_transformers(name: str, exact: bool) -> None:
    assert max(CHUNKS) > WINDOW  # what this test needs to show anything
    runner = tiny_runner(name, exact)
    expected = reference(name, TEXT)
    for counts in ((len(TEXT),), CHUNKS, (1,) * len(TEXT)):
        got = run_chunks(runner, TEXT, counts, scattered_table(3, 10))
        torch.testing.assert_close(got, expected, **TOLERANCE)


@both_modes
@every_architecture
def test_every_path_of_a_draft_tree_equals_transformers_among_neighbours(
    name: str, exact: bool
) -> None:
    """Two trees, one of them under a chunk of several known tokens, beside a chunk of a third text and
    a lone token of a fourth, all in one forward."""
    assert max(len(path_to(node, PARENTS)) for node in range(len(PARENTS))) > WINDOW
    runner = tiny_runner(name, exact)
    tables = [scattered_table(index, 12, first=24 * index) for index in range(4)]
    run_chunks(runner, TEXT, (21,), tables[0])
    run_chunks(runner, OTHER_TEXT, (7, 6), tables[1])
    run_chunks(runner, TEXT[5:], (11,), tables[2])
    run_chunks(runner, OTHER_TEXT[3:], (30,), tables[3])
    steps = [
        tree(TEXT[:22], 1, NODES, PARENTS, tables[0]),
        chunk(TEXT[5:], 11, 12, tables[2]),
        tree(OTHER_TEXT[:18], 5, NODES, PARENTS, tables[1]),
        chunk(OTHER_TEXT[3:], 30, 1, tables[3]),
    ]
    first, middle, second, last = run_together(runner, steps)
    for text, logits in ((TEXT[:22], first), (OTHER_TEXT[:18], second)):
        for node in set(range(len(PARENTS))) - set(PARENTS):
            path = path_to(node, PARENTS)
            expected = reference(name, text + [NODES[each] for each in path])
            got = logits[[0, *(each + 1 for each in path)]]
            torch.testing.assert_close(got, expected[len(text) - 1 :], **TOLERANCE)
    torch.testing.assert_close(middle, reference(name, TEXT[5:28])[11:], **TOLERANCE)
    torch.testing.assert_close(last, reference(name, OTHER_TEXT[3:34])[30:], **TOLERANCE)


@every_architecture
def test_greedy_text_with_drafts_and_neighbours_equals_generate(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [TEXT[:19], OTHER_TEXT[:6] * 2, TEXT[20:23]]
    expected = [greedy_text(reference_model(name), prompt, NUM_WRITTEN) for prompt in prompts]
    texts = [prompt + written for prompt, written in zip(prompts, expected, strict=True)]
    register_oracle(monkeypatch, lambda: OracleDrafter(texts, VOCAB_SIZE))
    config = EngineConfig(
        block_size=4,
        num_blocks=64,
        max_num_batched_tokens=40,
        max_num_seqs=4,
        prefill_chunk=5,
        check_integrity=True,
    )
    engine = build_engine_for(tiny_model(name), None, config)
    written, num_accepted = write_all(engine, prompts, NUM_WRITTEN, ORACLE)
    assert written == expected
    # Two of three drafts are right four levels deep: most tokens were drafts.
    assert num_accepted > NUM_WRITTEN * len(prompts) / 2
