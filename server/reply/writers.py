"""What both endpoints' writers share: folding deltas, and the fields next to the text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel

from engine.events import TokenLogprobs
from server.plan import RequestPlan
from server.reply.choices import ChoiceDelta, ChoiceEnd, ReplyToken
from server.reply.replies import DraftedToken, Usage


@dataclass(slots=True)
class FoldedChoice:
    """All deltas of one choice, put together."""

    text: str = ""
    tokens: list[ReplyToken] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    end: ChoiceEnd | None = None
    num_steps: int = 0
    num_draft_tokens: int = 0

    def add(self, delta: ChoiceDelta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.num_steps += delta.num_steps
        self.num_draft_tokens += delta.num_draft_tokens
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.end is not None:
            self.end = delta.end


def fold(deltas: Iterable[ChoiceDelta], num_choices: int) -> list[ChoiceDelta]:
    """Each choice as the one delta that its deltas add up to, in index order."""
    folded = [FoldedChoice() for _ in range(num_choices)]
    for delta in deltas:
        folded[delta.index].add(delta)
    return [
        ChoiceDelta(
            index,
            True,
            choice.text,
            tuple(choice.tokens),
            choice.prompt_logprobs,
            choice.end,
            choice.num_steps,
            choice.num_draft_tokens,
        )
        for index, choice in enumerate(folded)
    ]


class Writer(Protocol):
    """Puts one request's deltas into an endpoint's shape."""

    plan: RequestPlan

    def chunk(self, delta: ChoiceDelta) -> BaseModel | None:
        """A streamed chunk; None where the delta has nothing to tell."""

    def usage_chunk(self, usage: Usage) -> BaseModel: ...

    def reply(self, choices: Sequence[ChoiceDelta], usage: Usage) -> BaseModel:
        """The whole reply, of folded choices."""


def extras(plan: RequestPlan, delta: ChoiceDelta) -> dict[str, Any]:
    """The fields of a choice beyond OpenAI's that apply to this delta."""
    fields: dict[str, Any] = {}
    if delta.end is not None:
        fields["stop_reason"] = delta.end.stop_reason
    if plan.return_token_ids:
        fields["token_ids"] = [token.token_id for token in delta.tokens]
        if delta.first:
            fields["prompt_token_ids"] = list(plan.prompt_of(delta.index).token_ids)
    if plan.return_drafted:
        fields["tokens"] = [
            DraftedToken(id=token.token_id, text=token.text, drafted=token.drafted)
            for token in delta.tokens
        ]
        fields["num_steps"] = delta.num_steps
        fields["num_draft_tokens"] = delta.num_draft_tokens
    return fields


def says_nothing(plan: RequestPlan, delta: ChoiceDelta) -> bool:
    """Whether a chunk of this delta would be empty: tokens that add no text and were not asked
    for.
    """
    shows_tokens = plan.return_token_ids or plan.return_drafted or plan.num_logprobs is not None
    return not (delta.first or delta.end or delta.text or (delta.tokens and shows_tokens))
