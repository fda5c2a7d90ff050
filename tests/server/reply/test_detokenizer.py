from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import server.reply.detokenizer
from server.reply.detokenizer import REPLACEMENT, IncrementalDetokenizer, StopMatcher
from worlds.scripted_engine import BOS, byte_tokenizer, merging_tokenizer, sentencepiece_tokenizer

MERGED_SIZE = 268
SENTENCEPIECE_WORDS = range(256, 264)


@cache
def merging() -> Any:
    return merging_tokenizer()


@cache
def sentencepiece() -> Any:
    return sentencepiece_tokenizer()


def decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    def decode(token_ids: Sequence[int]) -> str:
        return tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    return decode


def pieces_of(tokenizer: Any, context: Sequence[int], token_ids: Sequence[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(
        decoder(tokenizer), context, frozenset(tokenizer.all_special_ids)
    )
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("make", [byte_tokenizer, merging_tokenizer, sentencepiece_tokenizer])
@pytest.mark.parametrize("skip", [False, True])
def test_the_short_way_to_a_decoder_gives_what_transformers_gives(
    make: Callable[[], Any], skip: bool
) -> None:
    tokenizer = make()
    decode = server.reply.detokenizer.decoder(tokenizer, skip_special_tokens=skip)
    for token_ids in ([], [BOS], [104, 105, BOS, 33], list(range(len(tokenizer)))):
        assert decode(token_ids) == tokenizer.decode(
            token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


def test_a_tokenizer_that_decodes_by_itself_is_asked() -> None:
    plain = byte_tokenizer()

    class Shouting(type(plain)):  # type: ignore[misc]
        def _decode(self, *args: Any, **named: Any) -> str:
            return super()._decode(*args, **named).upper()

    shouting = Shouting(tokenizer_object=plain.backend_tokenizer)
    assert server.reply.detokenizer.decoder(plain)([104, 105]) == "hi"
    assert server.reply.detokenizer.decoder(shouting)([104, 105]) == "HI"


any_tokens = st.lists(st.integers(0, MERGED_SIZE - 1), max_size=60)
text_tokens = st.text(max_size=30).map(
    lambda text: merging().encode(text, add_special_tokens=False)
)


@given(st.one_of(any_tokens, text_tokens))
@example([0xFF] * 40)
@example([0xE2] * 17 + [0x82, 0xAC])
@example([*"\ufffd\ufffd".encode() * 20])
def test_byte_level_pieces_add_up_to_the_whole_text(token_ids: list[int]) -> None:
    assert "".join(pieces_of(merging(), (), token_ids)) == decoder(merging())(token_ids)


@given(any_tokens, st.one_of(any_tokens, text_tokens))
def test_pieces_after_a_context_are_what_the_whole_text_adds_to_it(
    context: list[int], token_ids: list[int]
) -> None:
    decode = decoder(merging())
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
    decode = decoder(sentencepiece())
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
    decode = decoder(byte_tokenizer())

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


def run_matcher(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None]:
    """(text before the stop, the stop) as a caller of StopMatcher sees them."""
    matcher = StopMatcher(stops)
    text = ""
    for piece in pieces:
        held = matcher.held
        begin = matcher.num_released
        released, match = matcher.feed(piece)
        if match is not None:
            text += (held + piece)[: match.start - begin]
            return text, match.stop
        text += released
    return text + matcher.held, None


short_texts = st.text(alphabet="ab", max_size=24)
stop_texts = st.text(alphabet="ab", min_size=1, max_size=4)


@st.composite
def split_texts(draw: st.DrawFn) -> list[str]:
    text = draw(short_texts)
    cuts = sorted(draw(st.sets(st.integers(0, len(text)))))
    edges = [0, *cuts, len(text)]
    return [text[start:end] for start, end in zip(edges, edges[1:], strict=False)]


@given(split_texts(), stop_texts)
def test_trimming_at_one_stop_string_is_str_find(pieces: list[str], stop: str) -> None:
    text = "".join(pieces)
    at = text.find(stop)
    expected = (text, None) if at < 0 else (text[:at], stop)
    assert run_matcher([stop], pieces) == expected


@given(split_texts(), st.lists(stop_texts, min_size=2, max_size=4))
def test_of_several_stop_strings_the_one_completed_first_wins(
    pieces: list[str], stops: list[str]
) -> None:
    text = "".join(pieces)
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    expected = (text[: min(found)[1]], min(found)[2]) if found else (text, None)
    assert run_matcher(stops, pieces) == expected


def test_a_stop_string_completed_while_disarmed_does_not_count() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.feed("ab", armed=False) == ("ab", None)
    assert matcher.feed("c") == ("c", None)
    released, match = matcher.feed("ab")
    assert released == ""
    assert (match.start, match.end) == (3, 5)


@pytest.mark.parametrize("stops", [["abc", "b"], ["b", "abc"]])
def test_a_short_stop_inside_a_long_one_wins_for_it_ends_first(stops: list[str]) -> None:
    assert run_matcher(stops, ["abc"]) == ("a", "b")
