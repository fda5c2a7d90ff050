"""Deltas tell a choice to the client piece by piece; the last one has its end."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from engine.request.events import FinishInfo, TokenLogprobs
from server.formats.parts import Part, joined

FinishReason = Literal["stop", "length", "tool_calls"]


class ReplyToken(NamedTuple):
    """``text`` is what the token added; ``start`` its place in the choice's text, in characters. A tuple,
    since it is made of every token."""

    token_id: int
    text: str
    start: int
    drafted: bool
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """``num_tokens``: those kept. A token that lies wholly behind the cut of a stop string is
    not. ``cuts_call``: the text ends before the arguments of its last tool call do; then ``reason`` is
    what ended the text, and never "tool_calls".
    """

    reason: FinishReason
    stop_reason: int | str | None
    num_tokens: int
    info: FinishInfo
    num_reasoning_tokens: int = 0
    cuts_call: bool = False


@dataclass(slots=True)
class ChoiceDelta:
    """The tokens and text that a step, or several whose text was held back, added to a choice. ``first``:
    its first delta; ``end``: comes with the last. ``num_draft_tokens``: drafts verified in ``num_steps``
    steps.
    ``parts``: of text that is taken apart, all of it in order; ``text`` is then the content alone.
    Nobody changes it; frozen it would take three times as long to make, and one is made of every step.
    """

    index: int
    first: bool
    text: str = ""
    tokens: tuple[ReplyToken, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    end: ChoiceEnd | None = None
    num_steps: int = 0
    num_draft_tokens: int = 0
    parts: tuple[Part, ...] = ()


Sink = Callable[[ChoiceDelta], Coroutine[Any, Any, None] | None]
"""Takes a choice's next delta. It returns what the one after that has to wait for, if anything."""


def fold(index: int, deltas: Iterable[ChoiceDelta]) -> ChoiceDelta:
    """Returns the one delta that a choice's deltas add up to."""
    found = list(deltas)
    prompts = (each.prompt_logprobs for each in found)
    return ChoiceDelta(
        index,
        first=True,
        text="".join(each.text for each in found),
        tokens=tuple(token for each in found for token in each.tokens),
        prompt_logprobs=next((each for each in prompts if each is not None), None),
        end=found[-1].end if found else None,
        num_steps=sum(each.num_steps for each in found),
        num_draft_tokens=sum(each.num_draft_tokens for each in found),
        parts=tuple(joined(part for each in found for part in each.parts)),
    )
