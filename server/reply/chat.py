"""``/v1/chat/completions``: OpenAI's shape of messages, deltas and logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.plan import RequestPlan
from server.reply.choices import ChoiceDelta, ReplyToken
from server.reply.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatReplyMessage,
    TopLogprob,
    Usage,
)
from server.reply.token_texts import TokenTexts
from server.reply.writers import extras, says_nothing


class ChatWriter:
    def __init__(
        self, plan: RequestPlan, texts: TokenTexts, model_name: str, fingerprint: str
    ) -> None:
        self.plan = plan
        self._texts = texts
        self._model_name = model_name
        self._fingerprint = fingerprint

    def chunk(self, delta: ChoiceDelta) -> ChatChunk | None:
        if says_nothing(self.plan, delta):
            return None
        shown: dict[str, Any] = {"content": delta.text} if delta.text or delta.first else {}
        choice = ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(role="assistant", **shown) if delta.first else ChatDelta(**shown),
            logprobs=self._logprobs(delta.tokens),
            finish_reason=None if delta.end is None else delta.end.reason,
            **extras(self.plan, delta),
        )
        return ChatChunk(**self._head("chat.completion.chunk"), choices=[choice])

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return ChatChunk(**self._head("chat.completion.chunk"), choices=[], usage=usage)

    def reply(self, choices: Sequence[ChoiceDelta], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            **self._head("chat.completion"),
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=ChatReplyMessage(role="assistant", content=choice.text),
                    logprobs=self._logprobs(choice.tokens),
                    finish_reason=None if choice.end is None else choice.end.reason,
                    **extras(self.plan, choice),
                )
                for choice in choices
            ],
            usage=usage,
        )

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.plan.request_id}",
            "object": kind,
            "created": self.plan.created,
            "model": self._model_name,
            "system_fingerprint": self._fingerprint,
            "seed": self.plan.seed,
        }

    def _logprobs(self, tokens: Sequence[ReplyToken]) -> ChatLogprobs | None:
        if self.plan.num_logprobs is None:
            return None
        content = []
        for token in tokens:
            assert token.logprobs is not None, "the engine sends logprobs where they were asked for"
            chosen = self._entry(token.token_id, token.logprobs.logprob)
            top = [self._entry(top_id, logprob) for top_id, logprob in token.logprobs.top]
            content.append(ChatLogprob(**chosen.model_dump(), top_logprobs=top))
        return ChatLogprobs(content=content)

    def _entry(self, token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=self._texts.text(token_id),
            logprob=logprob,
            bytes=list(self._texts.token_bytes(token_id)),
        )
