"""The replies of endpoints as whole objects and as events, and what those of several APIs share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from fastapi.sse import KEEPALIVE_COMMENT
from pydantic_core import to_json
from typing_extensions import TypedDict

from engine.request.events import TokenLogprobs
from server.errors import ApiError
from server.formats.parts import Content, Part
from server.plan import RequestPlan
from server.reply.deltas import ChoiceDelta, ChoiceEnd, ReplyToken
from server.reply.token_texts import TokenTexts
from server.reply.usage import Usage


def as_json(content: Any) -> bytes:
    return to_json(content, inf_nan_mode="null")


def event(content: Any, name: str | None = None) -> bytes:
    """Returns a server-sent event. JSON made here has no line breaks, so its data is one line."""
    data = b"data: %b\n\n" % as_json(content)
    return data if name is None else b"event: %b\n%b" % (name.encode(), data)


class TopLogprob(TypedDict):
    """``bytes``: the token's UTF-8 bytes, possibly a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class WholeWriter(ABC):
    """Puts one request's choices into an endpoint's shape."""

    def __init__(self, plan: RequestPlan, texts: TokenTexts, fingerprint: str) -> None:
        self.plan = plan
        self._texts = texts
        self._fingerprint = fingerprint

    @abstractmethod
    def reply(self, choices: Sequence[ChoiceDelta], usage: Usage) -> Mapping[str, Any]:
        """The whole reply, of folded choices."""

    async def settle(self) -> None:  # noqa: B027
        """Awaited before the last bytes go out, or the whole reply."""


class Writer(WholeWriter):
    """Puts deltas into it, too. ``media_type``: that of its streams; ``ending``: what they end with,
    however they went.
    """

    media_type = "text/event-stream"
    ending = b""

    def begin(self) -> bytes:
        """Returns the events before those of deltas."""
        return b""

    def pause(self) -> bytes:
        """Returns what says nothing, for a pause in which proxies might hang up."""
        return KEEPALIVE_COMMENT

    @abstractmethod
    def events(self, delta: ChoiceDelta) -> bytes:
        """Returns the events that tell of a delta; none where there is nothing to tell."""

    @abstractmethod
    def finish(self, usage: Usage) -> bytes:
        """Returns the events after those of deltas."""

    def failure(self, error: ApiError) -> bytes:
        """Returns the events of a failure after the status has been sent, in place of all others."""
        return self.bare_failure(error)

    def bare_failure(self, error: ApiError) -> bytes:
        """Returns those that have nothing beside the error, which could fail in its turn."""
        return event(error.body())

    def logprobs_of(self, tokens: Sequence[ReplyToken]) -> list[ChatLogprob]:
        """Returns those of tokens of a request that asks for them."""
        found = []
        for token in tokens:
            assert token.logprobs is not None, "the engine sends logprobs where they were asked for"
            chosen = self._entry(token.token_id, token.logprobs.logprob)
            top = [self._entry(*each) for each in self._shown(token.logprobs)]
            found.append(ChatLogprob(**chosen, top_logprobs=top))
        return found

    def _shown(self, logprobs: TokenLogprobs) -> list[tuple[int, float]]:
        """Returns the logprobs beside a token: the likeliest; where tokens were named, it and those."""
        if not logprobs.named:
            return list(logprobs.top[: self.plan.num_logprobs])
        own = (logprobs.token_id, logprobs.logprob)
        return [own, *(each for each in logprobs.named if each[0] != own[0])]

    def _name(self, token_id: int) -> str:
        """Returns a token's name in logprobs."""
        if self.plan.tokens_as_ids:
            return f"token_id:{token_id}"
        return self._texts.text(token_id)

    def _entry(self, token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=self._name(token_id),
            logprob=logprob,
            bytes=list(self._texts.token_bytes(token_id)),
        )


class NamedEventWriter(Writer):
    """Streams as events named by their types, which tell of one choice. ``_end``: the choice's, where it
    has come to it."""

    def __init__(self, plan: RequestPlan, texts: TokenTexts, fingerprint: str) -> None:
        super().__init__(plan, texts, fingerprint)
        self._told: list[bytes] = []
        self._end: ChoiceEnd | None = None

    def events(self, delta: ChoiceDelta) -> bytes:
        for part in delta.parts or ((Content(delta.text),) if delta.text else ()):
            self._add(part)
        if delta.end is not None:
            self._end = delta.end
            self._close()
        return self._take()

    def reply(self, choices: Sequence[ChoiceDelta], usage: Usage) -> Mapping[str, Any]:
        self.events(choices[0])
        return self._ended(usage)

    @abstractmethod
    def _add(self, part: Part) -> None:
        """Tell of what was written."""

    @abstractmethod
    def _close(self) -> None:
        """End what is open, if anything is."""

    @abstractmethod
    def _ended(self, usage: Usage) -> Mapping[str, Any]:
        """Returns the whole reply."""

    def _tell(self, kind: str, **fields: Any) -> None:
        self._told.append(event({"type": kind, **fields}, kind))

    def _take(self) -> bytes:
        """Returns the events told since the last call."""
        told, self._told = self._told, []
        return b"".join(told)


def embeddings(choices: Sequence[ChoiceDelta]) -> Iterator[bytes]:
    """Yields what each choice's text came to."""
    for each in choices:
        assert each.end is not None
        assert each.end.info.embedding is not None, "a request that is pooled ends with it"
        yield each.end.info.embedding


def numbers(embedding: bytes) -> list[float]:
    found: list[float] = np.frombuffer(embedding, dtype="<f4").tolist()
    return found
