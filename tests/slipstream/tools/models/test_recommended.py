"""Statements about recommended models, held to what is known of their files, and to the arithmetic."""

from __future__ import annotations

from itertools import pairwise

import pytest

from engine.hub.name import parse_name
from slipstream.tools.models.memory import CONTEXT, PROCESSES
from slipstream.tools.models.recommended import MIXTURES, RECOMMENDED, Bits, Shape, table

PUBLISHED = {
    "unsloth/Qwen3-1.7B-GGUF:Q4_K_M": 1.11,
    "unsloth/Qwen3-4B-Instruct-2507-GGUF:Q4_K_M": 2.50,
    "unsloth/Qwen3-8B-GGUF:Q4_K_M": 5.03,
    "ggml-org/gpt-oss-20b-GGUF": 12.1,
    "unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF:Q4_K_M": 18.6,
    "unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF:Q8_0": 32.5,
    "unsloth/Qwen3-32B-GGUF:Q4_K_M": 19.8,
}
"""Sizes of these files, as pages about them say, in GB."""
PLAIN = Bits(8, 8, 8, 8, 8, 8)


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_worked_out_are_those_of_the_file(name: str) -> None:
    (model,) = [each for each in RECOMMENDED if each.name == name]
    assert model.needs.weights / 1e9 == pytest.approx(PUBLISHED[name], rel=0.02)


def test_each_fits_its_machine_with_its_text() -> None:
    for each in RECOMMENDED:
        assert parse_name(each.name) is not None
        assert all(parse_name(draft) is not None for draft in each.drafts)
        assert each.needs.num_tokens == CONTEXT
        assert each.needs.memory < 0.9e9 * each.memory
    assert {each.memory for each in RECOMMENDED} == {4, 8, 16, 32, 64}


def test_the_parts_of_a_shape_add_up() -> None:
    dense = Shape(10, 4, 2, 2, 1, 2, 6, 99)
    attention, mlp = 2 * (4 * 4 * 2 + 4 * 2 * 2), 2 * 3 * 4 * 6
    assert dense.weight_bytes(PLAIN) == 2 * 40 + attention + mlp
    # A row of the embedding is next to nothing.
    assert dense.bytes_read(PLAIN) == 40 + attention + mlp == dense.bytes_read(PLAIN, 8)
    assert dense.kv_bytes == 2 * 2 * 2 * 2
    tied = Shape(10, 4, 2, 2, 1, 2, 6, 99, True)
    assert tied.weight_bytes(PLAIN) == tied.bytes_read(PLAIN) == 40 + attention + mlp


def test_rows_of_a_mixture_reach_more_experts_and_never_more_than_there_are() -> None:
    mixed = Shape(10, 4, 2, 2, 1, 2, 6, 99, experts=(8, 2))
    rest, expert = 40 + 2 * 48, 2 * 3 * 4 * 6
    assert mixed.bytes_read(PLAIN) == pytest.approx(rest + 2 * expert)
    assert mixed.bytes_read(PLAIN, 2) == pytest.approx(rest + 3.5 * expert)
    read = [mixed.bytes_read(PLAIN, rows) for rows in (1, 2, 4, 8, 1000)]
    assert all(few < more for few, more in pairwise(read))
    assert read[-1] == pytest.approx(rest + 8 * expert)
    assert mixed.weight_bytes(PLAIN) == 2 * 40 + 2 * 48 + 8 * expert


def test_a_row_is_bytes_over_speed() -> None:
    slow, fast = table(50), table(100)
    for model, one, other in zip(RECOMMENDED, slow, fast, strict=True):
        read = model.shape.bytes_read(MIXTURES[model.mixture])
        assert one["ms_per_token"] == pytest.approx(read / 50e6, abs=0.06)
        assert other["ms_per_token"] == pytest.approx(one["ms_per_token"] / 2, abs=0.06)
        assert one["ms_at_8192"] > one["ms_per_token"]
        needed = PROCESSES + model.needs.weights + one["tokens_that_fit"] * model.needs.per_token
        assert needed <= model.memory * 0.9e9
