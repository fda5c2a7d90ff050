"""Replies of ``/v1/chat/completions``: content, reasoning and tool calls, in pieces and whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from server.apis.openai.reply import (
    NOTHING_OF_PROMPT,
    Chunk,
    ChunkWriter,
    Ending,
    OfPrompt,
    Whole,
)
from server.formats.parts import CallArguments, CallStart, Part, reasoning_of
from server.reply.deltas import ChoiceDelta, ReplyToken
from server.reply.writers import ChatLogprob


class CalledFunction(TypedDict):
    """``arguments``: JSON text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """``id``, ``type`` and the name come with a call's first piece."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ReasoningText(TypedDict):
    """The same text by both names that clients look for."""

    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]


class ChatReplyMessage(ReasoningText):
    """``content``: null where there are tool calls and no text."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: NotRequired[list[ToolCall]]


class ChatDelta(ReasoningText):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


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


class ChatChunk(Chunk, OfPrompt):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class ChatCompletion(Whole, OfPrompt):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatWriter(ChunkWriter):
    """``/v1/chat/completions``."""

    id_prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    always_beside = NOTHING_OF_PROMPT

    def _beside(self, delta: ChoiceDelta) -> OfPrompt:
        # All choices have one prompt, of which is told once, with the first.
        return self._of_prompt(delta) if delta.index == 0 else {}

    def _chunk_choice(self, delta: ChoiceDelta) -> ChatChunkChoice:
        return {
            "index": delta.index,
            "delta": message_delta(delta, self._text(delta)),
            "logprobs": self._logprobs(delta.tokens),
            **self._ending(delta),
        }

    def _whole_choice(self, delta: ChoiceDelta) -> ChatChoice:
        nothing: Ending = {"finish_reason": None, "token_ids": None}
        return {
            "index": delta.index,
            "message": whole_message(delta, self._text(delta)),
            "logprobs": self._logprobs(delta.tokens),
            **nothing,
            **self._ending(delta),
        }

    def _logprobs(self, tokens: Sequence[ReplyToken]) -> ChatLogprobs | None:
        if self.plan.num_logprobs is None:
            return None
        return ChatLogprobs(content=self.logprobs_of(tokens))


def message_delta(delta: ChoiceDelta, text: str) -> ChatDelta:
    """Returns what a delta adds to the message; its content is ``text``."""
    shown: ChatDelta = {"role": "assistant"} if delta.first else {}
    if text or delta.first:
        shown["content"] = text
    if not delta.parts:
        return shown
    if reasoning := reasoning_of(delta.parts):
        shown["reasoning_content"] = shown["reasoning"] = reasoning
    if calls := list(_call_deltas(delta.parts)):
        shown["tool_calls"] = calls
    return shown


def whole_message(choice: ChoiceDelta, text: str) -> ChatReplyMessage:
    """Returns the message of a folded choice; its content is ``text``."""
    message: ChatReplyMessage = {"role": "assistant", "content": text}
    if reasoning := reasoning_of(choice.parts):
        message["reasoning_content"] = message["reasoning"] = reasoning
    if calls := whole_calls(choice.parts):
        message["tool_calls"] = calls
    if not text and (reasoning or calls):
        message["content"] = None
    return message


def whole_calls(parts: Iterable[Part]) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for part in parts:
        if isinstance(part, CallStart):
            function = CalledFunction(name=part.name, arguments="")
            calls.append(ToolCall(id=part.call_id, type="function", function=function))
        elif isinstance(part, CallArguments):
            calls[part.index]["function"]["arguments"] += part.text
    return calls


def _call_deltas(parts: Iterable[Part]) -> Iterable[ToolCallDelta]:
    for part in parts:
        if isinstance(part, CallStart):
            yield ToolCallDelta(
                index=part.index,
                id=part.call_id,
                type="function",
                function=FunctionDelta(name=part.name, arguments=""),
            )
        elif isinstance(part, CallArguments):
            yield ToolCallDelta(index=part.index, function=FunctionDelta(arguments=part.text))
