"""Replies of ``/api/chat`` and ``/api/generate``: one JSON object, or lines of them of which the last has
``done`` and the figures.

Ollama's clients take a call only whole, so one is told when its arguments have ended. Own fields beside
Ollama's, in the object with the figures: ``speculative``, the account of the drafts, and ``seed``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NotRequired

from pydantic_core import from_json
from typing_extensions import TypedDict

from server.errors import SHAPES, ApiError
from server.formats.parts import CallArguments, CallStart, Content, Part, reasoning_of
from server.plan import RequestPlan
from server.reply.deltas import ChoiceDelta, ChoiceEnd
from server.reply.token_texts import TokenTexts
from server.reply.usage import SpeculativeUsage, Usage
from server.reply.writers import ChatLogprob, WholeWriter, Writer, as_json, embeddings, numbers

NANOSECONDS = 1_000_000_000


def timestamp(seconds: float | None = None) -> str:
    """A time since the epoch, or now, as RFC 3339 has it."""
    at = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return at.isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


class OllamaCalledFunction(TypedDict):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(TypedDict):
    id: str
    function: OllamaCalledFunction


class OllamaReplyMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCall]]


class OllamaAccount(TypedDict):
    """The figures of a reply that is done; durations in nanoseconds. ``load_duration``: the wait for a
    place among the running requests."""

    done_reason: NotRequired[Literal["stop", "length", "load", "unload"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    seed: NotRequired[int]
    speculative: NotRequired[SpeculativeUsage]


class OllamaReply(OllamaAccount):
    """The fields of both endpoints' objects."""

    model: str
    created_at: str
    done: bool
    logprobs: NotRequired[list[ChatLogprob]]


class OllamaChatReply(OllamaReply):
    message: OllamaReplyMessage


class OllamaGenerateReply(OllamaReply):
    response: str
    thinking: NotRequired[str]


class OllamaError(TypedDict):
    """An error in Ollama's shape."""

    error: str


SHAPES["/api"] = lambda error, _: OllamaError(error=error.message)


class CallsUnderWay:
    """Puts calls together. A call whose arguments are no object, as they were cut off, is text."""

    def __init__(self) -> None:
        self._open: CallStart | None = None
        self._arguments = ""

    def add(self, parts: Sequence[Part], is_end: bool) -> tuple[list[OllamaCall], str]:
        """Returns the calls that have ended, and the text: what is no call's, and what were none."""
        calls: list[OllamaCall] = []
        texts: list[str] = []
        for part in parts:
            if isinstance(part, CallArguments):
                self._arguments += part.text
                continue
            self._close(calls, texts)
            self._open = part if isinstance(part, CallStart) else None
            if isinstance(part, Content):
                texts.append(part.text)
        if is_end:
            self._close(calls, texts)
        return calls, "".join(texts)

    def _close(self, calls: list[OllamaCall], texts: list[str]) -> None:
        call, text = self._open, self._arguments
        self._open, self._arguments = None, ""
        if call is None:
            return
        try:
            arguments = from_json(text)
        except ValueError:
            arguments = None
        if isinstance(arguments, dict):
            function = OllamaCalledFunction(index=call.index, name=call.name, arguments=arguments)
            calls.append(OllamaCall(id=call.call_id, function=function))
        else:
            texts.append(f'{{"name": {json.dumps(call.name)}, "arguments": {text}')


class OllamaWriter(Writer):
    """Both endpoints."""

    media_type = "application/x-ndjson"

    def __init__(self, plan: RequestPlan, texts: TokenTexts, fingerprint: str) -> None:
        super().__init__(plan, texts, fingerprint)
        self._calls = CallsUnderWay()
        self._end: ChoiceEnd | None = None

    def pause(self) -> bytes:
        """There are no comments between lines of JSON, so this is a piece without text."""
        return _line(self._object(False, self._piece("", "", [])))

    def events(self, delta: ChoiceDelta) -> bytes:
        taken = self._take(delta)
        if not (any(taken) or (delta.tokens and self.plan.num_logprobs is not None)):
            return b""
        return _line(self._object(False, self._piece(*taken), **self._logprobs(delta)))

    def finish(self, usage: Usage) -> bytes:
        return _line(self._object(True, self._piece("", "", []), **self._account(usage)))

    def bare_failure(self, error: ApiError) -> bytes:
        return _line(OllamaError(error=error.message))

    def reply(self, choices: Sequence[ChoiceDelta], usage: Usage) -> Mapping[str, Any]:
        (choice,) = choices
        piece = self._piece(*self._take(choice))
        return self._object(True, piece, **self._logprobs(choice), **self._account(usage))

    def _take(self, delta: ChoiceDelta) -> tuple[str, str, list[OllamaCall]]:
        """Returns the content, the thoughts and the calls that a delta adds."""
        self._end = delta.end or self._end
        calls, text = self._calls.add(delta.parts, delta.end is not None)
        return text if delta.parts else delta.text + text, reasoning_of(delta.parts), calls

    def _piece(self, text: str, thinking: str, calls: list[OllamaCall]) -> dict[str, Any]:
        """The fields of an object that hold what was written."""
        message = OllamaReplyMessage(role="assistant", content=text)
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def _object(self, done: bool, piece: dict[str, Any], **more: Any) -> dict[str, Any]:
        head = {"model": self.plan.model, "created_at": timestamp()}
        return {**head, **piece, "done": done, **more}

    def _logprobs(self, delta: ChoiceDelta) -> dict[str, list[ChatLogprob]]:
        if self.plan.num_logprobs is None:
            return {}
        return {"logprobs": self.logprobs_of(delta.tokens)}

    def _account(self, usage: Usage) -> OllamaAccount:
        assert self._end is not None
        info = self._end.info
        # Clients divide by durations.
        prompt = info.time_to_first_token_seconds - info.queue_seconds
        return OllamaAccount(
            done_reason="length" if self._end.reason == "length" else "stop",
            total_duration=_nanoseconds(info.e2e_seconds),
            load_duration=int(info.queue_seconds * NANOSECONDS),
            prompt_eval_count=usage["prompt_tokens"],
            prompt_eval_duration=_nanoseconds(prompt),
            eval_count=usage["completion_tokens"],
            eval_duration=_nanoseconds(info.e2e_seconds - info.time_to_first_token_seconds),
            seed=self.plan.seed,
            speculative=usage["speculative"],
        )


class GenerateWriter(OllamaWriter):
    """``/api/generate``, which knows no calls."""

    def _piece(self, text: str, thinking: str, calls: list[OllamaCall]) -> dict[str, Any]:
        del calls
        return {"response": text, **({"thinking": thinking} if thinking else {})}


class OllamaEmbeddings(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(TypedDict):
    embedding: list[float]


class EmbedWriter(WholeWriter):
    """``/api/embed``. Its time is that of the text that took longest."""

    def reply(self, choices: Sequence[ChoiceDelta], usage: Usage) -> Mapping[str, Any]:
        infos = [each.end.info for each in choices if each.end is not None]
        return OllamaEmbeddings(
            model=self.plan.model,
            embeddings=[numbers(each) for each in embeddings(choices)],
            total_duration=_nanoseconds(max(each.e2e_seconds for each in infos)),
            load_duration=int(max(each.queue_seconds for each in infos) * NANOSECONDS),
            prompt_eval_count=usage["prompt_tokens"],
        )


class OldEmbeddingsWriter(WholeWriter):
    """``/api/embeddings``, of one text."""

    def reply(self, choices: Sequence[ChoiceDelta], usage: Usage) -> Mapping[str, Any]:
        del usage
        (embedding,) = embeddings(choices)
        return OllamaEmbedding(embedding=numbers(embedding))


def _line(content: Any) -> bytes:
    return as_json(content) + b"\n"


def _nanoseconds(seconds: float) -> int:
    return max(1, int(seconds * NANOSECONDS))
