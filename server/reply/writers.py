"""The replies of both endpoints, in OpenAI's shape plus our own fields, and what writes them.

Own fields: ``usage.speculative``, ``seed`` (the one used: sending it again reproduces the reply),
and per choice ``stop_reason``, ``token_ids``, ``prompt_token_ids`` and ``tokens``. With ``tokens`` come
``num_steps``, the steps that a chunk tells of, and ``num_draft_tokens``, the drafts they verified. A
field that was not asked for is left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from engine.events import TokenLogprobs
from server.plan import RequestPlan
from server.reply.choices import ChoiceDelta, FinishReason, ReplyToken
from server.reply.token_texts import TokenTexts
from server.reply.usage import Usage


class DraftedToken(TypedDict):
    """``text``: what the token added to the choice's text; ``drafted``: an accepted draft."""

    id: int
    text: str
    drafted: bool


class Ending(TypedDict):
    """What the choices of all replies end with."""

    finish_reason: FinishReason | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    tokens: NotRequired[list[DraftedToken]]
    num_steps: NotRequired[int]
    num_draft_tokens: NotRequired[int]


class CompletionLogprobs(TypedDict):
    """``text_offset`` counts characters from the start of the choice's whole text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionText(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None


# Fields of the last base come first in JSON.
class CompletionChoice(Ending, CompletionText):
    pass


class TopLogprob(TypedDict):
    """``bytes``: the token's UTF-8 bytes, possibly a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]


class ChatReplyMessage(TypedDict):
    role: Literal["assistant"]
    content: str


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatMessageText(TypedDict):
    index: int
    message: ChatReplyMessage
    logprobs: ChatLogprobs | None


class ChatChoice(Ending, ChatMessageText):
    pass


class ChatDeltaText(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatChunkChoice(Ending, ChatDeltaText):
    pass


class Envelope(TypedDict):
    """What replies and chunks of both endpoints begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    seed: int


class CompletionChunk(Envelope):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Completion(CompletionChunk):
    """A whole reply; also a stream's chunk with the usage."""

    usage: Usage


class ChatCompletion(Envelope):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(Envelope):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


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
    )


class Writer(ABC):
    """Puts one request's deltas into an endpoint's shape: what both endpoints share."""

    def __init__(
        self, plan: RequestPlan, texts: TokenTexts, model_name: str, fingerprint: str
    ) -> None:
        self.plan = plan
        self._texts = texts
        self._model_name = model_name
        self._fingerprint = fingerprint
        self._shows_tokens = (
            plan.return_token_ids or plan.return_drafted or plan.num_logprobs is not None
        )

    def chunk(self, delta: ChoiceDelta) -> Mapping[str, Any] | None:
        """A streamed chunk; None for a delta of tokens that add no text and were not asked for."""
        if delta.first or delta.end or delta.text or (delta.tokens and self._shows_tokens):
            return self._chunk([delta])
        return None

    def usage_chunk(self, usage: Usage) -> Mapping[str, Any]:
        return {**self._chunk([]), "usage": usage}

    @abstractmethod
    def _chunk(self, deltas: Sequence[ChoiceDelta]) -> Mapping[str, Any]: ...

    @abstractmethod
    def reply(self, choices: Sequence[ChoiceDelta], usage: Usage) -> Mapping[str, Any]:
        """The whole reply, of folded choices."""

    def _envelope(self, id_prefix: str) -> Envelope:
        return {
            "id": f"{id_prefix}-{self.plan.request_id}",
            "created": self.plan.created,
            "model": self._model_name,
            "system_fingerprint": self._fingerprint,
            "seed": self.plan.seed,
        }

    def _ending(self, delta: ChoiceDelta) -> Ending:
        """The fields of ``Ending`` that apply to this delta."""
        end = delta.end
        found: Ending = {"finish_reason": None if end is None else end.reason}
        if end is not None:
            found["stop_reason"] = end.stop_reason
        if self.plan.return_token_ids:
            found["token_ids"] = [token.token_id for token in delta.tokens]
            if delta.first:
                found["prompt_token_ids"] = list(self.plan.prompt_of(delta.index).token_ids)
        if self.plan.return_drafted:
            found["tokens"] = [
                DraftedToken(id=token.token_id, text=token.text, drafted=token.drafted)
                for token in delta.tokens
            ]
            found["num_steps"] = delta.num_steps
            found["num_draft_tokens"] = delta.num_draft_tokens
        return found


class CompletionWriter(Writer):
    """``/v1/completions``: a chunk has the shape of the whole."""

    def _chunk(self, deltas: Sequence[ChoiceDelta]) -> CompletionChunk:
        return {
            **self._envelope("cmpl"),
            "object": "text_completion",
            "choices": [self._choice(delta) for delta in deltas],
        }

    def reply(self, choices: Sequence[ChoiceDelta], usage: Usage) -> Completion:
        return {**self._chunk(choices), "usage": usage}

    def _choice(self, delta: ChoiceDelta) -> CompletionChoice:
        echoed = self.plan.prompt_of(delta.index).text if self.plan.echo and delta.first else ""
        return {
            "index": delta.index,
            "text": echoed + delta.text,
            "logprobs": self._logprobs(delta),
            **self._ending(delta),
        }

    def _logprobs(self, delta: ChoiceDelta) -> CompletionLogprobs | None:
        if self.plan.num_logprobs is None:
            return None
        block = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if delta.prompt_logprobs is not None:
            self._add_prompt(block, delta)
        start = len(self.plan.prompt_of(delta.index).text) if self.plan.echo else 0
        for token in delta.tokens:
            self._add(block, token.token_id, token.logprobs, start + token.start)
        return block

    def _add_prompt(self, block: CompletionLogprobs, delta: ChoiceDelta) -> None:
        """The prompt's tokens; the first has no logprob, since nothing comes before it."""
        assert delta.prompt_logprobs is not None
        prompt = self.plan.prompt_of(delta.index)
        pieces = self._texts.pieces(prompt.token_ids)
        offset = 0
        for token_id, piece, logprobs in zip(
            prompt.token_ids, pieces, delta.prompt_logprobs, strict=True
        ):
            self._add(block, token_id, logprobs, offset)
            if token_id in self._texts.special_ids:
                # The tokenizer may have added it, and then it is not in the text.
                name = self._texts.text(token_id)
                offset += len(name) if prompt.text.startswith(name, offset) else 0
            offset += len(piece)

    def _add(
        self,
        block: CompletionLogprobs,
        token_id: int,
        logprobs: TokenLogprobs | None,
        offset: int,
    ) -> None:
        block["tokens"].append(self._texts.text(token_id))
        block["text_offset"].append(offset)
        block["token_logprobs"].append(None if logprobs is None else logprobs.logprob)
        if logprobs is None or not self.plan.num_logprobs:
            block["top_logprobs"].append(None)
            return
        top = {self._texts.text(top_id): logprob for top_id, logprob in logprobs.top}
        # OpenAI lists the chosen token too, so there may be one entry more than was asked for.
        top.setdefault(self._texts.text(token_id), logprobs.logprob)
        block["top_logprobs"].append(top)


class ChatWriter(Writer):
    """``/v1/chat/completions``."""

    def _chunk(self, deltas: Sequence[ChoiceDelta]) -> ChatChunk:
        return {
            **self._envelope("chatcmpl"),
            "object": "chat.completion.chunk",
            "choices": [self._chunk_choice(delta) for delta in deltas],
        }

    def _chunk_choice(self, delta: ChoiceDelta) -> ChatChunkChoice:
        shown: ChatDelta = {"role": "assistant"} if delta.first else {}
        if delta.text or delta.first:
            shown["content"] = delta.text
        return {
            "index": delta.index,
            "delta": shown,
            "logprobs": self._logprobs(delta.tokens),
            **self._ending(delta),
        }

    def reply(self, choices: Sequence[ChoiceDelta], usage: Usage) -> ChatCompletion:
        return {
            **self._envelope("chatcmpl"),
            "object": "chat.completion",
            "choices": [self._choice(choice) for choice in choices],
            "usage": usage,
        }

    def _choice(self, choice: ChoiceDelta) -> ChatChoice:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text},
            "logprobs": self._logprobs(choice.tokens),
            **self._ending(choice),
        }

    def _logprobs(self, tokens: Sequence[ReplyToken]) -> ChatLogprobs | None:
        if self.plan.num_logprobs is None:
            return None
        content: list[ChatLogprob] = []
        for token in tokens:
            assert token.logprobs is not None, "the engine sends logprobs where they were asked for"
            chosen = self._entry(token.token_id, token.logprobs.logprob)
            top = [self._entry(top_id, logprob) for top_id, logprob in token.logprobs.top]
            content.append(ChatLogprob(**chosen, top_logprobs=top))
        return ChatLogprobs(content=content)

    def _entry(self, token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=self._texts.text(token_id),
            logprob=logprob,
            bytes=list(self._texts.token_bytes(token_id)),
        )
