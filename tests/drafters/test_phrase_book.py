"""The worked example of a drafter from outside: its book, its matches, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from drafters.base import DrafterContext, DrafterUnavailableError
from worlds.simulated_target import decode, propose_once

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plugin_drafter"


def encode(text: str) -> list[int]:
    """Tokens of a target whose tokens are characters."""
    return [*map(ord, text)]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    import slipstream_phrase_book  # type: ignore[import-not-found]

    yield slipstream_phrase_book
    del sys.modules["slipstream_phrase_book"]


@pytest.fixture
def make(example, monkeypatch, tmp_path):
    """A drafter with this book."""

    def make(book: str):
        path = tmp_path / "book.txt"
        path.write_text(book)
        monkeypatch.setenv(example.VARIABLE, str(path))
        return example.make_drafter(DrafterContext(encode=encode))

    return make


def draft(drafter, text, **options):
    tree = propose_once(drafter, encode(text), 8, options=options)
    return "".join(map(chr, tree.token_ids))


def test_a_phrase_begun_is_drafted_to_its_end(make):
    drafter = make("hello world\n---\nhelp me\n")
    assert draft(drafter, "say hello") == " world"
    assert draft(drafter, "say help") == " me"
    assert draft(drafter, "say h") == ""
    assert draft(drafter, "hello world") == ""


def test_the_longest_match_wins_then_the_first_phrase(make):
    drafter = make("abcX1\n---\nzabcY2\n---\nqbcZ3")
    assert draft(drafter, "zabc") == "Y2"
    assert draft(drafter, "abc") == "X1"
    assert draft(drafter, "-bc") == "X1"


def test_min_match_says_how_much_has_to_stand(make):
    drafter = make("abcdefgh")
    assert draft(drafter, "-abc", min_match=3) == "defgh"
    assert draft(drafter, "-bc", min_match=3) == ""


def test_phrases_keep_their_lines(example):
    assert example.read_phrases("a\n  b\n\n---\n---\nc\n") == ["a\n  b\n", "c"]


@pytest.mark.parametrize("book", ["", "---\n", "a"])
def test_a_book_without_phrases_is_refused(make, book):
    with pytest.raises(ValueError, match="no phrase of three tokens"):
        make(book)


def test_a_missing_book_is_an_error_and_a_missing_tokenizer_makes_it_unavailable(
    example, monkeypatch
):
    with pytest.raises(DrafterUnavailableError, match="encode"):
        example.make_drafter(DrafterContext())
    monkeypatch.setenv(example.VARIABLE, "no/such/book")
    with pytest.raises(FileNotFoundError):
        example.make_drafter(DrafterContext(encode=encode))


def test_it_saves_steps_where_the_text_is_in_the_book(make):
    text = encode("if __name__ == '__main__':\n    main()\n")
    drafter = make("".join(map(chr, text)))
    run = decode(drafter, text[:5], lambda token_ids: text[len(token_ids)], len(text) - 14)
    assert run.token_ids == text[: len(run.token_ids)]
    assert len(run.num_emitted) <= 4
