"""The vocabularies of GGUF files as texts find them."""

from __future__ import annotations

import pytest

from engine.weights.gguf.file import GgufHeader
from engine.weights.gguf.tokenizer import gguf_tokenizer
from engine.weights.index import TensorIndex
from worlds.gguf_files import gemma_vocabulary


def test_one_score_for_all_leaves_the_order_of_merges_to_the_tokens() -> None:
    """As conversions of a tokenizer.json alone have it; runs of spaces come last."""
    values = gemma_vocabulary("\u2581") | {
        "general.architecture": "llama",
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokens = [*values["tokenizer.ggml.tokens"], "c", "d", "cd", "abc"]
    values |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*values["tokenizer.ggml.token_type"], 1, 1, 1, 1],
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
    }
    tokenizer = gguf_tokenizer(GgufHeader(values, TensorIndex({}), {}))
    assert tokenizer.tokenize("abcd") == ["ab", "cd"]
    assert tokenizer.tokenize("  a") == ["\u2581", "\u2581a"]


@pytest.mark.parametrize("said", [None, False, True])
def test_texts_of_gemma_4_begin_with_its_token_whatever_the_file_says(said: bool | None) -> None:
    values = gemma_vocabulary("\u2581") | {
        "general.architecture": "gemma4",
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.merges": ["a b"],
    }
    if said is not None:
        values["tokenizer.ggml.add_bos_token"] = said
    tokenizer = gguf_tokenizer(GgufHeader(values, TensorIndex({}), {}))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab a")) == [
        "<bos>",
        "ab",
        "\u2581",
        "a",
    ]
