"""An engine core small enough to run thousands of steps a second, and a driver that watches it.

The cost model never looks at a clock, so what is granted depends on the requests alone. The driver
steps the core by hand and checks at every step what has to hold at every step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from drafters.base import Drafter, OptionValue
from drafters.registry import build_drafters
from engine.attention.backend import AttentionNeeds, build_attention
from engine.config import ShedSpeculation
from engine.core import EngineCore, ModelLimits, Runner
from engine.grammar.constraint import Constrain
from engine.kv_events.begin import KvEvents
from engine.model.loader import attach_attention, prepare_model, state_shapes
from engine.model.runner import ModelRunner
from engine.request.events import ErrorEvent, FinishInfo, TokenEvent, TokenLogprobs
from engine.request.params import PLAIN, GenerationRequest, SamplingParams, SpeculativeParams
from engine.request.stats import StepStats
from engine.sampling.state import SamplingState
from engine.schedule.request import Request
from engine.schedule.scheduler import Scheduler
from engine.speculation.cost import CostModel
from engine.speculation.manager import Speculation
from engine.states.build import build_states
from kvpool.block_pool import BlockPool
from kvpool.state_slots import StateSlots
from kvpool.tier import BlockTier
from worlds.sampled_rows import RowGroup, sample_tokens

TINY_VOCAB = 64
MAX_STEPS = 2000


class DictatedCost(CostModel):
    """A cost model that is told what steps cost and never learns otherwise."""

    def __init__(
        self, row_seconds: float = 0.01, drafting: Mapping[str, float] | None = None
    ) -> None:
        super().__init__([(1, 0, 1.0), (64, 0, 1.0 + 63 * row_seconds)])
        self._drafting = dict(drafting or {})

    def observe(
        self,
        num_rows: int,
        num_kv_tokens: int,
        num_requests: int,
        seconds: float,
        has_drafts: bool = False,
    ) -> None:
        assert not has_drafts or num_rows > 1
        assert num_rows >= num_requests > 0
        assert num_kv_tokens >= 0
        assert seconds >= 0

    def observe_overhead(self, seconds: float, is_hidden: bool = False) -> None:
        assert seconds >= 0
        assert not is_hidden or self.waiting_seconds == 0.0

    def observe_draft(self, drafter: str, num_asked: int, seconds: float) -> None:
        assert drafter
        assert num_asked > 0
        assert seconds >= 0

    def draft_seconds(self, drafter: str, num_asked: int) -> float:
        return num_asked * self._drafting.get(drafter, 0.0)


@dataclass(frozen=True)
class Setup:
    """Sizes of an engine; ``eos_token_ids`` empty lets every request run to its length."""

    num_blocks: int = 256
    block_size: int = 4
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 128
    prefill_chunk: int = 64
    prefix_cache: bool = True
    max_num_nodes: int = 64
    max_model_len: int = 256
    eos_token_ids: tuple[int, ...] = ()
    cost: CostModel = field(default_factory=DictatedCost)
    drafters: Mapping[str, Drafter] | None = None
    check_integrity: bool = False
    constrain: Constrain | None = None
    clock: Callable[[], float] = time.perf_counter
    shed: ShedSpeculation = "never"
    shed_queue: int = 1
    kv_events: KvEvents | None = None
    hidden_layers: tuple[int, ...] = ()
    runs_ahead: bool = False
    states: StateSlots | None = None
    tier: Callable[[Any, Mapping[str, Drafter]], BlockTier] | None = None
    """Makes what keeps evicted blocks, of the runner's store and drafters' rows."""

    def but(self, **changes: object) -> Setup:
        return replace(self, **changes)  # type: ignore[arg-type]


def build_core(runner: Runner, vocab_size: int, setup: Setup) -> EngineCore:
    listener = None if setup.kv_events is None else setup.kv_events.announcer
    drafters = build_drafters() if setup.drafters is None else setup.drafters
    tier = None if setup.tier is None else setup.tier(runner, drafters)
    pool = BlockPool(
        setup.num_blocks, setup.block_size, setup.prefix_cache, listener, tier, setup.states
    )
    speculation = Speculation(
        drafters, setup.cost, vocab_size, setup.max_num_nodes, pool, setup.shed, setup.shed_queue
    )
    scheduler = Scheduler(
        pool,
        setup.block_size,
        setup.max_num_seqs,
        setup.max_num_batched_tokens,
        setup.prefill_chunk,
        speculation,
    )
    longest = min(setup.max_model_len, setup.num_blocks * setup.block_size)
    limits = ModelLimits(vocab_size, longest, setup.eos_token_ids, setup.constrain)
    return EngineCore(
        runner,
        pool,
        scheduler,
        speculation,
        setup.cost,
        limits,
        setup.check_integrity,
        setup.clock,
        setup.kv_events,
        setup.hidden_layers,
        setup.runs_ahead,
    )


class TinyTarget:
    """A random two-layer fp32 Llama that likes to count in circles of eight, but is not sure to.

    Its head knows the next number of the circle; what attention adds from the whole text decides
    whether it is said. So drafts from repetition are often right, and never safely.
    ``reference`` is the same model on transformers' own attention. ``make``: another that does.
    """

    def __init__(self, make: Callable[[], PreTrainedModel] | None = None) -> None:
        self._make = make or tiny_llama
        self.reference = self._make()
        self._model = prepare_model(self._make(), torch.device("cpu"))
        self._shapes = attach_attention(self._model)

    def core(self, setup: Setup) -> EngineCore:
        setup = self._with_states(setup)
        return build_core(self._runner(setup), TINY_VOCAB, setup)

    def _with_states(self, setup: Setup) -> Setup:
        """Room for every request's state and few snapshots, where layers keep a state."""
        if not state_shapes(self._model):
            return setup
        num_places = 2 * setup.max_num_batched_tokens + setup.max_num_seqs * setup.max_num_nodes
        sizes = setup.max_num_seqs, 96, num_places, setup.block_size
        return setup.but(states=StateSlots(*sizes, interval=4 * setup.block_size))

    def _runner(self, setup: Setup) -> ModelRunner:
        needs = AttentionNeeds.of(self._model, self._shapes, "fast", setup.block_size)
        attention, slots, states = build_attention(needs, setup.num_blocks), setup.states, None
        if slots is not None:
            sizes = slots.num_slots, slots.num_places
            states = build_states(state_shapes(self._model), *sizes, self._model.device)
        return ModelRunner(self._model, attention, states=states)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """transformers' own, ``[len(token_ids), vocab_size]``."""
        return self.reference(torch.tensor([token_ids])).logits[0]  # type: ignore[no-any-return]

    def recomputed(self, each: GenerationRequest, num_tokens: int) -> list[int]:
        """The request's text by a forward over all of it for every token; nothing stops it."""
        state = SamplingState(each, (), TINY_VOCAB, 256)
        token_ids = list(each.prompt_token_ids)
        for _ in range(num_tokens):
            token_ids += sample_tokens(self.logits(token_ids)[-1:], [RowGroup(state, 0)])
            state.append(token_ids[-1:])
        return token_ids[-num_tokens:]


def circle_prompt(index: int) -> list[int]:
    """24 tokens: numbers counted in a circle with a few others between them, twice."""
    rng = random.Random(index)
    circle, start = 8 * rng.randrange(8), rng.randrange(8)
    phrase = [circle + (start + step) % 8 for step in range(9)]
    phrase += [rng.randrange(TINY_VOCAB) for _ in range(3)]
    return phrase * 2


def tiny_llama() -> PreTrainedModel:
    torch.manual_seed(5)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TINY_VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.15,
        )
    )
    model.requires_grad_(False)
    embeddings = torch.randn(TINY_VOCAB, 32)
    model.model.embed_tokens.weight.copy_(embeddings)
    before = [token_id // 8 * 8 + (token_id - 1) % 8 for token_id in range(TINY_VOCAB)]
    model.lm_head.weight.copy_(0.32 * embeddings[before] + 0.24 * torch.randn(TINY_VOCAB, 32))
    return model


def tiny_hybrid() -> PreTrainedModel:
    """The same whose first layer keeps a state: Qwen3.5's."""
    torch.manual_seed(6)
    sizes = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_attention_heads": 4}
    model = Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            **{"vocab_size": TINY_VOCAB, "hidden_size": 32, "intermediate_size": 48},
            **{"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
            **{"num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": None},
            **sizes | heads,
            initializer_range=0.15,
        )
    )
    model.requires_grad_(False)
    model.model.layers[0].linear_attn.out_proj.weight.mul_(2.8)
    source = tiny_llama()
    model.model.embed_tokens.weight.copy_(source.model.embed_tokens.weight)
    model.lm_head.weight.copy_(source.lm_head.weight)
    return model


def request(
    request_id: str,
    prompt: Sequence[int],
    sampling: SamplingParams | None = None,
    drafting: SpeculativeParams = PLAIN,
    *,
    priority: int = 0,
    cache_salt: str = "",
    prediction: Sequence[int] = (),
) -> GenerationRequest:
    return GenerationRequest(
        request_id,
        tuple(prompt),
        sampling or SamplingParams(temperature=0.0),
        drafting,
        priority,
        cache_salt,
        prediction_token_ids=tuple(prediction),
    )


def drafting(
    drafter: str, policy: str = "fixed", num_tokens: int = 8, width: int = 1, **options: OptionValue
) -> SpeculativeParams:
    return SpeculativeParams(
        draft_strategy=drafter,
        adaptive_depth=policy,
        num_speculative_tokens=num_tokens,
        max_speculative_tokens=max(num_tokens, 16),
        tree_strategy="tree",
        tree_width=width,
        tree_depth=16,
        options=options,
    )


class Driver:
    """Steps a core and keeps what it says, by request."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.token_ids: dict[str, list[int]] = {}
        self.drafted: dict[str, list[bool]] = {}
        self.num_draft_tokens: dict[str, int] = {}
        self.draft_seconds: dict[str, float] = {}
        self.verify_seconds: dict[str, float] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[str, list[tuple[TokenLogprobs | None, ...]]] = {}
        self.finishes: dict[str, FinishInfo] = {}
        self.first_step: dict[str, int] = {}
        """The step that brought a request's first event, counted from its submission."""
        self.stats: list[StepStats] = []
        self.num_steps = 0
        self._submitted: dict[str, int] = {}

    def submit(self, *requests: GenerationRequest) -> None:
        for each in requests:
            name = each.request_id
            for found in (self.token_ids, self.drafted, self.logprobs, self.prompt_logprobs):
                found[name] = []  # type: ignore[assignment]
            self.num_draft_tokens[name] = 0
            self.draft_seconds[name] = self.verify_seconds[name] = 0.0
            self._submitted[name] = self.num_steps
            self.core.submit(self.prepared(each))

    def prepared(self, each: GenerationRequest) -> Request:
        return self.core.prepare(each)

    def step(self) -> None:
        result = self.core.step()
        self.num_steps += 1
        self.core.pool.check_integrity()
        if not (self.core.runs_ahead and self.core.has_work):  # else the next step is under way
            assert self.core.pool.counts()["draft"] == 0, "a lease outlived its step"
        if result.stats is not None:
            self.stats.append(result.stats)
        for event in result.events:
            self._take(event)

    def run(self, *requests: GenerationRequest) -> Driver:
        """Submit and step until nothing is left."""
        self.submit(*requests)
        for _ in range(MAX_STEPS):
            if not self.core.has_work:
                return self
            self.step()
        raise AssertionError(f"still busy after {MAX_STEPS} steps")

    def _take(self, event: TokenEvent | ErrorEvent) -> None:
        assert isinstance(event, TokenEvent), event
        name = event.request_id
        assert name not in self.finishes, f"{name} speaks after its last event"
        assert len(event.drafted) == len(event.token_ids)
        self.first_step.setdefault(name, self.num_steps - self._submitted[name])
        self.token_ids[name] += event.token_ids
        self.drafted[name] += event.drafted
        self.num_draft_tokens[name] += event.num_draft_tokens
        self.draft_seconds[name] += event.draft_seconds
        self.verify_seconds[name] += event.verify_seconds
        if event.logprobs is not None:
            assert len(event.logprobs) == len(event.token_ids)
            self.logprobs[name] += event.logprobs
        if event.prompt_logprobs is not None:
            self.prompt_logprobs[name].append(event.prompt_logprobs)
        if event.finish is not None:
            self.finishes[name] = event.finish


class ErrorDriver(Driver):
    """Keeps the errors that requests end in, too."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core)
        self.errors: dict[str, Exception] = {}

    def _take(self, event: TokenEvent | ErrorEvent) -> None:
        assert event.request_id not in self.errors, "it speaks after its last event"
        if isinstance(event, TokenEvent):
            super()._take(event)
        else:
            assert event.request_id not in self.finishes
            self.errors[event.request_id] = event.error


def traces_of(core: EngineCore, request_ids: Iterable[str]) -> list[str]:
    """Where the core's objects still name a request: paths to dictionary keys, list and set items.

    Walks whatever this project's classes hold, so a new dictionary by request cannot be forgotten.
    """
    wanted, seen, found = set(request_ids), set[int](), []
    stack: list[tuple[str, object]] = [("core", core)]
    while stack:
        path, thing = stack.pop()
        if isinstance(thing, str):
            if thing in wanted:
                found.append(path)
            continue
        if id(thing) in seen or thing is None or isinstance(thing, int | float | bytes):
            continue
        seen.add(id(thing))
        stack += _parts(path, thing)
    return found


def _parts(path: str, thing: object) -> list[tuple[str, object]]:
    if isinstance(thing, Mapping):
        return [(f"{path} key", key) for key in thing] + [
            (f"{path}[{key!r}]", value) for key, value in thing.items()
        ]
    if isinstance(thing, list | tuple | set | frozenset):
        return [(f"{path}[]", item) for item in thing]
    if type(thing).__module__.split(".")[0] in ("engine", "drafters", "compiled", "kvpool"):
        names = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        names += list(getattr(thing, "__dict__", ()))
        return [(f"{path}.{name}", getattr(thing, name, None)) for name in names]
    return []
