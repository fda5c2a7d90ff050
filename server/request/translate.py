"""From request bodies to engine requests: pure, and the last place where a field may be refused.

A ``max_tokens`` that no prompt could ever have is a 400; one that this prompt has no room for is clamped,
and the choice ends with "length".
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from engine.request.info import EngineInfo
from engine.request.params import GenerationRequest, SamplingParams, SpeculativeParams
from engine.sampling.processor import Vocabulary, sampling_values
from server.errors import ApiError, refused, unknown_model
from server.plan import (
    ChoicePlan,
    MessageOptions,
    Prompt,
    ReplyOptions,
    RequestPlan,
    TextOptions,
)
from server.request.body import MAX_SEED, Body
from server.request.grammars import grammar_of
from server.request.message_formats import MessageFormats
from server.request.prompts import PromptOptions, Prompts
from server.request.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    StreamOptions,
    TemplateFields,
    TokenizeRequest,
)
from server.request.responses import ResponsesRequest, in_own_words
from server.request.speculative import SpeculativeResolver

GRAMMAR_DRAFTER = "grammar"


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What completions and chat say in different words. ``max_tokens``: None for what there is room
    for; ``num_logprobs``, ``echo`` and ``prefix`` as in ``ReplyOptions``."""

    prompts: Sequence[Prompt]
    max_tokens: int | None
    num_logprobs: int | None
    grammar: str
    message: MessageOptions = MessageOptions()
    echo: bool = False
    prefix: str = ""


class Translator:
    """Knows the model served: its tokenizer, vocabulary and lengths. ``resolver`` may be replaced between
    requests."""

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Any,
        resolver: SpeculativeResolver,
        model_name: str,
        max_choices: int,
        max_seconds: float | None,
        formats: MessageFormats,
    ) -> None:
        """``max_seconds``: from a request's arrival to its deadline, where it names no earlier one."""
        self._info = info
        self._prompts = Prompts(info, tokenizer)
        self.resolver = resolver
        self._model_name = model_name
        self._max_choices = max_choices
        self._formats = formats
        self._max_seconds = max_seconds
        self._vocabulary = Vocabulary(
            info.vocab_size, partial(tokenizer.encode, add_special_tokens=False)
        )

    def plan(
        self, body: Body, arrival_time: float, drafters: Sequence[str] | None = None
    ) -> RequestPlan:
        """Returns what the engine is to write and how. ``drafters``: those that the request may have;
        None: all. Raises ApiError."""
        if isinstance(body, ResponsesRequest):
            try:
                plan = self.plan(body.for_chat(), arrival_time, drafters)
            except ApiError as error:
                raise in_own_words(error) from error
            return replace(plan, repeated=body.repeated())
        if isinstance(body, ChatRequest):
            return self._plan(body, self._chat(body), arrival_time, drafters)
        assert isinstance(body, CompletionRequest)
        return self._plan(body, self._completion(body), arrival_time, drafters)

    def _completion(self, body: CompletionRequest) -> _Wanted:
        """Raises ApiError."""
        max_tokens = body.max_tokens or DEFAULT_COMPLETION_TOKENS
        self._check_common(body, max_tokens, "max_tokens", num_prompts=len(body.prompt))
        if body.best_of not in (None, body.n):
            raise refused("best_of", "is supported only if it equals n")
        options = self._prompt_options(body, body.add_special_tokens, max_tokens)
        prompts = [
            self._prompts.of_text("prompt", given, options)
            if isinstance(given, str)
            else self._prompts.of_token_ids("prompt", given, options)
            for given in body.prompt
        ]
        grammar = grammar_of(body.response_format, body.structured_outputs)
        return _Wanted(prompts, max_tokens, body.logprobs, grammar, echo=body.echo)

    def _chat(self, body: ChatRequest) -> _Wanted:
        """Raises ApiError."""
        if body.top_logprobs is not None and not body.logprobs:
            raise refused("top_logprobs", "needs 'logprobs': true")
        limit = body.max_completion_tokens or body.max_tokens
        if body.max_tokens is not None and body.max_tokens != limit:
            raise refused("max_tokens", "contradicts max_completion_tokens")
        if body.echo and body.messages[-1].role != "assistant":
            raise refused("echo", "needs a last message that is the assistant's")
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        self._check_common(body, limit, field, num_prompts=1)
        options = self._prompt_options(body, body.add_special_tokens, limit)
        self._formats.check(body)
        tools = self._formats.tools(body)
        prompt = self._prompts.of_messages(body.messages, tools, body, options)
        message = self._formats.options(body, prompt.text)
        answer = grammar_of(body.response_format, body.structured_outputs)
        return _Wanted(
            [prompt],
            limit,
            num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            grammar=self._formats.grammar(body, message, answer),
            message=message,
            prefix=(body.messages[-1].content or "") if body.echo else "",
        )

    def tokenize(self, body: TokenizeRequest) -> list[int]:
        """Raises ApiError."""
        self._check_model(body.model)
        is_prompt = body.prompt is not None
        if is_prompt == (body.messages is not None):
            raise refused("prompt", ": give either 'prompt' or 'messages'")
        options = PromptOptions(
            is_prompt if body.add_special_tokens is None else body.add_special_tokens,
            is_prompt if body.allow_special_tokens is None else body.allow_special_tokens,
        )
        if body.messages is not None:
            pieces = self._prompts.render(body.messages, body.tools or (), body, options)
            return self._prompts.encode("messages", pieces, options)
        for name in (*TemplateFields.model_fields, "tools"):
            if name in body.model_fields_set:
                raise refused(name, "has no effect on a prompt")
        text = (options.allow_special_tokens, body.prompt or "")
        return self._prompts.encode("prompt", [text], options)

    def detokenize(self, body: DetokenizeRequest) -> str:
        """Raises ApiError."""
        self._check_model(body.model)
        self._prompts.check_token_ids("tokens", body.tokens)
        return self._prompts.decode(body.tokens)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model_name:
            raise unknown_model(name, self._model_name)

    def _check_common(
        self, body: SamplingFields, max_tokens: int | None, field: str, *, num_prompts: int
    ) -> None:
        """What needs no prompt to be made."""
        self._check_model(body.model)
        if body.stream_options is not None:
            if not body.stream:
                raise refused("stream_options", "needs 'stream': true")
            if body.stream_options.continuous_usage_stats and not body.stream_options.include_usage:
                name = "stream_options.continuous_usage_stats"
                raise refused(name, "needs 'include_usage': true")
        self._prompts.check_token_ids("stop_token_ids", body.stop_token_ids or ())
        self._prompts.check_token_ids("logprob_token_ids", body.logprob_token_ids or ())
        seconds = self._max_seconds
        if body.timeout is not None and seconds is not None and body.timeout > seconds:
            raise refused("timeout", f": this server gives a request {seconds:g} seconds")
        if num_prompts * body.n > self._max_choices:
            name = "n" if num_prompts == 1 else "prompt"
            most = f"this server writes at most {self._max_choices} per request"
            raise refused(name, f": {num_prompts * body.n} choices; {most}")
        if max_tokens is not None and max_tokens > self._info.max_model_len:
            limit = self._info.max_model_len
            raise refused(field, f"exceeds the context of {limit}")
        if max_tokens is not None and _min_tokens(body) > max_tokens:
            raise refused("min_tokens", f"must not exceed {field}")

    def _prompt_options(
        self, body: SamplingFields, add_special_tokens: bool, max_tokens: int | None
    ) -> PromptOptions:
        """Raises ApiError."""
        num_kept = body.truncate_prompt_tokens
        if num_kept is None and body.truncation_side is not None:
            raise refused("truncation_side", "needs 'truncate_prompt_tokens'")
        if num_kept == 0:
            raise refused("truncate_prompt_tokens", "must be -1, or at least 1")
        if num_kept == -1:
            num_kept = max(1, self._info.max_model_len - (max_tokens or 1))
        return PromptOptions(
            add_special_tokens,
            body.allow_special_tokens,
            num_kept,
            keeps_first=body.truncation_side == "right",
        )

    def _plan(
        self,
        body: SamplingFields,
        wanted: _Wanted,
        arrival_time: float,
        drafters: Sequence[str] | None,
    ) -> RequestPlan:
        """Raises ApiError."""
        _check_agreement(body, wanted)
        request_id = uuid.uuid4().hex
        resolver = self.resolver.held_to(drafters)
        speculative = resolver.resolve(body.speculative, body.prediction is not None)
        requests = self._requests(body, wanted, speculative, request_id, arrival_time)
        text = TextOptions(
            stops=body.stop,
            include_stop=body.include_stop_str_in_output,
            skip_special_tokens=body.skip_special_tokens,
            min_tokens=_min_tokens(body),
        )
        return RequestPlan(
            request_id=request_id,
            created=int(time.time()),
            n=body.n,
            prompts=tuple(wanted.prompts),
            choices=tuple(
                ChoicePlan(index, request, text, wanted.message)
                for index, request in enumerate(requests)
            ),
            reply=_reply_options(body, wanted, speculative.return_drafted),
            user=body.user,
            metadata=body.metadata or {},
        )

    def _requests(
        self,
        body: SamplingFields,
        wanted: _Wanted,
        speculative: SpeculativeParams,
        request_id: str,
        arrival_time: float,
    ) -> Iterator[GenerationRequest]:
        """Yields the engine's requests, ``n`` for each prompt. Raises ApiError."""
        sampling = self._sampling(body, wanted)
        prediction = self._prediction(body)
        seconds = body.timeout or self._max_seconds
        for index in range(len(wanted.prompts) * body.n):
            token_ids = wanted.prompts[index // body.n].token_ids
            room = self._info.max_model_len - len(token_ids)
            limit = room if wanted.max_tokens is None else min(room, wanted.max_tokens)
            yield GenerationRequest(
                request_id=f"{request_id}-{index}",
                prompt_token_ids=token_ids,
                sampling=SamplingParams(
                    **sampling,
                    max_tokens=limit,
                    min_tokens=min(_min_tokens(body), limit),
                    choice_index=index % body.n,
                ),
                speculative=speculative,
                priority=body.priority,
                cache_salt=body.cache_salt or "",
                arrival_time=arrival_time,
                deadline=None if seconds is None else arrival_time + seconds,
                prediction_token_ids=prediction,
            )

    def _prediction(self, body: SamplingFields) -> tuple[int, ...]:
        if body.prediction is None:
            return ()
        return self._prompts.encode_prediction(
            "prediction.content", body.prediction.content, body.allow_special_tokens
        )

    def _sampling(self, body: SamplingFields, wanted: _Wanted) -> dict[str, Any]:
        """Returns the sampling parameters that all choices share."""
        values = sampling_values(dict(body), self._vocabulary)
        values.pop("min_tokens", None)
        # One list serves an echo and the prompt's log-probabilities; the writers show of it what was
        # asked for.
        scored = [wanted.num_logprobs if wanted.echo else None, body.prompt_logprobs]
        return values | {
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "stop_token_ids": tuple(body.stop_token_ids or ()),
            "ignore_eos": body.ignore_eos,
            "logprobs": wanted.num_logprobs,
            "prompt_logprobs": max((num for num in scored if num is not None), default=None),
            "logprob_token_ids": tuple(dict.fromkeys(body.logprob_token_ids or ())),
            "grammar": wanted.grammar,
            # Drawn where not given, and sent with the reply, so that any text can be had again.
            "seed": secrets.randbelow(MAX_SEED + 1) if body.seed is None else body.seed,
        }


def _min_tokens(body: SamplingFields) -> int:
    num: int = body.min_tokens  # type: ignore[attr-defined]  # declared by a logits processor
    return num


def _reply_options(body: SamplingFields, wanted: _Wanted, return_drafted: bool) -> ReplyOptions:
    stream_options = body.stream_options or StreamOptions()
    return ReplyOptions(
        stream=body.stream,
        include_usage=stream_options.include_usage,
        continuous_usage=stream_options.continuous_usage_stats,
        num_logprobs=wanted.num_logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
        tokens_as_ids=body.return_tokens_as_token_ids,
        return_token_ids=body.return_token_ids,
        return_drafted=return_drafted,
        echo=wanted.echo,
        prefix=wanted.prefix,
    )


def _check_agreement(body: SamplingFields, wanted: _Wanted) -> None:
    """Raises ApiError where a field would have no effect next to the others."""
    if wanted.num_logprobs is None:
        for name in ("return_tokens_as_token_ids", "logprob_token_ids"):
            if getattr(body, name):
                raise refused(name, "needs 'logprobs'")
    if wanted.grammar and body.ignore_eos:
        raise refused("ignore_eos", ": a text ends where its grammar ends")
    asked = None if body.speculative is None else body.speculative.given().get("draft_strategy")
    if asked == GRAMMAR_DRAFTER and not wanted.grammar:
        field = "speculative.draft_strategy"
        raise refused(field, f"{asked!r} needs a constrained output")
