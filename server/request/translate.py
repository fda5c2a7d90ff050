"""From request bodies to engine requests: pure, and the last place where a field may be refused.

Lengths follow vLLM: a prompt that leaves no room for a single token is a 400; a ``max_tokens``
that no prompt could ever have is a 400; one that this prompt has no room for is clamped, and the
choice ends with "length".
"""

from __future__ import annotations

import re
import secrets
import time
import uuid
from dataclasses import replace
from functools import partial
from typing import Any

from jinja2 import TemplateError

from engine.info import EngineInfo
from engine.params import GenerationRequest, SamplingParams, SpeculativeParams
from engine.sampling.processor import Vocabulary, sampling_values
from server.errors import bad_request, unknown_model
from server.plan import ChoicePlan, Prompt, RequestPlan, TextOptions
from server.request.body import MAX_SEED
from server.request.grammars import grammar_of
from server.request.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
)
from server.request.speculative import SpeculativeResolver

GRAMMAR_DRAFTER = "grammar"
_TEMPLATE_ARGUMENTS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class Translator:
    """Knows the model served: its tokenizer, vocabulary and lengths."""

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Any,
        resolver: SpeculativeResolver,
        model_name: str,
        max_choices: int,
    ) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._resolver = resolver
        self._model_name = model_name
        self._max_choices = max_choices
        self._template = str(tokenizer.chat_template) if tokenizer.chat_template else None
        self._vocabulary = Vocabulary(
            info.vocab_size, partial(tokenizer.encode, add_special_tokens=False)
        )
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)

    def plan(self, body: CompletionRequest | ChatRequest, arrival_time: float) -> RequestPlan:
        """Raises ApiError."""
        if isinstance(body, ChatRequest):
            return self.chat(body, arrival_time)
        return self.completion(body, arrival_time)

    def completion(self, body: CompletionRequest, arrival_time: float) -> RequestPlan:
        """Raises ApiError."""
        self._check_common(body)
        if body.best_of not in (None, body.n):
            raise bad_request("best_of", "best_of is supported only if it equals n")
        prompts = [self._prompt(given, body.add_special_tokens) for given in body.prompt]
        return self._plan(
            body,
            prompts,
            max_tokens=body.max_tokens or DEFAULT_COMPLETION_TOKENS,
            max_tokens_field="max_tokens",
            num_logprobs=body.logprobs,
            echo=body.echo,
            arrival_time=arrival_time,
        )

    def chat(self, body: ChatRequest, arrival_time: float) -> RequestPlan:
        """Raises ApiError."""
        self._check_common(body)
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs", "top_logprobs needs 'logprobs': true")
        limit = body.max_completion_tokens or body.max_tokens
        if body.max_tokens is not None and body.max_tokens != limit:
            raise bad_request("max_tokens", "max_tokens contradicts max_completion_tokens")
        prompt = self._encode("messages", self._render(body), body.add_special_tokens)
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        return self._plan(
            body,
            [prompt],
            max_tokens=limit,
            max_tokens_field=field,
            num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            echo=False,
            arrival_time=arrival_time,
        )

    def _check_common(self, body: SamplingFields) -> None:
        if body.model is not None and body.model != self._model_name:
            raise unknown_model(body.model, self._model_name)
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options", "stream_options needs 'stream': true")
        for token_id in body.stop_token_ids or ():
            self._check_token_id("stop_token_ids", token_id)

    def _check_token_id(self, field: str, token_id: int) -> None:
        if not 0 <= token_id < self._info.vocab_size:
            last = self._info.vocab_size - 1
            raise bad_request(field, f"{field}: token id {token_id} is not in 0..{last}")

    def _prompt(self, given: str | list[int], add_special_tokens: bool) -> Prompt:
        if isinstance(given, str):
            return self._encode("prompt", given, add_special_tokens)
        for token_id in given:
            self._check_token_id("prompt", token_id)
        text = self._tokenizer.decode(given, clean_up_tokenization_spaces=False)
        return self._check_length("prompt", Prompt(text, tuple(given)))

    def _encode(self, field: str, text: str, add_special_tokens: bool) -> Prompt:
        at_least = len(text) // self._longest_token
        if at_least >= self._info.max_model_len:
            # Not worth tokenizing: a token cannot hold more than the longest one's characters.
            raise self._too_long(field, f"at least {at_least}")
        token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not token_ids and self._tokenizer.bos_token_id is not None:
            token_ids = [self._tokenizer.bos_token_id]
        return self._check_length(field, Prompt(text, tuple(token_ids)))

    def _check_length(self, field: str, prompt: Prompt) -> Prompt:
        if not prompt.token_ids:
            raise bad_request(field, f"{field}: the prompt has no tokens")
        if len(prompt.token_ids) >= self._info.max_model_len:
            raise self._too_long(field, str(len(prompt.token_ids)))
        return prompt

    def _too_long(self, field: str, num_tokens: str) -> Exception:
        return bad_request(
            field,
            f"{field}: the prompt has {num_tokens} tokens; the context is "
            f"{self._info.max_model_len}, and at least one has to be left to write",
            code="context_length_exceeded",
        )

    def _render(self, body: ChatRequest) -> str:
        """The chat template's text for the messages."""
        if self._template is None:
            raise bad_request(
                "messages", "this model's tokenizer has no chat template; use /v1/completions"
            )
        if body.continue_final_message and body.add_generation_prompt:
            raise bad_request(
                "continue_final_message",
                "continue_final_message needs 'add_generation_prompt': false",
            )
        kwargs = body.chat_template_kwargs or {}
        for name in kwargs:
            known = re.search(rf"\b{re.escape(name)}\b", self._template)
            if name in _TEMPLATE_ARGUMENTS or not name.isidentifier() or not known:
                field = f"chat_template_kwargs.{name}"
                raise bad_request(field, f"{field}: the chat template has no such variable")
        messages = [
            {
                "role": "system" if message.role == "developer" else message.role,
                "content": message.content,
            }
            for message in body.messages
        ]
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                **kwargs,
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise bad_request(
                "messages", f"the chat template refuses the messages: {error}"
            ) from error
        return text

    def _plan(
        self,
        body: SamplingFields,
        prompts: list[Prompt],
        *,
        max_tokens: int | None,
        max_tokens_field: str,
        num_logprobs: int | None,
        echo: bool,
        arrival_time: float,
    ) -> RequestPlan:
        num_choices = len(prompts) * body.n
        if num_choices > self._max_choices:
            field = "n" if len(prompts) == 1 else "prompt"
            message = f"{field}: {num_choices} choices; this server writes at most"
            raise bad_request(field, f"{message} {self._max_choices} per request")
        if max_tokens is not None and max_tokens > self._info.max_model_len:
            limit = self._info.max_model_len
            raise bad_request(
                max_tokens_field, f"{max_tokens_field} exceeds the context of {limit}"
            )
        sampling = self._sampling(body, num_logprobs, echo)
        min_tokens = sampling.pop("min_tokens")
        if max_tokens is not None and min_tokens > max_tokens:
            raise bad_request("min_tokens", f"min_tokens must not exceed {max_tokens_field}")
        # Sampled where not given, and sent with the reply, so that any completion can be had again.
        seed = secrets.randbelow(MAX_SEED + 1) if body.seed is None else body.seed
        request_id = uuid.uuid4().hex
        choices = []
        speculative = self._speculative(body)
        for index in range(num_choices):
            prompt = prompts[index // body.n]
            room = self._info.max_model_len - len(prompt.token_ids)
            limit = room if max_tokens is None else min(room, max_tokens)
            request = GenerationRequest(
                request_id=f"{request_id}-{index}",
                prompt_token_ids=prompt.token_ids,
                sampling=SamplingParams(
                    **sampling,
                    max_tokens=limit,
                    min_tokens=min(min_tokens, limit),
                    seed=seed,
                    choice_index=index % body.n,
                ),
                speculative=speculative,
                priority=body.priority,
                cache_salt=body.cache_salt or "",
                arrival_time=arrival_time,
            )
            text = TextOptions(
                stops=body.stop,
                include_stop=body.include_stop_str_in_output,
                skip_special_tokens=body.skip_special_tokens,
                min_tokens=min_tokens,
            )
            choices.append(ChoicePlan(index, request, text))
        return RequestPlan(
            request_id=request_id,
            created=int(time.time()),
            seed=seed,
            n=body.n,
            prompts=tuple(prompts),
            choices=tuple(choices),
            num_logprobs=num_logprobs,
            echo=echo,
            return_token_ids=body.return_token_ids,
            return_drafted=self._resolver.returns_drafted(body.speculative),
            has_prediction=body.prediction is not None,
            stream=body.stream,
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
            user=body.user,
        )

    def _speculative(self, body: SamplingFields) -> SpeculativeParams:
        if body.prediction is None:
            return self._resolver.resolve(body.speculative)
        params = self._resolver.resolve(body.speculative, has_prediction=True)
        field, text = "prediction.content", body.prediction.content
        if len(text) // self._longest_token >= self._info.max_model_len:
            # Not worth tokenizing, as above.
            raise bad_request(field, f"{field} exceeds the context of {self._info.max_model_len}")
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if not token_ids:
            raise bad_request(field, f"{field}: the prediction has no tokens")
        if len(token_ids) > self._info.max_model_len:
            raise bad_request(field, f"{field} exceeds the context of {self._info.max_model_len}")
        return replace(params, reference_token_ids=tuple(token_ids))

    def _sampling(
        self, body: SamplingFields, num_logprobs: int | None, echo: bool
    ) -> dict[str, Any]:
        """The sampling parameters that all choices share."""
        return sampling_values(dict(body), self._vocabulary) | {
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "stop_token_ids": tuple(body.stop_token_ids or ()),
            "ignore_eos": body.ignore_eos,
            "logprobs": num_logprobs,
            "prompt_logprobs": num_logprobs if echo else None,
            "grammar": _grammar(body),
        }


def _grammar(body: SamplingFields) -> str:
    grammar = grammar_of(body.response_format, body.structured_outputs)
    if grammar and body.ignore_eos:
        raise bad_request("ignore_eos", "ignore_eos: a text ends where its grammar ends")
    asked = None if body.speculative is None else body.speculative.given().get("draft_strategy")
    if asked == GRAMMAR_DRAFTER and not grammar:
        field = "speculative.draft_strategy"
        raise bad_request(field, f"{field} {asked!r} needs a constrained output")
    return grammar
