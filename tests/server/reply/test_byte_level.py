"""Bytes joined here are the text that the tokenizers library makes of the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.reply.byte_level import ByteLevelDecoder, decoder_parts
from server.reply.detokenizer import decoder
from worlds.scripted_engine import merging_tokenizer, sentencepiece_tokenizer

UNKNOWN = 100_000


@cache
def tokenizer(make: Callable[[], Any]) -> Any:
    """With tokens that are added, one of them spelled in no byte's stand-in."""
    made = make()
    made.add_tokens(["<think>", "a b", "\u20ac"])
    return made


@pytest.mark.parametrize("make", [merging_tokenizer, sentencepiece_tokenizer])
@pytest.mark.parametrize("skip", [False, True])
@given(token_ids=st.lists(st.one_of(st.integers(0, 273), st.just(UNKNOWN)), max_size=12))
@example(token_ids=[0xF0, 0x9F, 0x98, 0x41, 0xED, 0xA0, 0x80, 0xC0, 0xAF, 0xF5, 0xE2, 0x82])
@example(token_ids=[*range(256, 274)])
def test_texts_are_the_librarys(make: Callable[[], Any], skip: bool, token_ids: list[int]) -> None:
    decode = decoder(tokenizer(make), skip_special_tokens=skip)
    expected = tokenizer(make).decode(
        token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )
    assert decode(token_ids) == expected
    assert decode(token_ids) == expected  # by what has been looked up


def test_other_decoders_are_left_alone() -> None:
    assert isinstance(decoder(merging_tokenizer()), ByteLevelDecoder)
    assert len(decoder_parts(sentencepiece_tokenizer())) == 4
    assert not isinstance(decoder(sentencepiece_tokenizer()), ByteLevelDecoder)
    assert decoder_parts(object()) == []
