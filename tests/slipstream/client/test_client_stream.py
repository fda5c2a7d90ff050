"""A stream's chunks become text, figures and errors, without a server."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from slipstream.client.bench_report import is_unsteady, percentiles, summarize
from slipstream.client.display import Marker, PlainScreen, TerminalScreen, status_line, summary
from slipstream.client.errors import ClientError
from slipstream.client.stream import Piece, Reply, Token, explain, parse_event


def own_chunk(**changes: Any) -> str:
    choice: dict[str, Any] = {
        "index": 0,
        "text": "ab",
        "finish_reason": None,
        "tokens": [
            {"id": 5, "text": "a", "drafted": True},
            {"id": 6, "text": "b", "drafted": False},
        ],
        "num_steps": 1,
        "num_draft_tokens": 3,
    }
    return json.dumps({"seed": 8, "system_fingerprint": "f", "choices": [choice | changes]})


def test_a_chunk_of_ours_tells_tokens_steps_and_drafts() -> None:
    piece = parse_event(own_chunk())
    assert piece.tokens == (Token(5, "a", True), Token(6, "b", False))
    assert (piece.text, piece.num_steps, piece.num_draft_tokens) == ("ab", 1, 3)
    assert (piece.seed, piece.fingerprint, piece.finish_reason) == (8, "f", None)


@pytest.mark.parametrize(
    "chunk",
    [
        '{"choices": [{"index": 0, "delta": {"content": "x"}}], "usage": null}',
        '{"choices": [{"index": 0, "text": "x", "finish_reason": null, "logprobs": null}]}',
    ],
)
def test_a_chunk_of_others_is_text(chunk: str) -> None:
    assert parse_event(chunk) == Piece(text="x")


def test_half_a_character_can_be_written() -> None:
    half = json.dumps({"choices": [{"index": 0, "text": "x\ud83d \U0001f600"}]})
    assert parse_event(half).text == "x\ufffd \U0001f600"


@pytest.mark.parametrize(
    "chunk",
    ["no json", "[]", "{}", '{"choices": [{}]}', '{"choices": [{"text": 3}]}', own_chunk(tokens=4)],
)
def test_what_is_no_chunk_is_refused(chunk: str) -> None:
    with pytest.raises(ClientError, match="not in the form of OpenAI's completions"):
        parse_event(chunk)


def test_an_error_in_the_stream_is_raised_in_its_words() -> None:
    with pytest.raises(ClientError, match="the engine died"):
        parse_event('{"error": {"message": "the engine died"}}')


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"error": {"message": "too large", "param": "top_p"}}, "top_p: too large"),
        ({"error": {"message": "top_p is too large", "param": "top_p"}}, "top_p is too large"),
        ({"error": "gone"}, "gone"),
        ({"object": "error", "message": "gone"}, "gone"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"detail": [{"loc": ["a"]}]}, '[{"loc": ["a"]}]'),
        ({"error": None}, "the server failed without saying why"),
    ],
)
def test_errors_of_many_forms_are_put_in_words(answer: Any, words: str) -> None:
    assert explain(answer) == words


def test_a_reply_adds_up_its_pieces() -> None:
    reply = Reply(started=10.0)
    reply.add(Piece("a", (Token(1, "a", False),), 1, 0), 11.0)
    assert reply.acceptance_rate is None
    assert reply.time_per_output_token is None
    reply.add(Piece("bc", (Token(2, "b", True), Token(3, "c", False)), 1, 4), 13.0)
    assert (reply.text, reply.num_tokens, reply.gamma) == ("abc", 3, 4.0)
    assert (reply.acceptance_rate, reply.tokens_per_step) == (0.25, 1.5)
    # The first piece's tokens took no time that anybody could see.
    assert reply.time_to_first_token == 1.0
    assert reply.latency == 3.0
    assert status_line(reply, 13.0) == (
        "gamma 4  accepted 25%  1.50 tokens/step  - tokens/s  3 tokens"
    )
    reply.add(Piece("de", (Token(4, "d", True), Token(5, "e", False)), 1, 4), 15.0)
    assert reply.time_per_output_token == 1.0
    assert status_line(reply, 15.0).endswith("1 tokens/s  5 tokens")


@pytest.mark.parametrize(("num_tokens", "seconds"), [(1, 0.0), (2, 0.5), (4, 0.5), (50, 0.001)])
def test_a_reply_too_short_or_read_at_once_has_no_pace(num_tokens: int, seconds: float) -> None:
    """Two tokens from one read were thousands per second."""
    reply = Reply(0.0)
    for at in range(num_tokens):
        reply.add(Piece("a", (Token(1, "a", False),), 1, 0), 1.0 + seconds * (at > 0))
    assert reply.time_per_output_token is None
    assert "- tokens/s" in status_line(reply, 1.0 + seconds)
    assert "tokens/s" not in summary(reply)[0]
    unit = "token" if num_tokens == 1 else "tokens"
    assert summary(reply)[0].startswith(f"{num_tokens} {unit}, broken off")


def test_a_server_that_names_no_tokens_is_counted_by_chunks_until_it_has_counted() -> None:
    reply = Reply(0.0, tells_drafts=False)
    assert status_line(reply, 2.0).startswith("waiting for the first token (queued, ")
    assert status_line(reply, 2.0).endswith(", 2 s")
    for now in (1.0, 2.0, 3.0, 4.0, 5.0):
        reply.add(Piece("x"), now)
    assert status_line(reply, 5.0) == "1 chunks/s  5 chunks"
    reply.add(Piece(usage={"completion_tokens": 9}), 5.5)
    assert reply.num_tokens == 9
    assert reply.time_per_output_token == 0.5
    assert summary(reply)[1] == "this server does not tell which tokens were drafted"


@given(
    st.lists(st.tuples(st.text("ab\u00e9", max_size=3), st.booleans()), max_size=12),
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(0, 5),
)
def test_marks_fall_on_the_same_characters_however_the_text_is_held_back(
    tokens: list[tuple[str, bool]], delays: list[int], num_cut: int
) -> None:
    """``delays``: characters that each chunk brings; ``num_cut``: a stop string cut so many off."""
    expected = [(char, drafted) for text, drafted in tokens for char in text]
    shown = "".join(char for char, _ in expected)
    shown = shown[: max(0, len(shown) - num_cut)]
    named = tuple(Token(0, text, drafted) for text, drafted in tokens)
    marker, found, at = Marker(), [], 0
    for number, size in enumerate([*delays, len(shown)]):
        piece = Piece(shown[at : at + size], named if number == 0 else ())
        at += len(piece.text)
        found += [(char, drafted) for text, drafted in marker.add(piece) for char in text]
    assert found == expected[: len(shown)]


def test_tokens_of_thoughts_mark_nothing() -> None:
    """They are told of, but their text is not the reply's."""
    thought = (Token(0, "<think>", False), Token(1, "hm", True), Token(2, "</think>", True))
    marker = Marker()
    assert list(marker.add(Piece("", thought[:2]))) == []
    ended = (thought[2], Token(3, "h", False), Token(4, "i", True))
    assert list(marker.add(Piece("h", ended))) == [("h", False)]
    assert list(marker.add(Piece("i", ()))) == [("i", True)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], {}),
        ([None], {}),
        ([3.0], {"p50": 3.0, "p90": 3.0, "p99": 3.0}),
        ([None, *map(float, range(100, -1, -1))], {"p50": 50.0, "p90": 90.0, "p99": 99.0}),
        ([1.0, 2.0], {"p50": 1.5, "p90": 1.9, "p99": 1.99}),
    ],
)
def test_percentiles_are_interpolated(values: list[Any], expected: dict[str, float]) -> None:
    assert percentiles(values) == pytest.approx(expected)


@dataclass
class TimedArm:
    """Rounds of one request of ten tokens each."""

    seconds: list[float]
    text: str = "x"
    name: str = "arm"
    speculative: dict[str, Any] | None = None
    joules: list[float | None] = field(default_factory=list)

    @property
    def rounds(self) -> list[list[Reply]]:
        token = Token(1, self.text, False)
        replies = [Reply(0.0, text=self.text, tokens=[token] * 10) for _ in self.seconds]
        return [[reply] for reply in replies]


def test_a_speed_up_is_the_baselines_time_per_token_over_the_arms() -> None:
    base, fast = summarize([TimedArm([2.0, 4.0]), TimedArm([1.0, 2.0], text="y")])
    assert (base.speedup, base.throughput, base.num_equal_texts) == (1.0, 20 / 6, 2)
    assert (fast.speedup, fast.speedup_by_round) == (2.0, [2.0, 2.0])
    assert fast.num_equal_texts == 0
    assert not is_unsteady(fast)
    assert fast.joules_per_token is None
    arms = [TimedArm([2.0, 4.0], joules=[30.0, 50.0]), TimedArm([1.0, 1.0], joules=[9.0, None])]
    used = summarize(arms)
    assert [arm.joules_per_token for arm in used] == [4.0, None]
    # Rounds that disagree are told.
    assert used[1].speedup_by_round == [2.0, 4.0]
    assert is_unsteady(used[1])


def test_one_arm_alone_is_compared_with_nothing() -> None:
    (alone,) = summarize([TimedArm([2.0])])
    assert (alone.speedup, alone.speedup_by_round, alone.num_equal_texts) == (None, [], None)
    assert not is_unsteady(alone)


def test_a_history_shows_a_models_control_characters() -> None:
    """Else a reply that was shown as it should be moved the cursor when it was listed again."""
    said, shown = "assistant: a\x1b]0;b\a\nc", "assistant: a\u241b]0;b\u2407\nc"
    out, err = StringIO(), StringIO()
    console = Console(file=out, force_terminal=True, color_system=None)
    TerminalScreen("auto", False, console).note(said)
    assert out.getvalue() == f"{shown}\n"
    PlainScreen("auto", False, StringIO(), err).note(said)
    assert err.getvalue() == f"# {shown}\n"
