"""A deterministic engine for the server's tests, tokenizers to go with it, and ASGI by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drafters.base import DrafterInfo, DrafterOption
from engine.process.streams import Take
from engine.request.errors import (
    EngineDeadError,
    EngineError,
    QueueFullError,
    RequestError,
    ShuttingDownError,
    UnknownAdapterError,
)
from engine.request.events import FinishInfo, FinishReason, TokenEvent, TokenLogprobs
from engine.request.info import AdapterInfo, EngineInfo
from engine.request.params import GenerationRequest, Tenant
from engine.request.stats import GammaChange, RequestStats, StepStats
from server.reply.byte_level import byte_level_alphabet

BOS, EOS, USER, ASSISTANT = 256, 257, 258, 259
VOCAB_SIZE = 270
CHAT_TEMPLATE = (
    # How models that write <tool_call> are told of functions, of their calls and of what came of them.
    "{% for tool in tools or [] %}<tools>{{ tool | tojson }}</tools>{% endfor %}"
    "{% for message in messages %}<|user|>{{ message['role'] }}: {{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{{ '\n' }}{% endfor %}{% if shout %}LOUD {% endif %}"
    "{% if reasoning_effort %}effort {{ reasoning_effort }} {% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKING = CHAT_TEMPLATE + "{% if false %}</think>{% endif %}"
"""The template of a model that may reason, as it seems."""


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Every byte a token (its own id), then four special tokens."""
    return _byte_level([], chat_template)


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """The byte tokenizer with some longer tokens, parts of characters among them."""
    return _byte_level(
        [b"he", b"ll", b" w", b"\xe2\x82", b"\x9f\x98", b"\xacx", b"st", b"op"], None
    )


def _byte_level(merged: Sequence[bytes], chat_template: str | None) -> PreTrainedTokenizerFast:
    """``merged``: pairs of bytes that are a token, too."""
    vocabulary = dict(byte_level_alphabet())
    alphabet = {byte: char for char, byte in vocabulary.items()}
    merges = [(alphabet[left], alphabet[right]) for left, right in merged]
    vocabulary |= {left + right: 256 + at for at, (left, right) in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    special: Any = [AddedToken(each, special=True) for each in ("<|user|>", "<|assistant|>")]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = chat_template
    return tokenizer


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Like Llama 2's: word marks, bytes as fallback, and a decoder that strips the first space."""
    words = ["\u2581", "\u2581hello", "\u2581world", "lo", "a", "b", ".", "\u00e9"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {word: 256 + rank for rank, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def engine_info(**changes: Any) -> EngineInfo:
    heat, match = (
        DrafterOption("heat", 1.0, "heat"),
        DrafterOption("max_match", 4, "longest match", 1, 16),
    )
    fill, decay = DrafterOption("fill", True, "fill up"), DrafterOption("decay", 0.5, "old", 0, 1)
    drafters = (
        DrafterInfo("none", "plain decoding", False),
        DrafterInfo("ngram", "prompt lookup", False, (match,)),
        DrafterInfo("nasd", "counted n-grams", True, (fill, decay)),
        DrafterInfo("prediction", "Predicted.", drafts_trees=True, takes_prediction=True),
        DrafterInfo("sampler", "Draws.", True, (heat,), samples=True),
    )
    values: dict[str, Any] = {
        "model": "test/scripted",
        "vocab_size": VOCAB_SIZE,
        "max_model_len": 512,
        "max_num_nodes": 32,
        "eos_token_ids": (EOS,),
        "drafters": {each.name: each for each in drafters},
        "device": "cpu",
        "dtype": "float32",
        "num_blocks": 100,
        "block_size": 16,
        "max_num_open": 1000,
        "num_parameters": 7,
        "determinism": "exact",
        "attention_backend": "paged",
        "exact_verified": True,
    }
    return EngineInfo(**(values | changes))


def logprobs_of(token_id: int, num_top: int, named: Sequence[int] = ()) -> TokenLogprobs:
    """Made-up but recognisable: a token's is by its distance from the chosen one, and the
    alternatives are the ids after that."""
    top = tuple(((token_id + rank) % VOCAB_SIZE, -0.5 - rank) for rank in range(num_top))
    told = tuple((each, -0.5 - (each - token_id) % VOCAB_SIZE) for each in named)
    return TokenLogprobs(token_id, -0.5, top, told)


def scripted_embedding(request: GenerationRequest) -> bytes:
    """Made-up but recognisable: two numbers, the second of which is the prompt's first token."""
    return struct.pack("<2f", 0.5, request.prompt_token_ids[0])


def prompt_text(request: GenerationRequest, special: str = "") -> str:
    """The text of a request's prompt, with ``special`` for each special token."""
    parts = (bytes([each]) if each < 256 else special.encode() for each in request.prompt_token_ids)
    return b"".join(parts).decode()


def refuse_impossible_grammars(request: GenerationRequest) -> None:
    """Raises RequestError as an engine does, for those that do not compile."""
    for field, grammar in request.sampling.grammar_fields:
        import llguidance  # loaded with the first grammar

        if fault := llguidance.LLMatcher.validate_grammar(grammar, None):
            raise RequestError(field, f"{field} cannot be used: {fault}")


class ScriptedEngine:
    """Writes ``script(request)`` in steps of ``group_sizes`` tokens, all but a step's last drafted,
    and one draft in each step refused.

    Ends like the engine: at EOS, at a stop id, at ``max_tokens``, when the drain time is over. ``gate``
    holds back every event while it is clear; ``break_after`` raises ``error`` after so many events;
    ``capacity`` bounds open requests.
    """

    def __init__(
        self,
        text: str | bytes = "hello world",
        *,
        script: Callable[[GenerationRequest], Sequence[int]] | None = None,
        group_sizes: Sequence[int] = (1, 3, 2),
        info: EngineInfo | None = None,
    ) -> None:
        data = text.encode() if isinstance(text, str) else text
        self._script = script or (lambda _: [*data, EOS])
        self._group_sizes = tuple(group_sizes)
        self.info = info or engine_info()
        self.is_alive = False
        self.stalled_seconds = 0.0
        self.gate = asyncio.Event()
        self.gate.set()
        self.capacity = 1000
        self.break_after: int | None = None
        self.error: EngineError = EngineDeadError("the engine died")
        self.requests: list[GenerationRequest] = []
        self.open: set[str] = set()
        self.closed_early: list[str] = []
        self.charged: list[str] = []
        self.aborted: set[str] = set()
        self.num_events = 0
        self.stopping = False
        self.stopped_with: float | None = None
        self._listeners: list[Callable[[StepStats], None]] = []
        self._adapter_listeners: list[Callable[[tuple[AdapterInfo, ...]], None]] = []
        self._idle_listeners: list[Callable[[], None]] = []
        self.refused_adapter: EngineError | None = None

    @property
    def num_open(self) -> int:
        return len(self.open)

    async def start(self) -> None:
        self.is_alive = True

    async def stop(self, drain_seconds: float = 0.0) -> None:
        self.stopping = True
        self.stopped_with = drain_seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_seconds):
                while self.open:
                    await asyncio.sleep(0.001)
        self.aborted |= self.open
        self.gate.set()
        self.is_alive = False

    def add_step_listener(self, callback: Callable[[StepStats], None]) -> None:
        self._listeners.append(callback)

    def add_idle_listener(self, callback: Callable[[], None]) -> None:
        self._idle_listeners.append(callback)

    def add_adapter_listener(self, callback: Callable[[tuple[AdapterInfo, ...]], None]) -> None:
        self._adapter_listeners.append(callback)

    async def load_adapter(self, name: str, path: str, may_replace: bool = False) -> AdapterInfo:
        del may_replace
        if self.refused_adapter is not None:
            raise self.refused_adapter
        found = AdapterInfo(name, path, "0f" * 32, 8, 14, 4096, 16384, "base/model")
        self._adopt({each.name: each for each in self.info.adapters or ()} | {name: found})
        return found

    async def unload_adapter(self, name: str) -> AdapterInfo:
        left = {each.name: each for each in self.info.adapters or ()}
        found = left.pop(name, None)
        if found is None:
            raise UnknownAdapterError(name)
        self._adopt(left)
        return found

    def _adopt(self, adapters: dict[str, AdapterInfo]) -> None:
        self.info = replace(self.info, adapters=tuple(adapters.values()))
        for listener in self._adapter_listeners:
            listener(tuple(adapters.values()))

    async def charge(self, tenant: Tenant) -> None:
        self.charged.append(tenant.name)

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)

    def emit(self, stats: StepStats) -> None:
        for listener in self._listeners:
            listener(stats)

    async def stream(self, request: GenerationRequest, take: Take) -> None:
        async with contextlib.aclosing(self.generate(request)) as events:
            async for event in events:
                if (wait := take(event)) is not None:
                    await wait

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        if self.stopping:
            raise ShuttingDownError("the server is shutting down")
        if not self.is_alive:
            raise EngineDeadError("the engine died")
        if len(self.open) >= self.capacity:
            raise QueueFullError(2.5)
        refuse_impossible_grammars(request)
        self.requests.append(request)
        self.open.add(request.request_id)
        finished = False
        try:
            for number, event in enumerate(self._events(request)):
                if self.break_after is not None and number >= self.break_after:
                    raise self.error
                await self.gate.wait()
                await asyncio.sleep(0)
                if request.request_id in self.aborted and event.finish is None:
                    event = self._event(request, [], event_index=number, end="abort")
                finished = event.finish is not None
                self.num_events += 1
                yield event
                if finished:
                    return
        finally:
            self.open.discard(request.request_id)
            if not finished:
                self.closed_early.append(request.request_id)
            if not self.open:
                for listener in self._idle_listeners:
                    listener()

    def _events(self, request: GenerationRequest) -> list[TokenEvent]:
        token_ids, reason, stop_id = self._run(request)
        events, position, index = [], 0, 0
        while True:
            size = self._group_sizes[index % len(self._group_sizes)]
            group = token_ids[position : position + size]
            position += len(group)
            last = position >= len(token_ids)
            events.append(
                self._event(
                    request, group, event_index=index, end=reason if last else None, stop_id=stop_id
                )
            )
            index += 1
            if last:
                return events

    def _run(self, request: GenerationRequest) -> tuple[list[int], FinishReason, int | None]:
        if request.pooling != "none":
            return [], "stop", None
        sampling = request.sampling
        written: list[int] = []
        for token_id in self._script(request):
            is_eos = token_id in self.info.eos_token_ids and not sampling.ignore_eos
            if is_eos or token_id in sampling.stop_token_ids:
                return written, "stop", token_id
            written.append(token_id)
            if len(written) == sampling.max_tokens:
                return written, "length", None
        return written, "stop", EOS

    def _event(
        self,
        request: GenerationRequest,
        token_ids: Sequence[int],
        *,
        event_index: int,
        end: FinishReason | None,
        stop_id: int | None = None,
    ) -> TokenEvent:
        sampling = request.sampling
        logprobs = prompt_logprobs = None
        if sampling.logprobs is not None:
            named = sampling.logprob_token_ids
            logprobs = tuple(logprobs_of(each, sampling.logprobs, named) for each in token_ids)
        if sampling.prompt_logprobs is not None and event_index == 0:
            rest = request.prompt_token_ids[1:]
            number = sampling.prompt_logprobs
            named = sampling.logprob_token_ids
            prompt_logprobs = (None, *(logprobs_of(each, number, named) for each in rest))
        return TokenEvent(
            request.request_id,
            tuple(token_ids),
            tuple(index < len(token_ids) - 1 for index in range(len(token_ids))),
            logprobs,
            prompt_logprobs,
            None if end is None else self._finish(request, end, stop_id),
            max(1, len(token_ids)),
            draft_seconds=0.001 * event_index,
            verify_seconds=0.01,
        )

    def _finish(
        self, request: GenerationRequest, reason: FinishReason, stop_id: int | None
    ) -> FinishInfo:
        return FinishInfo(
            reason=reason,
            stop_token_id=stop_id,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=3 + 10 * request.sampling.choice_index,
            num_output_tokens=11,
            speculative=RequestStats(
                drafter=request.speculative.draft_strategy,
                gammas=Counter({4: 1, 3: 1, 2: 1, 1: 1}),
                accepted=Counter({0: 1, 2: 2, 3: 1}),
                num_emitted_tokens=11,
                draft_seconds=0.001,
                verify_seconds=0.009,
                step_seconds=1.0,
                baseline_seconds=2.0 + request.sampling.choice_index,
                gamma_changes=deque(
                    [GammaChange(0, 4, "start"), GammaChange(2, 3, "low acceptance")]
                ),
            ),
            arrival_time=request.arrival_time,
            queue_seconds=0.01,
            time_to_first_token_seconds=0.02,
            e2e_seconds=0.12,
            embedding=None if request.pooling == "none" else scripted_embedding(request),
        )


class AsgiCall:
    """One request driven by hand: read events as they are sent, hang up at will."""

    def __init__(self, app: Any, path: str, body: dict[str, Any]) -> None:
        self._app = app
        self._path = path
        self._body = json.dumps(body).encode()
        self._hung_up = asyncio.Event()
        self._body_sent = False
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AsgiCall:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json"), (b"host", b"test")],
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
        }
        self._task = asyncio.ensure_future(self._app(scope, self._receive, self.messages.put))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _receive(self) -> dict[str, Any]:
        if not self._body_sent:
            self._body_sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._hung_up.wait()
        return {"type": "http.disconnect"}

    async def hang_up(self) -> None:
        """Disconnect, and wait until the application has given up the request."""
        assert self._task is not None
        self._hung_up.set()
        await asyncio.wait_for(asyncio.shield(self._task), 300)
