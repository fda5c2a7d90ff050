"""The replies of endpoints as whole objects and as events, and what completions and chats share of them.

Own fields beside OpenAI's: ``usage.speculative``, ``metrics`` (the same account in vLLM's words),
``seed`` (the one used: sending it again reproduces the reply), and per choice ``stop_reason``,
``token_ids``, ``prompt_token_ids`` and ``tokens``. With ``tokens`` come ``num_steps``, the steps that a
chunk tells of, and ``num_draft_tokens``, the drafts they verified. A field that was not asked for is
left out; those that vLLM always has are null in whole replies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NotRequired, TypeAlias

from fastapi.sse import KEEPALIVE_COMMENT
from pydantic_core import to_json
from typing_extensions import TypedDict

from engine.request.events import TokenLogprobs
from server.errors import ApiError
from server.formats.parts import Content, Part
from server.plan import RequestPlan
from server.reply.deltas import ChoiceDelta, ChoiceEnd, FinishReason
from server.reply.token_texts import TokenTexts
from server.reply.usage import ReplyMetrics, RunningUsage, Usage, reply_metrics

DONE = b"data: [DONE]\n\n"


def as_json(content: Any) -> bytes:
    return to_json(content, inf_nan_mode="null")


def event(content: Any, name: str | None = None) -> bytes:
    """Returns a server-sent event. JSON made here has no line breaks, so its data is one line."""
    data = b"data: %b\n\n" % as_json(content)
    return data if name is None else b"event: %b\n%b" % (name.encode(), data)


class DraftedToken(TypedDict):
    """``text``: what the token added to the choice's text; ``drafted``: an accepted draft."""

    id: int
    text: str
    drafted: bool


class PromptLogprob(TypedDict):
    """``rank``: 1 for the likeliest; null for a token of the prompt beyond those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, by token id; null for the first, since nothing comes before it."""


class Ending(TypedDict):
    """The last fields of all replies' choices."""

    finish_reason: FinishReason | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int] | None]
    tokens: NotRequired[list[DraftedToken]]
    num_steps: NotRequired[int]
    num_draft_tokens: NotRequired[int]


class OfPrompt(TypedDict):
    """Fields about a prompt: in each choice of completions, beside the choices of chats, which have one
    prompt."""

    prompt_token_ids: NotRequired[list[int] | None]
    prompt_logprobs: NotRequired[PromptLogprobs | None]


NOTHING_OF_PROMPT = OfPrompt(prompt_token_ids=None, prompt_logprobs=None)


class Envelope(TypedDict):
    """The first fields of both endpoints' replies and chunks."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    seed: int
    service_tier: NotRequired[str]


class Chunk(Envelope):
    """``usage``: in the last one, of those that were asked for; or in every one, so far."""

    usage: NotRequired[Usage | RunningUsage]
    metrics: NotRequired[ReplyMetrics]


class Whole(Envelope):
    """A whole reply."""

    usage: Usage
    metrics: NotRequired[ReplyMetrics]
    metadata: NotRequired[dict[str, str]]


def _account(usage: Usage) -> dict[str, Any]:
    metrics = reply_metrics(usage)
    return {"usage": usage} if metrics is None else {"usage": usage, "metrics": metrics}


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


class ChunkWriter(Writer):
    """Streams as chunks that look like the whole: what completions and chats share."""

    ending = DONE
    id_prefix: ClassVar[str]
    whole: ClassVar[str]
    """The ``object`` of whole replies, ``chunk`` that of chunks."""
    chunk: ClassVar[str]

    def __init__(self, plan: RequestPlan, texts: TokenTexts, fingerprint: str) -> None:
        super().__init__(plan, texts, fingerprint)
        self._shows_tokens = (
            plan.return_token_ids or plan.return_drafted or plan.num_logprobs is not None
        )
        self._num_written = 0
        self._envelope: Envelope = {
            "id": f"{self.id_prefix}-{plan.request_id}",
            "created": plan.created,
            "model": plan.model,
            "system_fingerprint": fingerprint,
            "seed": plan.seed,
        }
        if plan.service_tier is not None:
            self._envelope["service_tier"] = plan.service_tier

    def events(self, delta: ChoiceDelta) -> bytes:
        """A chunk, unless the delta is of tokens that add no text and were not asked for."""
        self._num_written += len(delta.tokens)
        is_shown = delta.first or delta.end or delta.text or delta.parts
        if not (is_shown or (delta.tokens and self._shows_tokens)):
            return b""
        beside: dict[str, Any] = {}
        if delta.first or delta.prompt_logprobs is not None:
            beside |= self._beside(delta)
        if self.plan.continuous_usage:
            beside["usage"] = RunningUsage(
                prompt_tokens=self.plan.num_prompt_tokens,
                completion_tokens=self._num_written,
                total_tokens=self.plan.num_prompt_tokens + self._num_written,
            )
        return self._chunk(as_json(self._chunk_choice(delta)), beside)

    def finish(self, usage: Usage) -> bytes:
        if not self.plan.include_usage:
            return b""
        return self._chunk(b"", _account(usage))

    def reply(self, choices: Sequence[ChoiceDelta], usage: Usage) -> Mapping[str, Any]:
        told = {"metadata": self.plan.metadata} if self.plan.metadata else {}
        beside = self._beside_whole(choices[0]) if choices else {}
        return {
            **self._envelope,
            "object": self.whole,
            "choices": [self._whole_choice(each) for each in choices],
            **beside,
            **_account(usage),
            **told,
        }

    def _chunk(self, choices: bytes, beside: Mapping[str, Any]) -> bytes:
        """The event of a chunk with these choices, in JSON, and what stands beside them."""
        if beside:
            return b"%b%b],%b\n\n" % (self._head, choices, as_json(beside)[1:])
        return b"%b%b]}\n\n" % (self._head, choices)

    @cached_property
    def _head(self) -> bytes:
        """Returns the first bytes of every chunk."""
        return b'data: %b,"choices":[' % as_json({**self._envelope, "object": self.chunk})[:-1]

    def _beside(self, delta: ChoiceDelta) -> Mapping[str, Any]:
        """Returns the fields of a delta's chunk beside its choices."""
        del delta
        return {}

    def _beside_whole(self, first: ChoiceDelta) -> Mapping[str, Any]:
        """Returns the fields of a whole reply beside its choices, of which this is the first."""
        del first
        return {}

    @abstractmethod
    def _chunk_choice(self, delta: ChoiceDelta) -> Mapping[str, Any]:
        """A delta as the choice of a chunk."""

    @abstractmethod
    def _whole_choice(self, delta: ChoiceDelta) -> Mapping[str, Any]:
        """A folded choice as one of a whole reply."""

    def _text(self, delta: ChoiceDelta) -> str:
        """The delta's text, behind what the choice's text begins with."""
        return self.plan.beginning(delta.index) + delta.text if delta.first else delta.text

    def _of_prompt(self, delta: ChoiceDelta) -> OfPrompt:
        """Returns the fields about the prompt that were asked for, where the delta brings them."""
        found: OfPrompt = {}
        if delta.first and self.plan.return_token_ids:
            found["prompt_token_ids"] = list(self.plan.prompt_token_ids(delta.index))
        if (logprobs := self._prompt_logprobs(delta)) is not None:
            found["prompt_logprobs"] = logprobs
        return found

    def _prompt_logprobs(self, delta: ChoiceDelta) -> PromptLogprobs | None:
        """Returns those asked for, where the delta brings them."""
        num = self.plan.num_prompt_logprobs
        if delta.prompt_logprobs is None or num is None:
            return None
        return [
            None if each is None else self._prompt_entries(each, num)
            for each in delta.prompt_logprobs
        ]

    def _prompt_entries(self, found: TokenLogprobs, num: int) -> dict[str, PromptLogprob]:
        ranked: list[tuple[int, float, int | None]] = [
            (*each, rank) for rank, each in enumerate(found.top, 1)
        ]
        own = [each for each in ranked if each[0] == found.token_id]
        shown = [*(own or [(found.token_id, found.logprob, None)]), *ranked[:num]]
        return {
            str(token_id): PromptLogprob(
                logprob=logprob, rank=rank, decoded_token=self._texts.text(token_id)
            )
            for token_id, logprob, rank in shown
        }

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

    def _ending(self, delta: ChoiceDelta) -> Ending:
        """The fields of ``Ending`` that apply to this delta."""
        end = delta.end
        found: Ending = {"finish_reason": None}
        if end is not None:
            found["finish_reason"], found["stop_reason"] = end.reason, end.stop_reason
        if self.plan.return_token_ids:
            found["token_ids"] = [token.token_id for token in delta.tokens]
        if self.plan.return_drafted:
            found["tokens"] = [
                DraftedToken(id=token.token_id, text=token.text, drafted=token.drafted)
                for token in delta.tokens
            ]
            found["num_steps"] = delta.num_steps
            found["num_draft_tokens"] = delta.num_draft_tokens
        return found
