"""The replies of both endpoints, in OpenAI's shape plus our own fields, and what writes them.

Own fields: ``usage.speculative``, ``metrics`` (the same account in vLLM's words), ``seed`` (the one used:
sending it again reproduces the reply), and per choice ``stop_reason``, ``token_ids``,
``prompt_token_ids`` and ``tokens``. With ``tokens`` come ``num_steps``, the steps that a chunk tells of,
and ``num_draft_tokens``, the drafts they verified. A field that was not asked for is left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NotRequired, TypeAlias

from typing_extensions import TypedDict

from engine.request.events import TokenLogprobs
from server.errors import ApiError
from server.formats.parts import joined
from server.plan import RequestPlan
from server.reply.choices import ChoiceDelta, FinishReason, ReplyToken
from server.reply.messages import ChatDelta, ChatReplyMessage, message_delta, whole_message
from server.reply.sse import DONE, event
from server.reply.token_texts import TokenTexts
from server.reply.usage import ReplyMetrics, RunningUsage, Usage, reply_metrics, running_usage


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
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]
    tokens: NotRequired[list[DraftedToken]]
    num_steps: NotRequired[int]
    num_draft_tokens: NotRequired[int]


class CompletionLogprobs(TypedDict):
    """``text_offset`` counts characters from the start of the choice's whole text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Ending):
    index: int
    text: str
    logprobs: CompletionLogprobs | None


class TopLogprob(TypedDict):
    """``bytes``: the token's UTF-8 bytes, possibly a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]


class ChatChoice(Ending):
    index: int
    message: ChatReplyMessage
    logprobs: ChatLogprobs | None


class ChatChunkChoice(Ending):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class Envelope(TypedDict):
    """The first fields of both endpoints' replies and chunks."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    seed: int


class CompletionChunk(Envelope):
    """``usage``: in the last one, of those that were asked for; or in every one, so far."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | RunningUsage]
    metrics: NotRequired[ReplyMetrics]


class Completion(Envelope):
    """A whole reply."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    metrics: NotRequired[ReplyMetrics]
    metadata: NotRequired[dict[str, str]]


class ChatChunk(Envelope):
    """``usage``: in the last one, of those that were asked for; or in every one, so far."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | RunningUsage]
    metrics: NotRequired[ReplyMetrics]
    prompt_logprobs: NotRequired[PromptLogprobs]


class ChatCompletion(Envelope):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    metrics: NotRequired[ReplyMetrics]
    metadata: NotRequired[dict[str, str]]
    prompt_logprobs: NotRequired[PromptLogprobs]


def _account(usage: Usage) -> dict[str, Any]:
    metrics = reply_metrics(usage)
    return {"usage": usage} if metrics is None else {"usage": usage, "metrics": metrics}


def fold(deltas: Iterable[ChoiceDelta], num_choices: int) -> list[ChoiceDelta]:
    """Each choice as the one delta that its deltas add up to, in index order."""
    by_choice: list[list[ChoiceDelta]] = [[] for _ in range(num_choices)]
    for delta in deltas:
        by_choice[delta.index].append(delta)
    return [_sum(index, found) for index, found in enumerate(by_choice)]


def _sum(index: int, deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    prompts = (each.prompt_logprobs for each in deltas)
    return ChoiceDelta(
        index,
        first=True,
        text="".join(each.text for each in deltas),
        tokens=tuple(token for each in deltas for token in each.tokens),
        prompt_logprobs=next((each for each in prompts if each is not None), None),
        end=deltas[-1].end if deltas else None,
        num_steps=sum(each.num_steps for each in deltas),
        num_draft_tokens=sum(each.num_draft_tokens for each in deltas),
        parts=tuple(joined(part for each in deltas for part in each.parts)),
    )


class Writer(ABC):
    """Puts one request's deltas into an endpoint's shape. ``ending``: what its streams end with, however
    they went.
    """

    ending = b""

    def __init__(
        self, plan: RequestPlan, texts: TokenTexts, model_name: str, fingerprint: str
    ) -> None:
        self.plan = plan
        self._texts = texts
        self._model_name = model_name
        self._fingerprint = fingerprint

    def begin(self) -> bytes:
        """Returns the events before those of deltas."""
        return b""

    @abstractmethod
    def events(self, delta: ChoiceDelta) -> bytes:
        """Returns the events that tell of a delta; none where there is nothing to tell."""

    @abstractmethod
    def finish(self, usage: Usage) -> bytes:
        """Returns the events after those of deltas."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """Returns the events of a failure after the status has been sent, in place of all others."""

    @abstractmethod
    def reply(self, choices: Sequence[ChoiceDelta], usage: Usage) -> Mapping[str, Any]:
        """The whole reply, of folded choices."""


class ChunkWriter(Writer):
    """Streams as chunks that look like the whole: what completions and chats share."""

    ending = DONE
    id_prefix: ClassVar[str]
    whole: ClassVar[str]
    """The ``object`` of whole replies, ``chunk`` that of chunks."""
    chunk: ClassVar[str]

    def __init__(
        self, plan: RequestPlan, texts: TokenTexts, model_name: str, fingerprint: str
    ) -> None:
        super().__init__(plan, texts, model_name, fingerprint)
        self._shows_tokens = (
            plan.return_token_ids or plan.return_drafted or plan.num_logprobs is not None
        )
        self._num_written = 0
        self._envelope: Envelope = {
            "id": f"{self.id_prefix}-{plan.request_id}",
            "created": plan.created,
            "model": model_name,
            "system_fingerprint": fingerprint,
            "seed": plan.seed,
        }

    def events(self, delta: ChoiceDelta) -> bytes:
        """A chunk, unless the delta is of tokens that add no text and were not asked for."""
        self._num_written += len(delta.tokens)
        is_shown = delta.first or delta.end or delta.text or delta.parts
        if not (is_shown or (delta.tokens and self._shows_tokens)):
            return b""
        chunk = self._object(self.chunk, [delta])
        if self.plan.continuous_usage:
            chunk["usage"] = running_usage(self.plan.num_prompt_tokens, self._num_written)
        return event(chunk)

    def finish(self, usage: Usage) -> bytes:
        if not self.plan.include_usage:
            return b""
        return event({**self._object(self.chunk, []), **_account(usage)})

    def failure(self, error: ApiError) -> bytes:
        return event(error.body())

    def reply(self, choices: Sequence[ChoiceDelta], usage: Usage) -> Mapping[str, Any]:
        told = {"metadata": self.plan.metadata} if self.plan.metadata else {}
        return {**self._object(self.whole, choices), **_account(usage), **told}

    def _object(self, kind: str, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        """A reply, or a chunk of it, but for what was used."""
        choices = [self._choice(kind, delta) for delta in deltas]
        return {**self._envelope, "object": kind, "choices": choices}

    @abstractmethod
    def _choice(self, kind: str, delta: ChoiceDelta) -> Mapping[str, Any]:
        """A delta as a choice of an object of this kind."""

    def _text(self, delta: ChoiceDelta) -> str:
        """The delta's text, behind what the choice's text begins with."""
        return self.plan.beginning(delta.index) + delta.text if delta.first else delta.text

    def _prompt_logprobs(self, delta: ChoiceDelta) -> PromptLogprobs | None:
        """Returns those asked for, where the delta brings them."""
        num = self.plan.num_prompt_logprobs
        if num is None or delta.prompt_logprobs is None:
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
        """Returns the logprobs beside a token: the likeliest, then the rest of those that were named."""
        top = logprobs.top[: self.plan.num_logprobs]
        listed = {token_id for token_id, _ in top}
        return [*top, *(each for each in logprobs.named if each[0] not in listed)]

    def _name(self, token_id: int) -> str:
        """Returns a token's name in logprobs."""
        if self.plan.tokens_as_ids:
            return f"token_id:{token_id}"
        return self._texts.text(token_id)

    def _ending(self, delta: ChoiceDelta) -> Ending:
        """The fields of ``Ending`` that apply to this delta."""
        end = delta.end
        found: Ending = {"finish_reason": None if end is None else end.reason}
        if end is not None:
            found["stop_reason"] = end.stop_reason
        if self.plan.return_token_ids:
            found["token_ids"] = [token.token_id for token in delta.tokens]
            if delta.first:
                found["prompt_token_ids"] = list(self.plan.prompt_token_ids(delta.index))
        if self.plan.return_drafted:
            found["tokens"] = [
                DraftedToken(id=token.token_id, text=token.text, drafted=token.drafted)
                for token in delta.tokens
            ]
            found["num_steps"] = delta.num_steps
            found["num_draft_tokens"] = delta.num_draft_tokens
        return found


class CompletionWriter(ChunkWriter):
    """``/v1/completions``: a chunk has the shape of the whole."""

    id_prefix = "cmpl"
    whole = chunk = "text_completion"

    def _choice(self, kind: str, delta: ChoiceDelta) -> CompletionChoice:
        del kind
        choice: CompletionChoice = {
            "index": delta.index,
            "text": self._text(delta),
            "logprobs": None if self.plan.num_logprobs is None else self._logprobs(delta),
            **self._ending(delta),
        }
        if (found := self._prompt_logprobs(delta)) is not None:
            choice["prompt_logprobs"] = found
        return choice

    def _logprobs(self, delta: ChoiceDelta) -> CompletionLogprobs:
        block = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if self.plan.echo and delta.prompt_logprobs is not None:
            self._add_prompt(block, delta)
        start = len(self.plan.beginning(delta.index))
        for token in delta.tokens:
            self._add(block, token.token_id, token.logprobs, start + token.start)
        return block

    def _add_prompt(self, block: CompletionLogprobs, delta: ChoiceDelta) -> None:
        """The prompt's tokens; the first has no logprob, since nothing comes before it."""
        assert delta.prompt_logprobs is not None
        text, token_ids = self.plan.beginning(delta.index), self.plan.prompt_token_ids(delta.index)
        pieces = self._texts.pieces(token_ids)
        offset = 0
        for token_id, piece, logprobs in zip(token_ids, pieces, delta.prompt_logprobs, strict=True):
            self._add(block, token_id, logprobs, offset)
            if token_id in self._texts.special_ids:
                # The tokenizer may have added it, and then it is not in the text.
                name = self._texts.text(token_id)
                offset += len(name) if text.startswith(name, offset) else 0
            offset += len(piece)

    def _add(
        self,
        block: CompletionLogprobs,
        token_id: int,
        logprobs: TokenLogprobs | None,
        offset: int,
    ) -> None:
        block["tokens"].append(self._name(token_id))
        block["text_offset"].append(offset)
        block["token_logprobs"].append(None if logprobs is None else logprobs.logprob)
        if logprobs is None:
            block["top_logprobs"].append(None)
            return
        top = {self._name(each): logprob for each, logprob in self._shown(logprobs)}
        # OpenAI lists the chosen token too, so there may be one entry more than was asked for.
        top.setdefault(self._name(token_id), logprobs.logprob)
        block["top_logprobs"].append(top)


class ChatWriter(ChunkWriter):
    """``/v1/chat/completions``."""

    id_prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def _object(self, kind: str, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        found = super()._object(kind, deltas)
        # All choices have one prompt, so its logprobs come once, with the first.
        if deltas and deltas[0].index == 0:
            logprobs = self._prompt_logprobs(deltas[0])
            if logprobs is not None:
                found["prompt_logprobs"] = logprobs
        return found

    def _choice(self, kind: str, delta: ChoiceDelta) -> Mapping[str, Any]:
        text = self._text(delta)
        logprobs = None if self.plan.num_logprobs is None else self._logprobs(delta.tokens)
        if kind == self.whole:
            message = whole_message(delta, text)
            return ChatChoice(
                index=delta.index, message=message, logprobs=logprobs, **self._ending(delta)
            )
        return ChatChunkChoice(
            index=delta.index,
            delta=message_delta(delta, text),
            logprobs=logprobs,
            **self._ending(delta),
        )

    def _logprobs(self, tokens: Sequence[ReplyToken]) -> ChatLogprobs:
        content: list[ChatLogprob] = []
        for token in tokens:
            assert token.logprobs is not None, "the engine sends logprobs where they were asked for"
            chosen = self._entry(token.token_id, token.logprobs.logprob)
            top = [self._entry(*each) for each in self._shown(token.logprobs)]
            content.append(ChatLogprob(**chosen, top_logprobs=top))
        return ChatLogprobs(content=content)

    def _entry(self, token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=self._name(token_id),
            logprob=logprob,
            bytes=list(self._texts.token_bytes(token_id)),
        )
