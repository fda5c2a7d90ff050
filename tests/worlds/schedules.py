"""Random schedules: what arrives when, what is aborted when, and on what an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from engine.core import EngineCore
from engine.request.params import GenerationRequest, SamplingParams, SpeculativeParams
from worlds.engine_harness import DictatedCost, Driver, Setup

SETTLING_STEPS = 1500
EOS = 1


@dataclass(frozen=True)
class Arrival:
    request: GenerationRequest
    step: int
    abort_step: int | None = None


@dataclass(frozen=True)
class Schedule:
    setup: Setup
    arrivals: Sequence[Arrival]


@dataclass
class Totals:
    """What all schedules together have to have seen, else they show little."""

    num_accepted: int = 0
    num_rejected: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_aborted: int = 0
    num_gamma_changes: int = 0
    reasons: set[str] = field(default_factory=set)

    def add(self, driver: Driver) -> None:
        for finish in driver.finishes.values():
            account = finish.speculative
            self.num_accepted += account.num_accepted_tokens
            self.num_rejected += account.num_draft_tokens - account.num_accepted_tokens
            self.num_preemptions += finish.num_preemptions
            self.num_cached_tokens += finish.num_cached_tokens
            self.num_aborted += finish.reason == "abort"
            self.num_gamma_changes += account.num_gamma_changes
            self.reasons |= {change.reason for change in account.gamma_changes}


def setups() -> st.SearchStrategy[Setup]:
    return st.builds(
        _setup,
        st.integers(5, 24),
        st.sampled_from([1, 2, 4]),
        st.integers(1, 5),
        st.integers(0, 20),
        st.sampled_from([1, 3, 8, 64]),
        st.booleans(),
        st.sampled_from([2, 64]),
        st.booleans(),
        st.sampled_from([0.001, 0.05, 0.5]),
        st.sampled_from([0.0, 0.0, 2.0]),
    )


def _setup(
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    num_spare_rows: int,
    prefill_chunk: int,
    prefix_cache: bool,
    max_num_nodes: int,
    has_eos: bool,
    row_seconds: float,
    draft_seconds: float,
) -> Setup:
    return Setup(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + num_spare_rows,
        prefill_chunk=prefill_chunk,
        prefix_cache=prefix_cache,
        max_num_nodes=max_num_nodes,
        max_model_len=48,
        eos_token_ids=(EOS,) if has_eos else (),
        cost=DictatedCost(row_seconds, {"nasd": draft_seconds}),
    )


def speculations() -> st.SearchStrategy[SpeculativeParams]:
    return st.builds(
        _speculation,
        st.sampled_from(
            [
                "ngram",
                "nasd",
                "nasd_one_level",
                "nasd_filler",
                "nasd_random",
                "jacobi",
                "lookahead",
                "none",
            ]
        ),
        st.sampled_from(["fixed", "target_rate", "goodput"]),
        st.sampled_from([0, 1, 3, 8]),
        st.integers(0, 2),
        st.sampled_from([1, 3]),
    )


def _speculation(
    drafter: str, policy: str, num_tokens: int, min_tokens: int, width: int
) -> SpeculativeParams:
    name, _, variant = drafter.partition("nasd_")
    options: dict[str, bool | int | float | str] = {}
    if drafter == "ngram":
        options = {"ngram_min": 1}
    elif variant == "filler":
        drafter, options = "nasd", {"filler_top_k": 2}
    elif drafter == "lookahead":
        options = {"window": 2, "ngram": 3, "guesses": 2}  # fits into eight nodes
    elif variant == "random":
        drafter, options = "nasd", {"stop_if_unknown": False}
    return SpeculativeParams(
        draft_strategy=drafter,
        adaptive_depth=policy,  # type: ignore[arg-type]
        num_speculative_tokens=num_tokens,
        min_speculative_tokens=min(min_tokens, num_tokens),
        max_speculative_tokens=max(num_tokens, 6),
        target_acceptance_rate=0.4,
        tree_strategy="tree",
        tree_width=width,
        tree_depth=8,
        options=options,
    )


_USUAL = SamplingParams(temperature=0.0)
_SAMPLINGS = (
    *[_USUAL] * 6,
    replace(_USUAL, prompt_logprobs=0),
    replace(_USUAL, stop_token_ids=(2, 5)),
    replace(_USUAL, ignore_eos=True),
    replace(_USUAL, min_tokens=4, stop_token_ids=(3,)),
    replace(_USUAL, frequency_penalty=0.4, repetition_penalty=1.1),
    replace(_USUAL, temperature=0.8, logprobs=0),
)


def schedules(texts: Sequence[Sequence[int]]) -> st.SearchStrategy[Schedule]:
    """Prompts are beginnings of ``texts``, so that requests share prefixes."""
    arrivals = st.lists(
        st.builds(
            _arrival,
            st.sampled_from(texts),
            st.integers(1, 26),
            st.integers(1, 30),
            st.sampled_from(_SAMPLINGS),
            speculations(),
            st.sampled_from([0, 0, 0, 1, -1]),
            st.sampled_from(["", "", "", "tenant"]),
            st.integers(0, 12),
            st.one_of(st.none(), st.none(), st.integers(0, 12)),
        ),
        min_size=1,
        max_size=8,
    )
    return st.builds(_schedule, setups(), arrivals)


def _arrival(
    text: Sequence[int],
    prompt_len: int,
    max_tokens: int,
    sampling: SamplingParams,
    speculative: SpeculativeParams,
    priority: int,
    cache_salt: str,
    step: int,
    abort_after: int | None,
) -> Arrival:
    request = GenerationRequest(
        "",
        tuple(text[:prompt_len]),
        replace(sampling, max_tokens=max_tokens, seed=prompt_len % 3),
        speculative,
        priority,
        cache_salt,
    )
    return Arrival(request, step, None if abort_after is None else step + abort_after)


def _schedule(setup: Setup, arrivals: Sequence[Arrival]) -> Schedule:
    longest = longest_text(setup)
    named = [
        replace(
            arrival,
            request=replace(
                arrival.request,
                request_id=f"request-{index}",
                prompt_token_ids=arrival.request.prompt_token_ids[: longest - 1],
            ),
        )
        for index, arrival in enumerate(arrivals)
    ]
    return Schedule(setup, named)


def longest_text(setup: Setup) -> int:
    return min(setup.max_model_len, setup.num_blocks * setup.block_size)


def play(core: EngineCore, schedule: Schedule) -> Driver:
    """Run a schedule to its end, looking at what must hold at every step."""
    driver = Driver(core)
    last = max(max(each.step, each.abort_step or 0) for each in schedule.arrivals)
    while core.has_work or driver.num_steps <= last:
        for each in schedule.arrivals:
            if each.step == driver.num_steps:
                driver.submit(each.request)
            if each.abort_step == driver.num_steps:
                core.abort(each.request.request_id)
        driver.step()
        _check_step(driver, schedule.setup)
        assert driver.num_steps < SETTLING_STEPS, "no end in sight"
    _check_end(driver, schedule)
    return driver


def _check_step(driver: Driver, setup: Setup) -> None:
    core = driver.core
    running = core.scheduler.running
    assert len(running) <= setup.max_num_seqs
    if driver.stats:
        assert driver.stats[-1].num_rows <= setup.max_num_batched_tokens
    blocks_of: dict[str, set[int]] = {}
    for request in running:
        blocks = core.pool.block_table(request.request_id)
        blocks_of.setdefault(request.params.cache_salt, set()).update(blocks)
    tenants = list(blocks_of.values())
    assert sum(map(len, tenants)) == len(set().union(*tenants)), "tenants share a block"


def _check_end(driver: Driver, schedule: Schedule) -> None:
    core = driver.core
    assert set(driver.finishes) == {each.request.request_id for each in schedule.arrivals}
    assert not core.scheduler.running
    assert not core.scheduler.waiting
    counts = core.pool.counts()
    assert counts["free"] + counts["cached"] == schedule.setup.num_blocks
