from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.reply.byte_level import ByteLevelDecoder, decoder_parts
from server.reply.detokenizer import REPLACEMENT, IncrementalDetokenizer, decoder
from worlds.scripted_engine import BOS, byte_tokenizer, merging_tokenizer, sentencepiece_tokenizer

MERGED_SIZE = 268
UNKNOWN = 100_000
SENTENCEPIECE_WORDS = range(256, 264)
merging, sentencepiece = cache(merging_tokenizer), cache(sentencepiece_tokenizer)
decoder_of = partial(decoder, skip_special_tokens=True)


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


def pieces_of(tokenizer: Any, context: Sequence[int], token_ids: Sequence[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(
        decoder_of(tokenizer), context, frozenset(tokenizer.all_special_ids)
    )
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.flush()]


def test_a_tokenizer_that_decodes_by_itself_is_asked() -> None:
    plain = byte_tokenizer()

    class Shouting(type(plain)):  # type: ignore[misc]
        def _decode(self, *args: Any, **named: Any) -> str:
            return super()._decode(*args, **named).upper()

    shouting = Shouting(tokenizer_object=plain.backend_tokenizer)
    assert decoder(plain)([104, 105]) == "hi"
    assert decoder(shouting)([104, 105]) == "HI"


any_tokens = st.lists(st.integers(0, MERGED_SIZE - 1), max_size=60)
text_tokens = st.text(max_size=30).map(
    lambda text: merging().encode(text, add_special_tokens=False)
)


@given(st.one_of(any_tokens, text_tokens))
@example([0xFF] * 40)
@example([0xE2] * 17 + [0x82, 0xAC])
@example([*"\ufffd\ufffd".encode() * 20])
def test_byte_level_pieces_add_up_to_the_whole_text(token_ids: list[int]) -> None:
    assert "".join(pieces_of(merging(), (), token_ids)) == decoder_of(merging())(token_ids)


@given(any_tokens, st.one_of(any_tokens, text_tokens))
def test_pieces_after_a_context_are_what_the_whole_text_adds_to_it(
    context: list[int], token_ids: list[int]
) -> None:
    decode = decoder_of(merging())
    before = decode(context)
    if before.endswith(REPLACEMENT):
        expected = decode(token_ids)
    else:
        expected = decode([*context, *token_ids])[len(before) :]
    assert "".join(pieces_of(merging(), context, token_ids)) == expected


sentencepiece_units = st.lists(
    st.one_of(
        st.sampled_from(SENTENCEPIECE_WORDS).map(lambda each: [each]),
        st.characters(codec="utf-8").map(lambda char: list(char.encode())),
    ),
    max_size=20,
).map(lambda units: [token_id for unit in units for token_id in unit])


@given(sentencepiece_units, sentencepiece_units)
def test_byte_fallback_pieces_add_up_to_the_whole_text(
    context: list[int], token_ids: list[int]
) -> None:
    decode = decoder_of(sentencepiece())
    before = decode(context)
    if before.endswith(REPLACEMENT):
        before, context = "", []
    expected = decode([*context, *token_ids])[len(before) :]
    assert "".join(pieces_of(sentencepiece(), context, token_ids)) == expected


def test_a_character_is_shown_once_its_last_byte_is_there() -> None:
    assert pieces_of(byte_tokenizer(), (), [*"a€b".encode()]) == ["a", "", "", "€", "b", ""]


def test_a_space_at_the_start_survives_after_a_prompt() -> None:
    word, world = 257, 258
    assert pieces_of(sentencepiece(), [word], [world]) == [" world", ""]
    assert pieces_of(sentencepiece(), [], [world]) == ["world", ""]


def test_tokens_without_text_of_their_own_do_not_make_the_window_grow() -> None:
    seen: list[int] = []
    decode = decoder_of(byte_tokenizer())

    def watched(token_ids: Sequence[int]) -> str:
        seen.append(len(token_ids))
        return decode(token_ids)

    skipping = IncrementalDetokenizer(watched, (), {BOS})
    assert [skipping.add(each) for each in [BOS] * 1000 + [97]] == [""] * 1000 + ["a"]
    assert max(seen) == 1
    broken = IncrementalDetokenizer(watched)
    shown = "".join(broken.add(0xFF) for _ in range(500)) + broken.flush()
    assert shown == REPLACEMENT * 500
    assert max(seen) <= 40
