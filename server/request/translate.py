"""From request bodies to engine requests: pure, and the last place where a field may be refused.

A ``max_tokens`` that the prompt leaves no room for is cut to the room, listed in the reply's header, and
the choice ends with "length".
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence, Set
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from engine.request.info import AdapterInfo, EngineInfo
from engine.request.params import (
    PLAIN,
    Batch,
    GenerationRequest,
    SamplingParams,
    SpeculativeParams,
)
from engine.sampling.processor import Vocabulary, sampling_values
from server.errors import SAME, OwnNames, bad_request, refused, unknown_model
from server.plan import ChoicePlan, RequestPlan, TextOptions
from server.request.body import DRAWN_SEEDS
from server.request.chat import Asked, Chat, Completion, SamplingFields, StreamOptions
from server.request.foreign_parts import refuse_foreign_parts
from server.request.grammars import Grammar, grammar_of
from server.request.message_formats import MessageFormats
from server.request.messages import Tool, template_messages, text_of
from server.request.prompts import Prompts
from server.request.sampling_defaults import API_DEFAULTS
from server.request.special_tokens import Text
from server.request.speculative import SpeculativeResolver

MAX_TEXTS = 2048
"""OpenAI's limit of texts in a request for embeddings."""
_POOLED_AT_ONCE = 64
"""Most of these that are in the engine's queue at a time."""
GRAMMAR_DRAFTER = "grammar"
SERVICE_TIER = "default"
CLIENT_FIELDS = ("user", "safety_identifier", "prompt_cache_key", "metadata")
"""Fields in which clients name people."""


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
        sampling: dict[str, Any],
        logs_client_fields: bool = False,
        may_go: bool = False,
    ) -> None:
        """``max_seconds``: from a request's arrival to its deadline, where it names no earlier one.
        ``sampling``: defaults of the model's or the operator's, before those of an API. ``may_go``:
        whether requests may say how long the model stays loaded."""
        self.info = info
        self._prompts = Prompts(info, tokenizer)
        self.template = self._prompts.template
        self.resolver = resolver
        self.adapters = adapter_names(info.adapters or ())
        self.model_name = model_name
        self._max_choices = max_choices
        self.formats = formats
        self._max_seconds = max_seconds
        self._logged = CLIENT_FIELDS if logs_client_fields else ()
        self.sampling = sampling
        self.may_go = may_go
        self._vocabulary = Vocabulary(
            info.vocab_size,
            partial(tokenizer.encode, add_special_tokens=False),
            self._prompts.decode,
        )

    @property
    def served_names(self) -> tuple[str, ...]:
        """Returns what requests may call their model: its own name, and those of its adapters."""
        return (self.model_name, *self.adapters)

    @property
    def takes_tools(self) -> bool:
        """Returns whether the model can be shown tools, and its calls are recognised."""
        return self.template.takes_tools and self.formats.knows_calls

    @property
    def fills_in(self) -> bool:
        """Returns whether a completion may have a suffix."""
        return bool(self._prompts.infill.marks)

    def plan(
        self, body: Asked, arrival_time: float, names: OwnNames = SAME, max_choices: int = 0
    ) -> RequestPlan:
        """Returns what the engine is to write and how. ``names``: the client's, of this body's fields;
        ``max_choices``: in the place of the server's, unless 0. Raises ApiError."""
        with names.in_refusals():
            self._check(body, max_choices or self._max_choices)
            prompts = self._chat(body) if isinstance(body, Chat) else self._completion(body)
            text, grammar = self._text(body, prompts[0][0])
            grammar = grammar.renamed(names)
            _check_agreement(body, grammar)
            speculative = self.resolver.resolve(body.speculative, body.prediction is not None)
            request_id = uuid.uuid4().hex
            ids = [each for _, each in prompts]
            requests = [*self._requests(body, ids, grammar, speculative, request_id, arrival_time)]
        streaming = body.stream_options or StreamOptions()
        choices = (ChoicePlan(index, request, text) for index, request in enumerate(requests))
        ignored = map(names.of, self._ignored(body, max(map(len, ids))))
        return RequestPlan(
            request_id=request_id,
            created=int(time.time()),
            model=body.model or self.model_name,
            n=body.n,
            choices=tuple(choices),
            beginnings=_beginnings(body, [prompt for prompt, _ in prompts]),
            echo=body.echo and isinstance(body, Completion),
            limit=body.limit[1],
            stream=body.stream,
            include_usage=streaming.include_usage,
            # As in vLLM it has no effect alone.
            continuous_usage=streaming.include_usage and streaming.continuous_usage_stats,
            num_logprobs=body.num_logprobs,
            num_prompt_logprobs=body.prompt_logprobs,
            tokens_as_ids=body.return_tokens_as_token_ids,
            return_token_ids=body.return_token_ids,
            return_drafted=speculative.return_drafted,
            logged={name: getattr(body, name) for name in self._logged if getattr(body, name)},
            cache_salt=body.cache_salt or "",
            service_tier=None if body.service_tier is None else SERVICE_TIER,
            metadata=body.metadata or {},
            ignored=tuple(dict.fromkeys((*ignored, *grammar.ignored))),
            names=names,
        )

    def plan_embeddings(
        self, arrival_time: float, field: str, texts: Any, dimensions: int | None, **fields: Any
    ) -> RequestPlan:
        """Returns a plan with a choice for each of the texts, which are what a ``prompt`` may be.
        ``field``: the client's that has them; ``fields``: others of completions, checked. Raises
        ApiError."""
        if self.info.embeddings == "none":
            raise bad_request(
                None,
                "This server makes no embeddings; its operator can have it do so with --embeddings mean "
                "or --embeddings last.",
                code="no_embeddings",
            )
        if dimensions not in (None, self.info.hidden_size):
            raise refused("dimensions", f": this model's embeddings have {self.info.hidden_size}")
        if fields.get("truncate_prompt_tokens") is not None:
            fields["truncation_side"] = "right"
        # Texts are text, whatever they spell; nothing is written, so there is nothing to draft.
        asked = Completion.of(
            prompt=texts, max_tokens=1, seed=0, allow_special_tokens=False, **fields
        )
        plan = self.plan(asked, arrival_time, OwnNames({"prompt": field}), MAX_TEXTS)
        batch = plan.choices[0].request.batch
        if batch is not None:
            batch = batch._replace(num_at_once=min(_POOLED_AT_ONCE, self.info.max_num_open))
        pooling = self.info.embeddings
        choices = (
            replace(
                each,
                request=replace(each.request, pooling=pooling, speculative=PLAIN, batch=batch),
            )
            for each in plan.choices
        )
        return replace(plan, choices=tuple(choices), ignored=())

    def tokenize(self, body: Asked, names: OwnNames = SAME) -> list[int]:
        """Returns the tokens of the first prompt, however many. Raises ApiError with the client's
        ``names``."""
        with names.in_refusals():
            self.check_model(body.model)
            if isinstance(body, Completion):
                text = _marked(body.prompt[0], body.allow_special_tokens)
                return self._prompts.encode("prompt", text, body.add_special_tokens)
            refuse_foreign_parts(body.messages, "messages", self.info.unserved)
            tools = body.shown_tools if self.template.takes_tools else ()
            text = self._render(body, tools)
            return self._prompts.encode("messages", text, body.add_special_tokens)

    def detokenize(self, model: str | None, token_ids: Sequence[int]) -> str:
        """Raises ApiError naming OpenAI's fields."""
        self.check_model(model)
        self._prompts.check_token_ids("tokens", token_ids)
        return self._prompts.decode(token_ids)

    def _completion(self, body: Completion) -> list[tuple[str, tuple[int, ...]]]:
        """Returns the prompts, as texts and tokens. Raises ApiError."""
        kept = self._kept(body)
        if body.suffix:
            return [self._around_gap(body, each) for each in body.prompt]
        return [
            self._prompts.of_text(
                "prompt", _marked(given, body.allow_special_tokens), body.add_special_tokens, kept
            )
            if isinstance(given, str)
            else self._prompts.of_token_ids("prompt", given, kept)
            for given in body.prompt
        ]

    def _around_gap(self, body: Completion, prompt: Any) -> tuple[str, tuple[int, ...]]:
        """Returns the prompt for what stands between it and the suffix. Raises ApiError."""
        if not self.fills_in:
            reason = ": this model's tokenizer has no tokens for it (it does not support insert)"
            raise refused("suffix", reason)
        for name, is_at_odds in (
            ("prompt", not isinstance(prompt, str)),
            ("echo", body.echo),
            ("truncate_prompt_tokens", body.truncate_prompt_tokens is not None),
        ):
            if is_at_odds:
                raise refused(name, ": next to 'suffix' only a whole text is supported")
        text = self._prompts.infill.prompt(prompt, body.suffix or "", body.allow_special_tokens)
        return self._prompts.of_text("prompt", text, body.add_special_tokens)

    def _chat(self, body: Chat) -> list[tuple[str, tuple[int, ...]]]:
        """Returns the only prompt, as text and tokens. Raises ApiError."""
        if body.top_logprobs and not body.logprobs:
            raise refused("top_logprobs", "needs 'logprobs': true")
        if body.echo and body.messages[-1].role != "assistant":
            raise refused("echo", "needs a last message that is the assistant's")
        refuse_foreign_parts(body.messages, "messages", self.info.unserved)
        kept = self._kept(body)
        self.formats.check(body)
        text = self._render(body, self._told(body))
        return [self._prompts.of_text("messages", text, body.add_special_tokens, kept)]

    def _render(self, body: Chat, tools: Sequence[Tool]) -> Text:
        """Returns the chat template's text for the messages. Raises ApiError naming the field."""
        if body.continue_final_message and body.add_generation_prompt:
            raise refused("continue_final_message", "needs 'add_generation_prompt': false")
        return self.template.render(
            template_messages(body.messages, self.template.takes_text),
            self._variables(body),
            tools=[{"type": "function", "function": x.function.for_template()} for x in tools],
            allow_special_tokens=body.allow_special_tokens,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )

    def _told(self, body: Chat) -> Sequence[Tool]:
        """Returns the tools that the model is told of. Where its template has no place for any, a call
        that has to come is held to its schema all the same. Raises ApiError where that is no help."""
        if self.template.takes_tools:
            return body.shown_tools
        if body.shown_tools and not body.must_call:
            raise refused("tools", ": this model's chat template has no place for them")
        return ()

    def _variables(self, body: Chat) -> dict[str, Any]:
        """Returns the client's variables of the chat template, and the hints that it reads. Raises
        ApiError."""
        template = self.template
        variables = template.read_of(body.chat_template_kwargs or {})
        given = set(variables)
        for each in body.hints():
            name = each.hint.variable
            if name in template.variables and variables.setdefault(name, each.value) != each.value:
                raise refused(each.path, f"contradicts chat_template_kwargs.{name}")
            # Who names the switch means it.
            for switch in each.hint.switches & template.variables - given:
                variables.setdefault(switch, each.hint.is_on(each.value))
        return variables

    def _ignored(self, body: Asked, longest: int) -> Iterator[str]:
        """Yields the paths of what nothing comes of. ``longest``: the tokens of the longest prompt."""
        given: Mapping[str, Any] = {}
        read: Set[str] = frozenset()
        if isinstance(body, Chat):
            given, read = body.chat_template_kwargs or {}, self.template.variables
        for each in body.hints():
            is_handed = each.hint.variable in read or each.hint.switches & read - given.keys()
            is_read = each.path == "messages.name" and self.template.reads_names
            if each.hint.needs_telling(each.value) and not (is_handed or is_read):
                yield each.path
        field, limit = body.limit
        if field in body.model_fields_set and (limit or 0) > self.info.max_model_len - longest:
            yield field
        if isinstance(body, Chat) and not body.tools:
            yield from sorted(body.model_fields_set & {"tool_choice", "parallel_tool_calls"})
        yield from (f"chat_template_kwargs.{name}" for name in given if name not in read)
        if body.logprob_token_ids and body.num_logprobs:
            yield "top_logprobs" if isinstance(body, Chat) else "logprobs"
        usage = body.stream_options or StreamOptions()
        if usage.continuous_usage_stats and not usage.include_usage:
            yield "stream_options.continuous_usage_stats"

    def _text(self, body: Asked, prompt: str) -> tuple[TextOptions, Grammar]:
        """Returns what becomes of the tokens, and the grammar that they match. Raises ApiError."""
        grammar = grammar_of(body.response_format, body.structured_outputs)
        text = TextOptions(
            stops=body.stop,
            include_stop=body.include_stop_str_in_output,
            skip_special_tokens=body.skip_special_tokens,
            min_tokens=_min_tokens(body),
        )
        if isinstance(body, Chat):
            last = body.messages[-1].content if body.continue_final_message else None
            text = self.formats.options(body, text, prompt, text_of(last))
            grammar = self.formats.grammar(body, text, grammar)
        return text, grammar

    def adopt_adapters(self, adapters: Sequence[AdapterInfo]) -> None:
        """From now on these are loaded."""
        self.adapters = adapter_names(adapters)

    def held_to(self, drafters: Sequence[str] | None, adapters: Sequence[str] | None) -> Translator:
        """Returns what serves requests that may have these drafters and adapters only; None: all."""
        held = copy(self)
        held.resolver = self.resolver.held_to(drafters)
        held.adapters = tuple(x for x in self.adapters if adapters is None or x in adapters)
        return held

    def check_model(self, name: str | None) -> str | None:
        """Returns the adapter that a model's name means; None: the model as it is. Raises ApiError 404
        for one that is not served."""
        if name is None or name == self.model_name:
            return None
        if name not in self.adapters:
            raise unknown_model(name, self.model_name, self.adapters)
        return name

    def _check(self, body: Asked, max_choices: int) -> None:
        """Raises ApiError for a fault that shows without the prompt."""
        self.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise refused("stream_options", "needs 'stream': true")
        self._prompts.check_token_ids("stop_token_ids", body.stop_token_ids or ())
        self._prompts.check_token_ids("logprob_token_ids", body.logprob_token_ids or ())
        seconds = self._max_seconds
        if body.timeout is not None and seconds is not None and body.timeout > seconds:
            raise refused("timeout", f": this server gives a request {seconds:g} seconds")
        num_prompts = 1 if isinstance(body, Chat) else len(body.prompt)
        if num_prompts * body.n > max_choices:
            name = "n" if num_prompts == 1 else "prompt"
            most = f"this server writes at most {max_choices} per request"
            raise refused(name, f": {num_prompts * body.n} choices; {most}")
        field, limit = body.limit
        if limit == 0:
            raise refused(field, "must be -1, or at least 1")
        if limit is not None and _min_tokens(body) > limit:
            raise refused("min_tokens", f"must not exceed {field}")

    def _kept(self, body: Asked) -> slice:
        """Returns the places of a prompt's tokens that are left. Raises ApiError."""
        num = body.truncate_prompt_tokens
        if num is None and body.truncation_side is not None:
            raise refused("truncation_side", "needs 'truncate_prompt_tokens'")
        if num == 0:
            raise refused("truncate_prompt_tokens", "must be -1, or at least 1")
        if num is None:
            return slice(None)
        if num == -1:
            room = self.info.max_model_len - (body.limit[1] or 1)
            num = max(1, room) if room >= 0 else self.info.max_model_len - 1
        return slice(num) if body.truncation_side == "right" else slice(-num, None)

    def _requests(
        self,
        body: Asked,
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
        num_choices = len(prompts) * body.n
        batch = Batch(request_id, num_choices, len(prompts), sum(map(len, prompts)))
        for index in range(num_choices):
            token_ids = prompts[index // body.n]
            room = self.info.max_model_len - len(token_ids)
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
                batch=batch if num_choices > 1 else None,
                prediction_token_ids=prediction,
            )

    def _prediction(self, body: SamplingFields) -> tuple[int, ...]:
        if body.prediction is None:
            return ()
        text = _marked(text_of(body.prediction.content), body.allow_special_tokens)
        return self._prompts.of_prediction("prediction.content", text)

    def _sampling(self, body: Asked, grammar: Grammar) -> dict[str, Any]:
        """Returns the sampling parameters that all choices share."""
        given = {name: getattr(body, name) for name in body.model_fields_set}
        sent = API_DEFAULTS | self.sampling | given
        values = sampling_values(sent, self._vocabulary)
        values.pop("min_tokens", None)
        # One list serves an echo and the prompt's log-probabilities; the writers show of it what was
        # asked for.
        echoed = body.num_logprobs if isinstance(body, Completion) and body.echo else None
        is_infill = isinstance(body, Completion) and body.suffix and not body.ignore_eos
        ends = self._prompts.infill.end_ids if is_infill else ()
        scored = [num for num in (echoed, body.prompt_logprobs) if num is not None]
        return values | {
            "temperature": sent["temperature"],
            "stop_token_ids": tuple(dict.fromkeys((*(body.stop_token_ids or ()), *ends))),
            "ignore_eos": body.ignore_eos,
            "logprobs": body.num_logprobs,
            "prompt_logprobs": max(scored, default=None),
            "logprob_token_ids": tuple(dict.fromkeys(body.logprob_token_ids or ())),
            "grammar": grammar.text,
            "grammar_fields": grammar.fields,
            # Drawn where not given, and sent with the reply, so that any text can be had again.
            "seed": secrets.randbelow(DRAWN_SEEDS) if body.seed in (None, -1) else body.seed,
        }


def adapter_names(adapters: Sequence[AdapterInfo]) -> tuple[str, ...]:
    return tuple(each.name for each in adapters)


def _marked(text: str, allow_special_tokens: bool) -> Text:
    return text if allow_special_tokens else [(False, text)]


def _beginnings(body: Asked, prompts: Sequence[str]) -> tuple[str, ...]:
    """Returns what the texts of each prompt's choices begin with."""
    if not body.echo:
        return ("",) * len(prompts)
    if isinstance(body, Chat):
        return (text_of(body.messages[-1].content),)
    return tuple(prompts)


def _min_tokens(body: SamplingFields) -> int:
    num: int = body.min_tokens  # type: ignore[attr-defined]  # declared by a logits processor
    return num


def _check_agreement(body: Asked, grammar: Grammar) -> None:
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
