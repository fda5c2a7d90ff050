"""One choice, from the engine's events to deltas of text: the only place where tokens become a
reply.

Streamed and whole replies are both made of these deltas, so they cannot differ.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from engine.process.streams import EventStreams
from engine.request.errors import (
    DeadlineExceededError,
    RequestError,
    TryLaterError,
    panics_as_errors,
)
from engine.request.events import FinishInfo, TokenEvent, TokenLogprobs
from server.errors import shutting_down
from server.formats.message import MessageParser
from server.formats.parts import Part, content_of
from server.formats.registry import markers_of
from server.metrics.prometheus import RequestMetrics
from server.metrics.record import ChoiceRecord
from server.plan import ChoicePlan, TextOptions
from server.reply.deltas import ChoiceDelta, ChoiceEnd, FinishReason, ReplyToken, Sink
from server.reply.detokenizer import IncrementalDetokenizer, StopMatch, StopMatcher, decoder
from server.reply.token_texts import TokenTexts

_NUM_CONTEXT_TOKENS = 6


class TextAssembler:
    """Tokens in, settled text and tokens out; cuts at a stop string.

    A token is settled once its first character is, or when nothing is held back: until then a stop
    string might begin before it and take it away. Settling is decided token by token.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, options: TextOptions) -> None:
        self._detokenizer = detokenizer
        self._options = options
        self._matcher = StopMatcher(options.stops)
        self._num_chars = 0
        self._num_added = 0
        self._waiting: deque[ReplyToken] = deque()
        self._text: list[str] = []
        self._tokens: list[ReplyToken] = []
        self.num_kept = 0

    def add(self, token_id: int, drafted: bool, logprobs: TokenLogprobs | None) -> StopMatch | None:
        """Take the next token. After a match nothing more may be added."""
        piece = self._detokenizer.add(token_id)
        self._num_added += 1
        token = ReplyToken(token_id, piece, self._num_chars, drafted, logprobs)
        if piece and not (self._options.stops or self._waiting):  # settled at once, as most are
            self._num_chars += len(piece)
            self._text.append(piece)
            self._tokens.append(token)
            self.num_kept += 1
            return None
        self._waiting.append(token)
        return self._feed(piece, armed=self._num_added > self._options.min_tokens)

    def finish(self) -> StopMatch | None:
        """Settle all that was held back; the last bytes may complete a stop string."""
        piece = self._detokenizer.flush()
        if piece and self._waiting:
            last = self._waiting.pop()
            self._waiting.append(last._replace(text=last.text + piece))
        match = self._feed(piece, armed=self._num_added > self._options.min_tokens)
        if match is None:
            self._text.append(self._matcher.held)
            self._settle(self._num_chars + 1)
        return match

    def take(self) -> tuple[str, tuple[ReplyToken, ...]]:
        """The text and tokens settled since the last call."""
        text, tokens = "".join(self._text), tuple(self._tokens)
        self._text.clear()
        self._tokens.clear()
        return text, tokens

    def _feed(self, piece: str, *, armed: bool) -> StopMatch | None:
        self._num_chars += len(piece)
        unsettled = self._matcher.held + piece
        begin = self._matcher.num_released
        text, match = self._matcher.feed(piece, armed=armed)
        if match is not None:
            cut = match.end if self._options.include_stop else match.start
            self._text.append(unsettled[: cut - begin])
            self._cut(cut)
            return match
        self._text.append(text)
        if self._matcher.held or self._detokenizer.is_pending:
            self._settle(self._matcher.num_released)
        else:
            self._settle(self._num_chars + 1)
        return None

    def _settle(self, num_chars: int) -> None:
        """Release the waiting tokens that start before ``num_chars``."""
        while self._waiting and self._waiting[0].start < num_chars:
            self._tokens.append(self._waiting.popleft())
            self.num_kept += 1

    def _cut(self, num_chars: int) -> None:
        """Release what starts before the cut, shortened to it, and drop the rest."""
        self._waiting = deque(
            token._replace(text=token.text[: max(0, num_chars - token.start)])
            for token in self._waiting
        )
        self._settle(num_chars)
        self._waiting.clear()


class ChoiceDeltas:
    """Turns one choice's events into deltas. ``abort`` ends the request where a stop string is found."""

    def __init__(
        self, plan: ChoicePlan, assembler: TextAssembler, abort: Callable[[], None]
    ) -> None:
        self._plan = plan
        self._assembler = assembler
        self._abort = abort
        self._parser: MessageParser | None = None
        if plan.text.parses:
            self._parser = MessageParser(plan.text, plan.request.request_id)
        self._match: StopMatch | None = None
        self._first = True
        self._num_steps = self._num_draft_tokens = 0

    def take(self, event: TokenEvent) -> ChoiceDelta | None:
        """The next event's delta; None where it adds nothing yet. Raises ApiError 503 where the event
        says that the server shuts down."""
        if self._match is None:
            self._num_steps += 1
            self._num_draft_tokens += event.num_draft_tokens
            self._match = self._feed(event)
            if self._match is not None and event.finish is None:
                self._abort()
        text, tokens = self._assembler.take()
        parts: tuple[Part, ...] = ()
        if self._parser is not None:
            parts = self._parser.feed(text, [token.start for token in tokens])
            parts += self._parser.finish() if event.finish is not None else ()
            text = content_of(parts)
        end = None if event.finish is None else self._end(event.finish)
        if not (self._first or text or tokens or parts or end):
            return None
        delta = ChoiceDelta(
            self._plan.index,
            self._first,
            text,
            tokens,
            event.prompt_logprobs,
            end,
            self._num_steps,
            self._num_draft_tokens,
            parts,
        )
        self._first, self._num_steps, self._num_draft_tokens = False, 0, 0
        return delta

    def _feed(self, event: TokenEvent) -> StopMatch | None:
        """Take the event's tokens up to a stop string; the engine's own end flushes what was held."""
        for index, token_id in enumerate(event.token_ids):
            logprobs = None if event.logprobs is None else event.logprobs[index]
            if match := self._assembler.add(token_id, event.drafted[index], logprobs):
                return match
        return self._assembler.finish() if event.finish is not None else None

    def _end(self, info: FinishInfo) -> ChoiceEnd:
        reason: FinishReason = "stop"
        stop_reason: int | str | None = None
        if self._match is not None:
            stop_reason = self._match.stop
        elif info.reason == "abort":
            raise shutting_down()
        else:
            reason = info.reason
            if info.stop_token_id in self._plan.request.sampling.stop_token_ids:
                stop_reason = info.stop_token_id
            elif info.cut:
                stop_reason = f"the grammar {info.cut}"
        num_reasoning_tokens, cuts_call = 0, False
        if self._parser is not None:
            num_reasoning_tokens = self._parser.num_reasoning_tokens
            cuts_call = self._parser.is_in_call
            if self._parser.num_calls and not cuts_call and reason == "stop":
                reason = "tool_calls"
        kept = self._assembler.num_kept
        return ChoiceEnd(reason, stop_reason, kept, info, num_reasoning_tokens, cuts_call)


class ChoiceSource:
    """Runs choices on an engine, turns their tokens into deltas, and counts how they ended."""

    def __init__(
        self, engine: EventStreams, tokenizer: Any, texts: TokenTexts, metrics: RequestMetrics
    ) -> None:
        self._engine = engine
        self._decoders = {
            skip: decoder(tokenizer, skip_special_tokens=skip) for skip in (False, True)
        }
        self._texts = texts
        self._metrics = metrics

    async def run(self, plan: ChoicePlan, sink: Sink, record: ChoiceRecord | None = None) -> None:
        """Hand the choice's deltas to ``sink``, which may take its time; the last one carries ``end``.
        Cancelling this aborts the request. ``record``: where to write down how it goes.

        Raises what ``EventStreams.stream`` raises, and ApiError 503 if the server shuts down
        first.
        """
        outcome = "error"
        tenant = plan.request.tenant.name
        abort = partial(self._engine.abort, plan.request.request_id)
        choice = ChoiceDeltas(plan, self._assembler(plan), abort)

        def take(event: TokenEvent) -> Coroutine[Any, Any, None] | None:
            nonlocal outcome
            if record is not None:
                record.add(event)
            delta = choice.take(event)
            if delta is None:
                return None
            if (end := delta.end) is not None:
                # To metrics a call is one of the ways in which the model stops.
                outcome = "stop" if end.reason == "tool_calls" else end.reason
                if record is not None:
                    record.finish_reason, record.num_tokens = end.reason, end.num_tokens
                self._metrics.observe_request(end.info, end.num_tokens, tenant)
            return sink(delta)

        try:
            await self._engine.stream(plan.request, take)
        except (TryLaterError, RequestError) as error:
            outcome = "rejected"
            if tenant and isinstance(error, TryLaterError):
                self._metrics.count("tenant_rejections", tenant, error.code)
            raise
        except DeadlineExceededError:
            outcome = "deadline"
            raise
        except asyncio.CancelledError:
            if outcome == "error":
                outcome = "abort"
            raise
        finally:
            self._metrics.count("requests", outcome)
            if tenant:
                self._metrics.count("tenant_requests", tenant, outcome)
            if record is not None:
                record.outcome = outcome

    @panics_as_errors()
    def _assembler(self, plan: ChoicePlan) -> TextAssembler:
        skip = plan.text.skip_special_tokens
        context = plan.request.prompt_token_ids[-_NUM_CONTEXT_TOKENS:]
        skipped = self._texts.special_ids if skip else frozenset()
        if skip and plan.text.parses:
            # The parsers have to see markers, which the tokenizer would leave out with the others.
            markers = markers_of(plan.text.tool_calls, plan.text.reasoning)
            skip, skipped = False, self._texts.hidden_ids(markers)
        detokenizer = IncrementalDetokenizer(self._decoders[skip], context, skipped)
        return TextAssembler(detokenizer, plan.text)
