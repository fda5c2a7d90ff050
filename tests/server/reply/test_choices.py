from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from server.plan import TextOptions
from server.reply.choices import TextAssembler
from server.reply.detokenizer import IncrementalDetokenizer
from worlds.scripted_engine import BOS, byte_tokenizer, merging_tokenizer

merging = cache(merging_tokenizer)


def assembler(options: TextOptions, tokenizer: Any) -> TextAssembler:
    return TextAssembler(
        IncrementalDetokenizer(tokenizer.decode, (), frozenset(tokenizer.all_special_ids)), options
    )


def run(
    options: TextOptions, token_ids: list[int], takes: list[bool], tokenizer: Any = None
) -> tuple[str, list[tuple[int, str, int]], int, str | None]:
    """(text, tokens as (id, text, start), tokens kept, the stop found); ``takes[i]``: take after i."""
    subject = assembler(options, tokenizer or merging())
    texts, tokens, match = [], [], None
    for index, token_id in enumerate(token_ids):
        match = subject.add(token_id, drafted=False, logprobs=None)
        if match is not None or (index < len(takes) and takes[index]):
            text, settled = subject.take()
            texts.append(text)
            tokens += settled
        if match is not None:
            break
    else:
        match = subject.finish()
    text, settled = subject.take()
    shown = [(each.token_id, each.text, each.start) for each in [*tokens, *settled]]
    return "".join([*texts, text]), shown, subject.num_kept, match and match.stop


# Few letters, so that stop strings are met; characters of several bytes, so that tokens split them.
texts = st.text(alphabet="hel €w😀x", max_size=30)
stops = st.text(alphabet="hel €w😀x", min_size=1, max_size=4)
take_plans = st.lists(st.booleans(), max_size=60)


@given(texts, st.lists(stops, min_size=1, max_size=3), st.booleans(), take_plans)
@example("hell", ["ell", "l"], False, [])
@example("hell", ["l", "hel", "el"], True, [])
def test_text_and_tokens_are_cut_where_the_whole_text_says(
    text: str, stop: list[str], include: bool, takes: list[bool]
) -> None:
    """At the stop string that is completed first; of two completed at once, at the longer."""
    token_ids = merging().encode(text, add_special_tokens=False)
    ends = [(text.find(each) + len(each), text.find(each), each) for each in stop if each in text]
    end, at, first = min(ends, default=(len(text), len(text), None))
    cut = end if include else at
    options = TextOptions(tuple(stop), include)
    shown, tokens, num_kept, found = run(options, token_ids, takes)
    assert shown == text[:cut]
    assert found == first
    assert "".join(each for _, each, _ in tokens) == shown
    assert num_kept == len(tokens)
    # Uncut, the tokens start at these places; those that start before the cut are kept.
    _, every, _, _ = run(TextOptions(), token_ids, [])
    assert [each for each, _, start in every if start < cut] == [each for each, _, _ in tokens]


@given(texts, st.lists(stops, max_size=3), st.integers(0, 20), take_plans)
def test_how_tokens_are_grouped_changes_nothing(
    text: str, stop: list[str], min_tokens: int, takes: list[bool]
) -> None:
    token_ids = merging().encode(text, add_special_tokens=False)
    options = TextOptions(tuple(stop), min_tokens=min_tokens)
    assert run(options, token_ids, takes) == run(options, token_ids, [])


def test_special_tokens_that_show_no_text_are_kept_and_settle_at_once() -> None:
    subject = assembler(TextOptions(("ab",)), byte_tokenizer())
    subject.add(BOS, drafted=False, logprobs=None)
    assert [each.token_id for each in subject.take()[1]] == [BOS]
    assert subject.num_kept == 1


def test_tokens_that_may_belong_to_a_stop_string_wait() -> None:
    subject = assembler(TextOptions(("abc",)), byte_tokenizer())
    for char in b"xab":
        subject.add(char, drafted=True, logprobs=None)
    text, tokens = subject.take()
    assert text == "x"
    assert [each.token_id for each in tokens] == [ord("x")]
    subject.add(ord("d"), drafted=False, logprobs=None)
    text, tokens = subject.take()
    assert text == "abd"
    assert [each.drafted for each in tokens] == [True, True, False]
