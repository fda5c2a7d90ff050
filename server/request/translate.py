"""From request bodies to engine requests: pure, and the last place where a field may be refused.

A ``max_tokens`` that no prompt could ever have is a 400; one that this prompt has no room for is clamped,
and the choice ends with "length".
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

from engine.request.info import AdapterInfo, EngineInfo
from engine.request.params import GenerationRequest, Pooling, SamplingParams, SpeculativeParams
from engine.sampling.processor import Vocabulary, sampling_values
from server.errors import refused, unknown_model
from server.plan import ChoicePlan, RequestPlan, TextOptions
from server.request.body import MAX_SEED
from server.request.grammars import Grammar, grammar_of
from server.request.message_formats import MessageFormats
from server.request.messages import (
    Tool,
    refuse_foreign_parts,
    template_messages,
    template_tools,
)
from server.request.prompts import Prompts
from server.request.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    StreamOptions,
    TemplateFields,
    TokenizeRequest,
)
from server.request.special_tokens import Text
from server.request.speculative import SpeculativeResolver

GRAMMAR_DRAFTER = "grammar"
SERVICE_TIER = "default"


class Translator:
    """Knows the model served: its tokenizer, vocabulary and lengths. ``resolver`` and ``adapters``, the
    names of those that are loaded, may be replaced between requests."""

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
        self.adapters = adapter_names(info.adapters or ())
        self._model_name = model_name
        self._max_choices = max_choices
        self._formats = formats
        self._max_seconds = max_seconds
        self._vocabulary = Vocabulary(
            info.vocab_size,
            partial(tokenizer.encode, add_special_tokens=False),
            self._prompts.decode,
        )

    @property
    def unserved(self) -> tuple[str, ...]:
        """Returns the parts of the model besides text."""
        return self._info.unserved

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def served_names(self) -> tuple[str, ...]:
        """Returns what requests may call their model: its own name, and those of its adapters."""
        return (self._model_name, *self.adapters)

    @property
    def max_model_len(self) -> int:
        """Returns how many tokens a prompt and its text may have."""
        return self._info.max_model_len

    @property
    def pooling(self) -> Pooling:
        """Returns how states are pooled for embeddings; "none": there are no embeddings."""
        return self._info.embeddings

    @property
    def hidden_size(self) -> int:
        """Returns the numbers of an embedding."""
        return self._info.hidden_size

    @property
    def template_variables(self) -> frozenset[str]:
        """Returns the chat template's variables that requests may set."""
        return self._prompts.template.variables

    @property
    def chat_template(self) -> str:
        """Returns the template's source; "" where there is none."""
        return self._prompts.template.source or ""

    @property
    def takes_tools(self) -> bool:
        """Returns whether the model can be shown tools, and its calls are recognised."""
        return self._prompts.template.takes_tools and self._formats.knows_calls

    @property
    def splits_reasoning(self) -> bool:
        """Returns whether reasoning is split off from the model's text."""
        return self._formats.splits_reasoning

    def plan(
        self,
        body: CompletionRequest | ChatRequest,
        arrival_time: float,
        drafters: Sequence[str] | None = None,
    ) -> RequestPlan:
        """Returns what the engine is to write and how. ``drafters``: those that the request may have;
        None: all. Raises ApiError."""
        prompts = self._chat(body) if isinstance(body, ChatRequest) else self._completion(body)
        text, grammar = self._text(body, prompts[0][0])
        _check_agreement(body, grammar)
        resolver = self.resolver.held_to(drafters)
        speculative = resolver.resolve(body.speculative, body.prediction is not None)
        request_id = uuid.uuid4().hex
        token_ids = [each for _, each in prompts]
        requests = self._requests(body, token_ids, grammar, speculative, request_id, arrival_time)
        streaming = body.stream_options or StreamOptions()
        choices = (ChoicePlan(index, request, text) for index, request in enumerate(requests))
        return RequestPlan(
            request_id=request_id,
            created=int(time.time()),
            n=body.n,
            choices=tuple(choices),
            beginnings=_beginnings(body, [prompt for prompt, _ in prompts]),
            echo=body.echo and isinstance(body, CompletionRequest),
            stream=body.stream,
            include_usage=streaming.include_usage,
            # As in vLLM it has no effect alone.
            continuous_usage=streaming.include_usage and streaming.continuous_usage_stats,
            num_logprobs=body.num_logprobs,
            num_prompt_logprobs=body.prompt_logprobs,
            tokens_as_ids=body.return_tokens_as_token_ids,
            return_token_ids=body.return_token_ids,
            return_drafted=speculative.return_drafted,
            user=body.user,
            safety_identifier=body.safety_identifier,
            prompt_cache_key=body.prompt_cache_key,
            service_tier=None if body.service_tier is None else SERVICE_TIER,
            metadata=body.metadata or {},
            ignored=tuple(dict.fromkeys((*self._ignored(body), *grammar.ignored))),
        )

    def tokenize(self, body: TokenizeRequest) -> list[int]:
        """Raises ApiError."""
        self.check_model(body.model)
        is_prompt = body.prompt is not None
        if is_prompt == (body.messages is not None):
            raise refused("prompt", ": give either 'prompt' or 'messages'")
        adds = is_prompt if body.add_special_tokens is None else body.add_special_tokens
        allows = is_prompt if body.allow_special_tokens is None else body.allow_special_tokens
        if not is_prompt:
            refuse_foreign_parts(body.messages or (), self.unserved)
            text = self._render(body, body.tools or (), allows)
            return self._prompts.encode("messages", text, adds)
        for name in (*TemplateFields.model_fields, "tools"):
            if name in body.model_fields_set:
                raise refused(name, "has no effect on a prompt")
        return self._prompts.encode("prompt", _marked(body.prompt or "", allows), adds)

    def detokenize(self, body: DetokenizeRequest) -> str:
        """Raises ApiError."""
        self.check_model(body.model)
        self._prompts.check_token_ids("tokens", body.tokens)
        return self._prompts.decode(body.tokens)

    def _completion(self, body: CompletionRequest) -> list[tuple[str, tuple[int, ...]]]:
        """Returns the prompts, as texts and tokens. Raises ApiError."""
        self._check(body, num_prompts=len(body.prompt))
        if body.best_of not in (None, body.n):
            raise refused("best_of", "is supported only if it equals n")
        kept = self._kept(body)
        return [
            self._prompts.of_text(
                "prompt", _marked(given, body.allow_special_tokens), body.add_special_tokens, kept
            )
            if isinstance(given, str)
            else self._prompts.of_token_ids("prompt", given, kept)
            for given in body.prompt
        ]

    def _chat(self, body: ChatRequest) -> list[tuple[str, tuple[int, ...]]]:
        """Returns the only prompt, as text and tokens. Raises ApiError."""
        if body.top_logprobs is not None and not body.logprobs:
            raise refused("top_logprobs", "needs 'logprobs': true")
        if body.max_tokens not in (None, body.limit[1]):
            raise refused("max_tokens", "contradicts max_completion_tokens")
        if body.echo and body.messages[-1].role != "assistant":
            raise refused("echo", "needs a last message that is the assistant's")
        self._check(body, num_prompts=1)
        refuse_foreign_parts(body.messages, self.unserved)
        kept = self._kept(body)
        self._formats.check(body)
        text = self._render(body, body.shown_tools, body.allow_special_tokens)
        return [self._prompts.of_text("messages", text, body.add_special_tokens, kept)]

    def _render(
        self, body: ChatRequest | TokenizeRequest, tools: Sequence[Tool], allows: bool
    ) -> Text:
        """Returns the chat template's text for the messages. Raises ApiError naming the field."""
        if body.continue_final_message and body.add_generation_prompt:
            raise refused("continue_final_message", "needs 'add_generation_prompt': false")
        return self._prompts.template.render(
            template_messages(body.messages or ()),
            self._variables(body),
            tools=template_tools(self._told(tools, body)),
            allow_special_tokens=allows,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )

    def _told(self, tools: Sequence[Tool], body: ChatRequest | TokenizeRequest) -> Sequence[Tool]:
        """Returns those that the model is told of. Where its template has no place for any, a call that
        has to come is held to its schema all the same. Raises ApiError where that is no help."""
        if not tools or self._prompts.template.takes_tools:
            return tools
        if isinstance(body, ChatRequest) and not body.must_call:
            raise refused("tools", ": this model's chat template has no place for them")
        return ()

    def _variables(self, body: TemplateFields) -> dict[str, Any]:
        """Returns the client's variables of the chat template, and the hints that it reads. Raises
        ApiError."""
        template = self._prompts.template
        variables = template.read_of(body.chat_template_kwargs or {})
        given = set(variables)
        for each in body.hints():
            name, switch = each.hint.variable, each.hint.switch
            if name in template.variables and variables.setdefault(name, each.value) != each.value:
                raise refused(each.path, f"contradicts chat_template_kwargs.{name}")
            # Who names the switch means it.
            if switch in template.variables and switch not in given:
                variables[switch] = each.value != "none"
        return variables

    def _ignored(self, body: CompletionRequest | ChatRequest) -> Iterator[str]:
        """Yields the paths of what nothing comes of."""
        given: Mapping[str, Any] = {}
        read: Set[str] = frozenset()
        if isinstance(body, ChatRequest):
            given, read = body.chat_template_kwargs or {}, self._prompts.template.variables
        for each in body.hints():
            is_handed = each.hint.variable in read or each.hint.switch in read - given.keys()
            if each.hint.needs_telling(each.value) and not is_handed:
                yield each.path
        yield from (f"chat_template_kwargs.{name}" for name in given if name not in read)
        if body.logprob_token_ids and body.num_logprobs:
            yield "top_logprobs" if isinstance(body, ChatRequest) else "logprobs"
        usage = body.stream_options or StreamOptions()
        if usage.continuous_usage_stats and not usage.include_usage:
            yield "stream_options.continuous_usage_stats"

    def _text(
        self, body: CompletionRequest | ChatRequest, prompt: str
    ) -> tuple[TextOptions, Grammar]:
        """Returns what becomes of the tokens, and the grammar that they match. Raises ApiError."""
        grammar = grammar_of(body.response_format, body.structured_outputs)
        text = TextOptions(
            stops=body.stop,
            include_stop=body.include_stop_str_in_output,
            skip_special_tokens=body.skip_special_tokens,
            min_tokens=_min_tokens(body),
        )
        if isinstance(body, ChatRequest):
            text = self._formats.options(body, text, prompt)
            grammar = self._formats.grammar(body, text, grammar)
        return text, grammar

    def adopt_adapters(self, adapters: Sequence[AdapterInfo]) -> None:
        """From now on these are loaded."""
        self.adapters = adapter_names(adapters)

    def check_model(self, name: str | None) -> str | None:
        """Returns the adapter that a model's name means; None: the model as it is. Raises ApiError 404
        for one that is not served."""
        if name is None or name == self._model_name:
            return None
        if name not in self.adapters:
            raise unknown_model(name, self._model_name, self.adapters)
        return name

    def _check(self, body: CompletionRequest | ChatRequest, *, num_prompts: int) -> None:
        """Raises ApiError for a fault that shows without the prompt."""
        self.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise refused("stream_options", "needs 'stream': true")
        self._prompts.check_token_ids("stop_token_ids", body.stop_token_ids or ())
        self._prompts.check_token_ids("logprob_token_ids", body.logprob_token_ids or ())
        seconds = self._max_seconds
        if body.timeout is not None and seconds is not None and body.timeout > seconds:
            raise refused("timeout", f": this server gives a request {seconds:g} seconds")
        if num_prompts * body.n > self._max_choices:
            name = "n" if num_prompts == 1 else "prompt"
            most = f"this server writes at most {self._max_choices} per request"
            raise refused(name, f": {num_prompts * body.n} choices; {most}")
        field, limit = body.limit
        if limit is not None and limit > self._info.max_model_len:
            raise refused(field, f"exceeds the context of {self._info.max_model_len}")
        if limit is not None and _min_tokens(body) > limit:
            raise refused("min_tokens", f"must not exceed {field}")

    def _kept(self, body: CompletionRequest | ChatRequest) -> slice:
        """Returns the places of a prompt's tokens that are left. Raises ApiError."""
        num = body.truncate_prompt_tokens
        if num is None and body.truncation_side is not None:
            raise refused("truncation_side", "needs 'truncate_prompt_tokens'")
        if num == 0:
            raise refused("truncate_prompt_tokens", "must be -1, or at least 1")
        if num is None:
            return slice(None)
        if num == -1:
            num = max(1, self._info.max_model_len - (body.limit[1] or 1))
        return slice(num) if body.truncation_side == "right" else slice(-num, None)

    def _requests(
        self,
        body: CompletionRequest | ChatRequest,
        prompts: Sequence[tuple[int, ...]],
        grammar: Grammar,
        speculative: SpeculativeParams,
        request_id: str,
        arrival_time: float,
    ) -> Iterator[GenerationRequest]:
        """Yields the engine's requests, ``n`` for each prompt. Raises ApiError."""
        sampling = self._sampling(body, grammar)
        prediction = self._prediction(body)
        seconds = body.timeout or self._max_seconds
        limit = body.limit[1]
        for index in range(len(prompts) * body.n):
            token_ids = prompts[index // body.n]
            room = self._info.max_model_len - len(token_ids)
            most = room if limit is None else min(room, limit)
            yield GenerationRequest(
                request_id=f"{request_id}-{index}",
                prompt_token_ids=token_ids,
                sampling=SamplingParams(
                    **sampling,
                    max_tokens=most,
                    min_tokens=min(_min_tokens(body), most),
                    choice_index=index % body.n,
                ),
                speculative=speculative,
                priority=body.priority,
                cache_salt=body.cache_salt or "",
                adapter=self.check_model(body.model),
                arrival_time=arrival_time,
                deadline=None if seconds is None else arrival_time + seconds,
                prediction_token_ids=prediction,
            )

    def _prediction(self, body: SamplingFields) -> tuple[int, ...]:
        if body.prediction is None:
            return ()
        text = _marked(body.prediction.content, body.allow_special_tokens)
        return self._prompts.of_prediction("prediction.content", text)

    def _sampling(self, body: CompletionRequest | ChatRequest, grammar: Grammar) -> dict[str, Any]:
        """Returns the sampling parameters that all choices share."""
        values = sampling_values(dict(body), self._vocabulary)
        values.pop("min_tokens", None)
        # One list serves an echo and the prompt's log-probabilities; the writers show of it what was
        # asked for.
        echoed = body.num_logprobs if isinstance(body, CompletionRequest) and body.echo else None
        scored = [num for num in (echoed, body.prompt_logprobs) if num is not None]
        return values | {
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "stop_token_ids": tuple(body.stop_token_ids or ()),
            "ignore_eos": body.ignore_eos,
            "logprobs": body.num_logprobs,
            "prompt_logprobs": max(scored, default=None),
            "logprob_token_ids": tuple(dict.fromkeys(body.logprob_token_ids or ())),
            "grammar": grammar.text,
            "grammar_fields": grammar.fields,
            # Drawn where not given, and sent with the reply, so that any text can be had again.
            "seed": secrets.randbelow(MAX_SEED + 1) if body.seed is None else body.seed,
        }


def adapter_names(adapters: Sequence[AdapterInfo]) -> tuple[str, ...]:
    return tuple(each.name for each in adapters)


def _marked(text: str, allow_special_tokens: bool) -> Text:
    return text if allow_special_tokens else [(False, text)]


def _beginnings(body: CompletionRequest | ChatRequest, prompts: Sequence[str]) -> tuple[str, ...]:
    """Returns what the texts of each prompt's choices begin with."""
    if not body.echo:
        return ("",) * len(prompts)
    if isinstance(body, ChatRequest):
        return (body.messages[-1].content or "",)
    return tuple(prompts)


def _min_tokens(body: SamplingFields) -> int:
    num: int = body.min_tokens  # type: ignore[attr-defined]  # declared by a logits processor
    return num


def _check_agreement(body: CompletionRequest | ChatRequest, grammar: Grammar) -> None:
    """Raises ApiError where a field would have no effect next to the others."""
    if body.num_logprobs is None:
        for name in ("return_tokens_as_token_ids", "logprob_token_ids"):
            if getattr(body, name):
                raise refused(name, "needs 'logprobs'")
    if grammar and body.ignore_eos:
        raise refused("ignore_eos", ": a text ends where its grammar ends")
    asked = None if body.speculative is None else body.speculative.given().get("draft_strategy")
    if asked == GRAMMAR_DRAFTER and not grammar:
        field = "speculative.draft_strategy"
        raise refused(field, f"{asked!r} needs a constrained output")
