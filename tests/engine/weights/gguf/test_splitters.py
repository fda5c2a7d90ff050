"""Ways in which the vocabularies of GGUF files have text cut."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from gguf.constants import TokenType
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from engine.weights.gguf.splitters import split
from worlds.gguf_files import tiny_llama, tokenizer_of, values_of, with_tokens

LLAMA = values_of(tiny_llama())
BYTES = {char: byte for byte, char in bytes_to_unicode().items()}


def pieces(splitter: str, text: str) -> list[str]:
    found = cutting(splitter).pre_tokenize_str(text)
    return [bytes(BYTES[char] for char in piece).decode() for piece, _ in found]


@cache
def cutting(splitter: str) -> Any:
    backend = Tokenizer(BPE())
    split(backend, splitter, {})
    return backend.pre_tokenizer


TEXT = "Don't 1234567 x漢字かなAb!!\n\n  foo_bar"
CUTS = {
    "glm4": "Don|'t| |123|456|7| x漢字かなAb|!!\n\n| | foo|_bar",
    "hunyuan": "Don|'t| |1|2|3|4|5|6|7| x漢字かなAb|!!\n\n| | foo|_bar",
    "seed-coder": "Don|'t| |1|2|3|4|5|6|7| x漢字かなAb|!!|\n\n| | foo|_bar",
    # Kanji and kana stand alone, and marks only before Latin letters.
    "deepseek-v3": "Don|'t| |123|456|7| x|漢字かな|Ab|!!\n\n| | foo|_bar",
    "deepseek-coder": "Don|'|t| |1|2|3|4|5|6|7| x|漢字かな|Ab|!!|\n|\n| | foo|_|bar",
    "deepseek-llm": "Don|'|t| |1234567| x|漢字かな|Ab|!!|\n|\n| | foo|_|bar",
    # Marks alone, then as GPT-2, then digits in threes from the left.
    "falcon": "Don|'|t| |123|456|7| x漢字かなAb|!!|\n\n | foo|_|bar",
    "tiny_aya": "Don't| |1|234|567| x漢字かな|Ab|!!\n\n| | foo|_bar",
    # Han alone.
    "kimi-k2": "Don't| |123|456|7| x|漢字|かなAb|!!\n\n| | foo|_bar",
    # Digits in threes from the right.
    "afmoe": "Don|'t| |1|234|567| x|漢字かな|Ab|!!\n\n| | foo|_bar",
    # Nothing is cut but digits.
    "superbpe": "Don't |1|234|567| x漢字かなAb!!\n\n  foo_bar",
    "bailingmoe": "Don|'t| |1|2|3|4|5|6|7| x漢字かなAb|!!\n\n| | foo|_bar",
    # One line's end at a time.
    "exaone-moe": "Don|'t| |1|2|3|4|5|6|7| x漢字かなAb|!!\n|\n| | foo|_bar",
    # Digits in threes first.
    "minicpm5": "Don|'t| |123|456|7| x漢字かなAb|!!\n\n| | foo|_bar",
    # East Asian letters and marks alone.
    "youtu": "Don't| |1|2|3|4|5|6|7| x|漢字かな|Ab|!!\n\n| | foo|_bar",
    # Words with their marks, but those that end sentences.
    "bloom": "Don't| 1234567| x漢字かなAb|!!\n\n | foo_bar",
    "viking": "Don't| |1|2|3|4|5|6|7| x漢字かなAb|!!\n\n | foo_bar",
    # Lines first.
    "laguna": "Don|'t| |1|2|3|4|5|6|7| x漢字かなAb|!!|\n\n| | foo|_bar",
    "spark2_5": "Don|'t| |1|2|3|4|5|6|7| x|漢字かな|Ab|!!|\n|\n| | foo|_bar",
    "hy_v4": "Don|'t| |123|456|7| x|漢字かな|Ab|!!\n\n| | foo|_bar",
    "cohere2moe": "Don't| |1|234|567| x漢字かな|Ab|!!\n\n| | foo|_bar",
    "smollm": "Don|'t| |1|2|3|4|5|6|7| x漢字かなAb|!!|\n\n | foo|_|bar",
}


@pytest.mark.parametrize(
    ("splitter", "text", "cut"),
    [
        *((splitter, TEXT, cut) for splitter, cut in CUTS.items()),
        # Letters of other scripts stand alone, and those beyond ASCII behind those of it.
        ("deepseek-llm", "caf\u00e9 \u05e9\u05dc x", "caf|\u00e9| \u05e9\u05dc| x"),
        ("deepseek-llm", "a\u3001b  ", "a|\u3001|b|  "),
        (
            "youtu",
            " \u675c\u7528\ud55c\uff01\u2026aBc!",
            " |\u675c\u7528|\ud55c|\uff01\u2026|a|Bc|!",
        ),
        # Turkish endings behind an apostrophe are no contractions.
        ("ufakzeka", "Van'dan 12", "Van|'dan| |1|2"),
        # Spaces by powers of two.
        ("jais-2", f"a{' ' * 7}b 1234", "a|    |  | b| |123|4"),
    ],
)
def test_text_is_cut_as_the_vocabulary_was_trained(splitter: str, text: str, cut: str) -> None:
    assert "|".join(pieces(splitter, text)) == cut


OTHERS = {
    "hunyuan": "qwen2",
    "stablelm2": "qwen2",
    "grok-2": "qwen2",
    "solar-open": "qwen2",
    "glm4": "llama-bpe",
    "glm5": "llama-bpe",
    "chatglm-bpe": "llama-bpe",
    "kimi-k2": "gpt-4o",
}
"""Those whose vocabularies were trained by the pattern of another family, which transformers has."""


@pytest.mark.parametrize("splitter", OTHERS)
@given(text=st.text(max_size=30) | st.text("aB'sS 12,.\n\r\té́나", max_size=30))
def test_families_that_share_a_pattern_cut_alike(splitter: str, text: str) -> None:
    # Kimi cuts Han apart, and slashes from what ends a line.
    text = re.sub(
        r"[/\u2e80-\u2fff\u3005-\u3007\u3021-\u303b\u3400-\u9fff\uf900-\ufaff]|[^\0-\uffff]",
        "",
        text,
    )
    pattern = Regex(GGUF_PRE_TOKENIZER_SPLITS[OTHERS[splitter]])
    theirs = pre_tokenizers.Split(pattern, "isolated").pre_tokenize_str(text)
    assert pieces(splitter, text) == [piece for piece, _ in theirs]


@pytest.mark.parametrize(
    ("splitter", "whole"),
    [("llama-bpe", True), ("youtu", True), ("glm4", True), ("kimi-k2", True), ("qwen2", False)],
)
def test_some_vocabularies_have_words_that_no_merges_make(splitter: str, whole: bool) -> None:
    values = with_tokens(LLAMA, {"zebra": TokenType.NORMAL}) | {"tokenizer.ggml.pre": splitter}
    assert tokenizer_of(values).tokenize("zebra") == (["zebra"] if whole else list("zebra"))


@pytest.mark.parametrize(
    ("splitter", "composed"),
    [("qwen2", True), ("qwen35", True), ("command-r", True), ("olmo", True), ("llama-bpe", False)],
)
def test_some_vocabularies_have_letters_with_their_marks_alone(
    splitter: str, composed: bool
) -> None:
    tokenizer = tokenizer_of(LLAMA | {"tokenizer.ggml.pre": splitter})
    apart = tokenizer.tokenize("cafe\u0301 <|start|>")
    assert (apart == tokenizer.tokenize("caf\u00e9 <|start|>")) == composed
    assert apart[-1] == "<|start|>"


def test_digits_stand_alone_where_the_model_learned_them_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A way of cutting text that is unknown is said, and is GPT-2's, which has several names."""
    assert tokenizer_of(LLAMA).tokenize("hello 123") == ["hello", "Ġ", "1", "2", "3"]
    for splitter in ("gpt-2", "a.x-4.0", "gigachat", "granite-docling", "mellum", "scissors"):
        assert not caplog.records
        whole = tokenizer_of(LLAMA | {"tokenizer.ggml.pre": splitter})
        assert whole.tokenize("hello 123") == ["hello", "Ġ", "123"]
    assert "'scissors', is unknown here" in caplog.text
