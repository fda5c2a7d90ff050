"""Bodies that the server takes, and where they go."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import chain
from typing import Any

from engine.request.params import GenerationRequest
from server.apis.anthropic.request import MessagesRequest
from server.apis.openai.request import ChatRequest, CompletionRequest
from server.apis.responses.request import ResponsesRequest
from server.request.body import Body
from worlds.scripted_engine import EOS, USER

TEXT = "hello wörld. the end"
COMPLETION = {"prompt": "ab", "max_tokens": 64}
CHAT = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 64}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a place.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
ARGUMENTS = '{"city": "Köln"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


def function(**fields: Any) -> dict[str, Any]:
    """A tool that a chat may offer."""
    return {"type": "function", "function": {"name": "f", **fields}}


def called(arguments: str = "{}") -> dict[str, Any]:
    """A chat's message that calls it."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def with_values(body: dict[str, Any], paths: dict[str, Any]) -> dict[str, Any]:
    """The body with these values at these paths, in a list's every part."""
    body = deepcopy(body)
    for path, value in paths.items():
        *parts, name = path.split(".")
        insides = [body]
        for part in parts:
            found = [inside.setdefault(part, {}) for inside in insides]
            insides = list(chain(*(each if isinstance(each, list) else [each] for each in found)))
        for inside in insides:
            inside[name] = value
    return body


STRICT = with_values({"tools": TOOLS}, {"tools.function.strict": True})["tools"]


class Outcome:
    """Everything that one request led to."""

    def __init__(
        self, requests: list[GenerationRequest], reply: Any, raw: str, log: str, ignored: str
    ) -> None:
        self.requests = requests
        self.request = requests[0]
        self.sampling = self.request.sampling
        self.params = self.request.speculative
        self.reply = reply
        self.raw = raw
        self.log = log
        self.ignored = ignored

    @property
    def choice(self) -> dict[str, Any]:
        choice: dict[str, Any] = self.reply["choices"][0]
        return choice

    @property
    def text(self) -> str:
        message = self.choice.get("message")
        return str(self.choice["text"] if message is None else message["content"])


def prompt_of(outcome: Outcome) -> bytes:
    """The prompt's text, without special tokens."""
    return bytes(each for each in outcome.request.prompt_token_ids if each < 256)


Check = Callable[[Outcome], bool]


# field -> (fields sent, whether it had its effect); without the field the effect must be absent.
SHARED: dict[str, tuple[dict[str, Any], Check]] = {
    "n": ({"n": 3}, lambda o: len(o.reply["choices"]) == 3),
    "temperature": ({"temperature": 0}, lambda o: o.sampling.temperature == 0),
    "top_p": ({"top_p": 0.5}, lambda o: o.sampling.top_p == 0.5),
    "top_k": ({"top_k": 7}, lambda o: o.sampling.top_k == 7),
    "min_p": ({"min_p": 0.1}, lambda o: o.sampling.min_p == 0.1),
    "top_n_sigma": ({"top_n_sigma": 1.5}, lambda o: o.sampling.further == {"top_n_sigma": 1.5}),
    "presence_penalty": ({"presence_penalty": 1}, lambda o: o.sampling.presence_penalty == 1),
    "frequency_penalty": ({"frequency_penalty": -1}, lambda o: o.sampling.frequency_penalty == -1),
    "repetition_penalty": (
        {"repetition_penalty": 1.2},
        lambda o: o.sampling.repetition_penalty == 1.2,
    ),
    "logit_bias": ({"logit_bias": {"5": -3}}, lambda o: o.sampling.logit_bias == {5: -3}),
    "bad_words": (
        {"bad_words": ["x"]},
        lambda o: o.sampling.bad_words_token_ids == ((120,), (32, 120)),
    ),
    "seed": ({"seed": 11}, lambda o: o.sampling.seed == 11 and o.reply["seed"] == 11),
    "min_tokens": ({"min_tokens": 4}, lambda o: o.sampling.min_tokens == 4),
    "max_tokens": ({"max_tokens": 5}, lambda o: o.sampling.max_tokens == 5),
    "stop": ({"stop": ["wör"]}, lambda o: o.text.endswith("hello ")),
    "stop_token_ids": (
        {"stop_token_ids": [119]},
        lambda o: o.text.endswith("hello ") and o.choice["stop_reason"] == 119,
    ),
    "include_stop_str_in_output": (
        {"stop": ".", "include_stop_str_in_output": True},
        lambda o: o.text.endswith("wörld."),
    ),
    "ignore_eos": ({"ignore_eos": True}, lambda o: o.sampling.ignore_eos),
    "skip_special_tokens": (
        {"skip_special_tokens": False, "ignore_eos": True},
        lambda o: o.text.endswith("</s>"),
    ),
    "return_token_ids": (
        {"return_token_ids": True},
        lambda o: (
            o.choice.get("token_ids") == list(TEXT.encode())
            and (o.choice.get("prompt_token_ids") or o.reply["prompt_token_ids"])
            == list(o.request.prompt_token_ids)
        ),
    ),
    "priority": ({"priority": -2}, lambda o: o.request.priority == -2),
    "timeout": ({"timeout": 2.5}, lambda o: o.request.deadline == o.request.arrival_time + 2.5),
    "cache_salt": ({"cache_salt": "tenant"}, lambda o: o.request.cache_salt == "tenant"),
    "user": ({"user": "someone"}, lambda o: "user='someone'" in o.log),
    "safety_identifier": (
        {"safety_identifier": "someone"},
        lambda o: "safety_identifier='someone'" in o.log,
    ),
    "prompt_cache_key": (
        {"prompt_cache_key": "thread"},
        lambda o: "prompt_cache_key='thread'" in o.log and o.request.cache_salt == "",
    ),
    "service_tier": (
        {"service_tier": "priority"},
        lambda o: o.reply.get("service_tier") == "default" and o.request.priority == 0,
    ),
    "metadata": (
        {"metadata": {"a": "b"}},
        lambda o: o.reply.get("metadata") == {"a": "b"} and "{'a': 'b'}" in o.log,
    ),
    "prompt_logprobs": (
        {"prompt_logprobs": 1},
        lambda o: (
            (o.choice.get("prompt_logprobs") or o.reply["prompt_logprobs"])[1].keys()
            == {str(o.request.prompt_token_ids[1])}
        ),
    ),
    "truncate_prompt_tokens": (
        {"truncate_prompt_tokens": 1},
        lambda o: len(o.request.prompt_token_ids) == 1,
    ),
    "truncation_side": (
        {"truncate_prompt_tokens": 1, "truncation_side": "right"},
        lambda o: o.request.prompt_token_ids[0] in (97, USER),
    ),
    "allowed_token_ids": (
        {"allowed_token_ids": [7, 5]},
        lambda o: o.sampling.further.get("allowed_token_ids") == (7, 5),
    ),
    "response_format": (
        {"response_format": {"type": "json_object"}},
        lambda o: o.sampling.grammar != "",
    ),
    "structured_outputs": (
        {"structured_outputs": {"choice": ["a", "b"]}},
        lambda o: o.sampling.grammar != "",
    ),
    "stream": ({"stream": True}, lambda o: o.raw.startswith("data: ")),
    "stream_options": (
        {"stream": True, "stream_options": {"include_usage": True}},
        lambda o: '"usage":{' in o.raw and o.raw.startswith("data: "),
    ),
    "speculative": (
        {"speculative": {"draft_strategy": "nasd"}},
        lambda o: (
            o.params.draft_strategy == "nasd"
            and o.reply["usage"]["speculative"]["drafter"] == "nasd"
        ),
    ),
    "prediction": (
        {"prediction": {"type": "content", "content": "hello"}},
        lambda o: (
            o.request.prediction_token_ids == tuple(b"hello")
            and "completion_tokens_details" in o.reply["usage"]
        ),
    ),
}


COMPLETION_ONLY: dict[str, tuple[dict[str, Any], Check]] = {
    "return_tokens_as_token_ids": (
        {"return_tokens_as_token_ids": True, "logprobs": 1},
        lambda o: "token_id:104" in o.raw,
    ),
    "logprob_token_ids": (
        {"logprob_token_ids": [9, 9, 7], "logprobs": 0},
        lambda o: o.sampling.logprob_token_ids == (9, 7),
    ),
    "allow_special_tokens": (
        {"prompt": "<|user|>", "allow_special_tokens": False},
        lambda o: o.request.prompt_token_ids == tuple(b"<|user|>"),
    ),
    "prompt": ({"prompt": [1, 2, 3]}, lambda o: o.request.prompt_token_ids == (1, 2, 3)),
    "echo": ({"echo": True}, lambda o: o.text == "ab" + TEXT),
    "logprobs": (
        {"logprobs": 2},
        lambda o: (
            o.sampling.logprobs == 2 and len(o.choice["logprobs"]["tokens"]) == len(TEXT.encode())
        ),
    ),
}


CHAT_ONLY: dict[str, tuple[dict[str, Any], Check]] = {
    "return_tokens_as_token_ids": (
        {"return_tokens_as_token_ids": True, "logprobs": True},
        lambda o: "token_id:104" in o.raw,
    ),
    "logprob_token_ids": (
        {"logprob_token_ids": [9], "logprobs": True},
        lambda o: o.sampling.logprob_token_ids == (9,),
    ),
    "allow_special_tokens": (
        {"messages": [{"role": "user", "content": "</s>"}], "allow_special_tokens": True},
        lambda o: EOS in o.request.prompt_token_ids,
    ),
    "echo": (
        {"messages": [{"role": "assistant", "content": "ab"}], "echo": True},
        lambda o: o.text == "ab" + TEXT,
    ),
    "messages": (
        {"messages": [{"role": "system", "content": "zz"}, {"role": "user", "content": "ab"}]},
        lambda o: b"system: zz\n" in prompt_of(o),
    ),
    "max_completion_tokens": (
        {"max_completion_tokens": 9, "max_tokens": None},
        lambda o: o.sampling.max_tokens == 9,
    ),
    "logprobs": (
        {"logprobs": True},
        lambda o: (
            o.sampling.logprobs == 0 and len(o.choice["logprobs"]["content"]) == len(TEXT.encode())
        ),
    ),
    "top_logprobs": (
        {"logprobs": True, "top_logprobs": 3},
        lambda o: len(o.choice["logprobs"]["content"][0]["top_logprobs"]) == 3,
    ),
    "add_generation_prompt": (
        {"add_generation_prompt": False},
        lambda o: o.request.prompt_token_ids[-1] == ord("\n"),
    ),
    "continue_final_message": (
        {"add_generation_prompt": False, "continue_final_message": True},
        lambda o: o.request.prompt_token_ids[-1] == ord("b"),
    ),
    "tools": ({"tools": TOOLS}, lambda o: b"get_weather" in prompt_of(o)),
    "tool_choice": (
        {"tools": TOOLS, "tool_choice": "required"},
        lambda o: "get_weather" in o.sampling.grammar,
    ),
    "parallel_tool_calls": (
        {"tools": TOOLS, "parallel_tool_calls": False},
        lambda o: "get_weather" in o.sampling.grammar,
    ),
    "reasoning_effort": ({"reasoning_effort": "low"}, lambda o: b"effort low" in prompt_of(o)),
    "thinking": ({"thinking": {"type": "enabled"}}, lambda o: "thinking" in o.ignored),
    "reasoning": ({"reasoning": {"effort": "low"}}, lambda o: b"effort low" in prompt_of(o)),
    "chat_template_kwargs": (
        {"chat_template_kwargs": {"shout": True}},
        lambda o: b"LOUD" in prompt_of(o),
    ),
}


# Hints, by their paths, with values that nothing comes of.
def without_effect(model: type[Body]) -> dict[str, Any]:
    """The fields of the model's table, with a value that is listed."""
    others = {*model.unsupported, *model.model_fields, *model.synonyms}
    table = model.without_effect
    return {name: "x" for name in table if name not in others and table[name] is not None}


PADDED = {"stream_options.include_obfuscation": True, "service_tier": "flex"}
IGNORED: dict[str, Any] = without_effect(CompletionRequest) | PADDED | {"enable_thinking": True}
CHAT_IGNORED: dict[str, Any] = without_effect(ChatRequest) | {
    **PADDED,
    "verbosity": "low",
    "messages.annotations": [{"type": "url_citation"}],
    "messages.id": "msg_1",
    "messages.provider_specific_fields": {"refusal": None},
    "messages.name": "bob",
    "messages.reasoning_details": [{}],
    "enable_thinking": True,
    "thinking": {"type": "enabled"},
    "reasoning.enabled": True,
    "reasoning.max_tokens": 8,
}


# Accepted for their meaning, which the server has anyway, or as hints; another value is a 400.
WITHOUT_CHANGE: dict[str, tuple[Any, Any]] = {
    "enable_thinking": (True, "yes"),
    "model": ("test/scripted", "gpt-4"),
}


COMPLETION_WITHOUT_CHANGE: dict[str, tuple[Any, Any]] = {
    "best_of": (1, 2),
    "suffix": ("", "x"),
    "add_special_tokens": (True, "yes"),
}


CHAT_WITHOUT_CHANGE: dict[str, tuple[Any, Any]] = {
    "modalities": (["text"], ["text", "audio"]),
    "verbosity": ("low", "least"),
    # No reasoning is split off here.
    "include_reasoning": (True, False),
    "add_special_tokens": (False, "no"),
}


RESPONSE = {"input": "ab", "max_output_tokens": 64}
FLAT_TOOLS = [{"type": "function", **TOOLS[0]["function"]}]


RESPONSE_FIELDS: dict[str, tuple[dict[str, Any], Check]] = {
    **{each: SHARED[each] for each in ("temperature", "top_p", "seed", "priority", "timeout")},
    **{each: SHARED[each] for each in ("cache_salt", "user", "speculative", "metadata")},
    **{each: SHARED[each] for each in ("prompt_cache_key", "safety_identifier")},
    "stream": ({"stream": True}, lambda o: o.raw.startswith("event: ")),
    "input": ({"input": "zz"}, lambda o: b"user: zz" in prompt_of(o)),
    "instructions": ({"instructions": "zz"}, lambda o: b"system: zz" in prompt_of(o)),
    "max_output_tokens": ({"max_output_tokens": 5}, lambda o: o.sampling.max_tokens == 5),
    "store": ({"store": False}, lambda o: o.reply["store"] is False),
    "tools": ({"tools": FLAT_TOOLS}, lambda o: b"get_weather" in prompt_of(o)),
    "tool_choice": (
        {"tools": FLAT_TOOLS, "tool_choice": "required"},
        lambda o: "get_weather" in o.sampling.grammar,
    ),
    "parallel_tool_calls": (
        {"tools": FLAT_TOOLS, "parallel_tool_calls": False},
        lambda o: "get_weather" in o.sampling.grammar,
    ),
    "stream_options": (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        lambda o: "stream_options.include_obfuscation" in o.ignored,
    ),
    "text": ({"text": {"format": {"type": "json_object"}}}, lambda o: o.sampling.grammar != ""),
    "reasoning": ({"reasoning": {"effort": "low"}}, lambda o: b"effort low" in prompt_of(o)),
}


RESPONSE_WITHOUT_CHANGE: dict[str, tuple[Any, Any]] = {
    "previous_response_id": (None, "resp_1"),
    "enable_thinking": (True, "yes"),
    "model": ("test/scripted", "gpt-4"),
    "background": (False, True),
    "truncation": ("disabled", "auto"),
    "service_tier": ("auto", "free"),
}
RESPONSE_IGNORED: dict[str, Any] = without_effect(ResponsesRequest) | {
    **PADDED,
    "enable_thinking": True,
    "reasoning.enabled": True,
    "reasoning.max_tokens": 8,
    "text.verbosity": "high",
    "reasoning.summary": "auto",
    "reasoning.generate_summary": "concise",
}


MESSAGES = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 64}
OWN_TOOLS = [
    {"name": "get_weather", "input_schema": TOOLS[0]["function"]["parameters"]}  # type: ignore[index]
]
ANSWER = {"type": "json_schema", "schema": {"type": "object"}}


MESSAGES_FIELDS: dict[str, tuple[dict[str, Any], Check]] = {
    **{each: SHARED[each] for each in ("temperature", "top_p", "top_k", "seed", "priority")},
    **{each: SHARED[each] for each in ("timeout", "cache_salt", "user", "speculative")},
    **{each: SHARED[each] for each in ("prompt_cache_key", "safety_identifier")},
    "metadata": ({"metadata": {"user_id": "b"}}, lambda o: "{'user_id': 'b'}" in o.log),
    "stream": ({"stream": True}, lambda o: o.raw.startswith("event: ")),
    "messages": (
        {"messages": [{"role": "user", "content": "zz"}]},
        lambda o: b"user: zz" in prompt_of(o),
    ),
    "system": ({"system": "zz"}, lambda o: b"system: zz" in prompt_of(o)),
    "max_tokens": ({"max_tokens": 5}, lambda o: o.sampling.max_tokens == 5),
    "stop_sequences": ({"stop_sequences": ["wör"]}, lambda o: o.reply["stop_sequence"] == "wör"),
    "tools": ({"tools": OWN_TOOLS}, lambda o: b"get_weather" in prompt_of(o)),
    "tool_choice": (
        {"tools": OWN_TOOLS, "tool_choice": {"type": "any"}},
        lambda o: "get_weather" in o.sampling.grammar,
    ),
    "output_config": (
        {"output_config": {"effort": "low", "format": ANSWER}},
        lambda o: b"effort low" in prompt_of(o) and o.sampling.grammar != "",
    ),
    "output_format": ({"output_format": ANSWER}, lambda o: o.sampling.grammar != ""),
    "chat_template_kwargs": CHAT_ONLY["chat_template_kwargs"],
    "context_management": (
        {"context_management": {}},
        lambda o: o.reply["context_management"] == {"applied_edits": []},
    ),
}


MESSAGES_WITHOUT_CHANGE: dict[str, tuple[Any, Any]] = {
    "enable_thinking": (True, "yes"),
    "model": ("test/scripted", "gpt-4"),
    "thinking": ({"type": "adaptive"}, 1),
    "service_tier": ("standard_only", "free"),
    "mcp_servers": ([], [{"name": "a"}]),
    "thread": (False, {"type": "create"}),
}
MESSAGES_IGNORED: dict[str, Any] = without_effect(MessagesRequest) | {
    "service_tier": "flex",
    "enable_thinking": True,
    "messages.name": "bob",
    "thinking.type": "enabled",
    "thinking.budget_tokens": 2000,
    "context_management": {},
}


ENDPOINTS: dict[str, tuple[type[Body], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "/completions": (
        CompletionRequest,
        COMPLETION,
        SHARED | COMPLETION_ONLY,
        WITHOUT_CHANGE | COMPLETION_WITHOUT_CHANGE,
    ),
    "/chat/completions": (
        ChatRequest,
        CHAT,
        SHARED | CHAT_ONLY,
        WITHOUT_CHANGE | CHAT_WITHOUT_CHANGE,
    ),
    "/responses": (ResponsesRequest, RESPONSE, RESPONSE_FIELDS, RESPONSE_WITHOUT_CHANGE),
    "/messages": (MessagesRequest, MESSAGES, MESSAGES_FIELDS, MESSAGES_WITHOUT_CHANGE),
}
