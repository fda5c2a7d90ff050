"""Reasoning is split off, whatever the pieces in which the text comes."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.formats.message import MessageParser
from server.formats.parts import (
    CallStart,
    Part,
    Reasoning,
    content_of,
    joined,
    reasoning_of,
)
from server.formats.registry import format_of, reasoning_formats
from server.plan import TextOptions


def parse(options: TextOptions, pieces: list[str]) -> tuple[list[Part], int]:
    """(parts, reasoning tokens), each character a token."""
    parser, found, at = MessageParser(options, "seed"), [], 0
    for piece in pieces:
        found += parser.feed(piece, range(at, at + len(piece)))
        at += len(piece)
    return list(joined([*found, *parser.finish()])), parser.num_reasoning_tokens


QWEN = TextOptions(reasoning="qwen3")
OPEN = TextOptions(reasoning="qwen3", reasoning_is_open=True)


@pytest.mark.parametrize(
    ("options", "text", "reasoning", "content", "num_tokens"),
    [
        (QWEN, "<think>\na b\n</think>\n\nc d\n", "a b", "c d\n", 20),
        (QWEN, "c d", "", "c d", 0),
        (QWEN, "\n c <think>x</think>", "", "\n c <think>x</think>", 0),
        (QWEN, "<think>\n\n</think>\n\nc", "", "c", 17),
        (QWEN, "<think> a", "a", "", 9),
        (QWEN, "<thin", "", "<thin", 0),
        (replace(QWEN, include_reasoning=False), "<think>a</think>b", "", "b", 16),
        (OPEN, "a\n</think>\nc", "a", "c", 10),
        (OPEN, "<think>a</think>c", "a", "c", 16),
        (OPEN, "a </thin", "a </thin", "", 8),
    ],
)
def test_reasoning_is_split_off(
    options: TextOptions, text: str, reasoning: str, content: str, num_tokens: int
) -> None:
    parts, found = parse(options, [text])
    assert (reasoning_of(parts), content_of(parts), found) == (reasoning, content, num_tokens)


def test_calls_are_looked_for_behind_the_reasoning_only() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    options = TextOptions(tool_calls="hermes", functions={"f": {}}, reasoning="qwen3")
    parts, _ = parse(options, [f"<think>{call}</think>{call}"])
    assert parts[0] == Reasoning(call)
    assert [type(part).__name__ for part in parts[1:]] == ["CallStart", "CallArguments"]


OSS = TextOptions(tool_calls="gpt_oss", functions={"f": {}}, reasoning="gpt_oss")
THOUGHT = "<|channel|>analysis<|message|>hm<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>yes"
OSS_CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "num_calls"),
    [
        (THOUGHT + FINAL, "hm", "yes", 0),
        ("<|channel|>final<|message|>yes<|return|>", "", "yes", 0),
        ("plain", "", "plain", 0),
        ("<|channel|>analysis<|message|>h", "h", "", 0),
        (f"{THOUGHT}<|start|>assistant{THOUGHT}{FINAL}", "hm\nhm", "yes", 0),
        (f"{THOUGHT}<|start|>assistant{OSS_CALL}", "hm", "", 1),
        (f"{THOUGHT}<|start|>assistant{OSS_CALL}<|call|>", "hm", "", 1),
        (" to=functions.f<|channel|>commentary json<|message|>{}", "", "", 1),
        (
            f"<|channel|>commentary<|message|>I look<|end|><|start|>assistant{THOUGHT}"
            f"<|start|>assistant{OSS_CALL}",
            "hm",
            "I look",
            1,
        ),
    ],
)
def test_channels_are_told_apart(text: str, reasoning: str, content: str, num_calls: int) -> None:
    parts, num_tokens = parse(OSS, list(text))
    assert (reasoning_of(parts), content_of(parts)) == (reasoning, content)
    assert sum(isinstance(part, CallStart) for part in parts) == num_calls
    assert num_tokens == sum(
        map(len, re.findall(r"(?:<.start.>assistant)?<.channel.>analysis.*?(?:<.end.>|$)", text))
    )


OSS_FRAGMENTS = [
    *(THOUGHT, FINAL, OSS_CALL, "a", "<"),
    *("<|start|>", "<|start|>assistant", "<|end|>", "<|channel|>"),
]
QWEN_FRAGMENTS = ["<think>", "</think>", "<think", "</", "a", " ", "\n", "b c"]


@pytest.mark.parametrize(
    ("options", "fragments"), [(QWEN, QWEN_FRAGMENTS), (OPEN, QWEN_FRAGMENTS), (OSS, OSS_FRAGMENTS)]
)
@given(data=st.data(), cuts=st.lists(st.integers(0, 200)))
def test_how_the_text_comes_changes_nothing(
    options: TextOptions, fragments: list[str], data: st.DataObject, cuts: list[int]
) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(fragments), max_size=8)))
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert parse(options, pieces) == parse(options, list(text)) == parse(options, [text])


R1 = "{{ '<\uff5cAssistant\uff5c>' }}{{ content.split('</think>')[-1] }}"


def test_the_template_says_which_format() -> None:
    assert format_of(reasoning_formats(), R1) == "deepseek_r1"
    assert format_of(reasoning_formats(), "<think> ... </think>") == "qwen3"
    assert format_of(reasoning_formats(), "<|channel|>analysis<|message|>") == "gpt_oss"
    assert format_of(reasoning_formats(), "{{ messages }}") == ""


@pytest.mark.parametrize(
    ("form", "prompt", "is_open"),
    [
        ("qwen3", "<|assistant|>", False),
        ("qwen3", "<|assistant|><think>\n", True),
        ("qwen3", "<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<|assistant|>", True),
        ("deepseek_r1", "<think>\n\n</think>\n\n", False),
    ],
)
def test_the_prompt_says_where_the_text_begins(form: str, prompt: str, is_open: bool) -> None:
    assert reasoning_formats()[form].is_open_after(prompt) is is_open


@pytest.mark.parametrize("form", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize(
    ("continued", "is_open"),
    [
        ("<think>\nLet me think, 2 + 2", True),
        ("<think>\nEasy.</think>", False),
        ("Easy.</think>The answer is", False),
        ("The answer is", False),
    ],
)
def test_a_message_that_goes_on_says_by_its_last_marker(
    form: str, continued: str, is_open: bool
) -> None:
    found = reasoning_formats()[form]
    assert found.is_open_after(f"<|assistant|>{continued}", continued) is is_open
