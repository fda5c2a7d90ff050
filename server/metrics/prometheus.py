"""Prometheus metrics, in a registry of their own: two servers in one process do not mix.

Fed by the engine's ``StepStats`` (once per step) and each request's ``FinishInfo``. No label names
a request; those that name tenants have the names of the file of API keys. Speculation is counted
before stop strings trim: it is work done. docs/metrics.md has useful queries.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import inf
from typing import Any, Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    Metric,
    ProcessCollector,
)
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector

from drafters.options import SpeculativeParams
from engine.request.events import FinishInfo
from engine.request.info import AdapterInfo, EngineInfo
from engine.request.stats import SpeculativeStats, StepStats, idle_stats
from server.metrics.aliases import aliases
from server.metrics.drift import AcceptanceDrift
from server.metrics.series import COUNTERS, GAUGES, HISTOGRAMS, OF_STATES, PREFIX, SHOWN_AS_ZERO

_GAMMA = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_SPEEDUP_WINDOW_STEPS = 512
_SHOWN_DEFAULTS = (
    "draft_strategy",
    "adaptive_depth",
    "num_speculative_tokens",
    "min_speculative_tokens",
    "max_speculative_tokens",
    "tree_strategy",
    "verification",
)


class _Gammas(Collector):
    """The histogram ``spec_gamma``. The library's own takes values one at a time, and a step brings one
    for each request."""

    def __init__(self) -> None:
        self._counts: dict[str, Counts[int]] = defaultdict(Counts)

    def observe(self, drafter: str, gammas: Mapping[int, int]) -> None:
        """``gammas``: how often each came."""
        counts = self._counts[drafter]
        for gamma, count in gammas.items():
            counts[gamma] += count

    def collect(self) -> Iterator[Metric]:
        text = "Draft tokens granted per request and step."
        found = HistogramMetricFamily(f"{PREFIX}spec_gamma", text, labels=["drafter"])
        for drafter, live in list(self._counts.items()):
            # Of one moment: where several processes speak HTTP, another thread counts meanwhile.
            counts = dict(live)
            buckets = [
                (
                    "+Inf" if bound == inf else f"{bound:.1f}",
                    sum(n for gamma, n in counts.items() if gamma <= bound),
                )
                for bound in (*_GAMMA, inf)
            ]
            total = sum(gamma * count for gamma, count in counts.items())
            found.add_metric([drafter], buckets, total)
        yield found


class AnswerMetrics(Protocol):
    """The metrics as answers and ``/metrics`` see them."""

    def count(self, name: str, *labels: str) -> None: ...

    async def expose(self, accept: str) -> tuple[bytes, str]:
        """All figures for a client with this Accept header, and their content type."""


class RequestMetrics(AnswerMetrics, Protocol):
    """The metrics as the answering of a model's requests sees them, too: ``Metrics`` itself, or the way
    to it from another process."""

    def observe_request(self, info: FinishInfo, num_tokens: int, tenant: str) -> None: ...


class Metrics(Collector):
    """All collectors of one server, in ``registry``. As a collector it shows these, and their aliases."""

    def __init__(
        self,
        info: EngineInfo,
        model_name: str,
        is_alive: Callable[[], bool] = lambda: True,
        is_draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        ProcessCollector(registry=self.registry)
        self._metrics: dict[str, Any] = {}
        for kind, table in ((Counter, COUNTERS), (Gauge, GAUGES)):
            for name, (text, *labels) in table.items():
                if name in OF_STATES and info.states is None:
                    continue
                self._metrics[name] = kind(f"{PREFIX}{name}", text, labels, registry=self.registry)
        for name, (buckets, text, *labels) in HISTOGRAMS.items():
            self._metrics[name] = Histogram(
                f"{PREFIX}{name}", text, labels, registry=self.registry, buckets=buckets
            )
        self._gammas = _Gammas()
        self.registry.register(self._gammas)
        # By labels; a step has few microseconds for its metrics.
        self._series: Callable[..., Any] = lru_cache(None)(self._look_up)
        # Seconds at gamma 0, seconds taken, and steps: of the latest steps, and in all of them.
        self._recent: deque[tuple[float, float, int]] = deque()
        self._baseline = self._taken = 0.0
        self._num_recent = 0
        self._drifts: dict[str, AcceptanceDrift] = {}
        self._metrics["draining"].set_function(lambda: float(is_draining()))
        self._model = Info(f"{PREFIX}model", "What is served.", registry=self.registry)
        self.show_engine(info, is_alive)
        name, text = "speculative_defaults", "Speculation of requests that do not say otherwise."
        self._defaults = Info(f"{PREFIX}{name}", text, registry=self.registry)
        self.show_speculation(SpeculativeParams())
        for name, values in SHOWN_AS_ZERO.items():
            for value in values:
                self._series(name, value)

    def show_engine(self, info: EngineInfo, is_alive: Callable[[], bool]) -> None:
        """Shows the facts of an engine, the first one or a later one of the same model."""
        self._metrics["engine_up"].set_function(lambda: float(is_alive()))
        self._metrics["kv_blocks_total"].set(info.num_blocks)
        self._metrics["kv_block_size"].set(info.block_size)
        # Until the first step tells.
        for state, count in idle_stats(info.num_blocks).blocks.items():
            self._series("kv_blocks", state).set(count)
        if info.states is not None:
            self._series("state_slots", "free").set(info.states.num_slots)
        self.show_adapters(info.adapters or ())
        for drafter, draft in info.drafts.items():
            if draft.agreement is not None:
                self._series("draft_agreement", drafter).set(draft.agreement)
        self._model.info(
            {
                "model_name": self._model_name,
                "device": info.device,
                "dtype": info.dtype,
                "determinism": info.determinism,
                "max_model_len": str(info.max_model_len),
                "num_parameters": str(info.num_parameters),
            }
        )

    def _look_up(self, name: str, *labels: object) -> Any:
        return self._metrics[name].labels(*labels)

    def collect(self) -> Iterator[Metric]:
        families = list(self.registry.collect())
        yield from families
        yield from aliases(families, self._model_name)

    def show_speculation(self, defaults: SpeculativeParams, is_change: bool = False) -> None:
        """Shows the speculation of requests that say nothing; ``is_change``: changed while serving."""
        self._defaults.info({name: str(getattr(defaults, name)) for name in _SHOWN_DEFAULTS})
        if is_change:
            self.count("speculative_changes")

    def show_adapters(self, adapters: Sequence[AdapterInfo]) -> None:
        """Shows those that are loaded."""
        self._metrics["lora_adapters"].set(len(adapters))

    async def expose(self, accept: str) -> tuple[bytes, str]:
        return self.exposition(accept)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All figures for a client with this Accept header, and their content type."""
        return exposition(self, accept)

    def observe_step(self, stats: StepStats) -> None:
        """The engine's step listener, of one step or several as one."""
        own, at = self._metrics, self._series
        # Without rows it was no step, only a last look at the gauges.
        own["steps"].inc(stats.num_steps if stats.num_rows else 0)
        own["rows"].inc(stats.num_rows)
        own["prompt_tokens"].inc(stats.num_prompt_tokens)
        own["generation_tokens"].inc(stats.num_emitted_tokens)
        for part in ("draft", "forward", "verify", "other"):
            at("step_seconds", part).inc(getattr(stats, f"{part}_seconds"))
        if stats.baseline_seconds > 0 and stats.step_seconds > 0:
            self._observe_speedup(stats.baseline_seconds, stats.step_seconds, stats.num_steps)
        own["preemptions"].inc(stats.num_preemptions)
        own["requests_running"].set(stats.num_running)
        own["requests_waiting"].set(stats.num_waiting)
        for state, count in stats.blocks.items():
            at("kv_blocks", state).set(count)
        for kind, num_bytes in stats.device_memory.items():
            at("gpu_memory_bytes", kind).set(num_bytes)
        for state, count in stats.state_slots.items():
            at("state_slots", state).set(count)
        if stats.state_hits:
            own["state_hits"].inc(stats.state_hits)
        own["prefix_cache_queries"].inc(stats.prefix_cache_queries)
        own["prefix_cache_hits"].inc(stats.prefix_cache_hits)
        own["kv_events"].inc(stats.num_kv_events)
        own["kv_events_dropped"].inc(stats.num_kv_events_dropped)
        own["kv_offload_blocks"].set(stats.offload_blocks)
        own["kv_offload_bytes"].set(stats.offload_bytes)
        own["kv_offload_restored_tokens"].inc(stats.offload_restored_tokens)
        own["kv_offload_damaged"].inc(stats.offload_damaged)
        own["kv_offload_dropped"].inc(stats.offload_dropped)
        own["spec_draft_failures"].inc(stats.num_draft_failures)
        for drafter, each in stats.by_drafter.items():
            self._observe_drafter(drafter, each)
            if each.num_drafts:
                self._drift_of(drafter).observe(each, stats.step_seconds)

    def _drift_of(self, drafter: str) -> AcceptanceDrift:
        if drafter not in self._drifts:
            # Read when they are scraped: a step only adds.
            drift = self._drifts[drafter] = AcceptanceDrift()
            self._series("drafter_acceptance_recent", drafter).set_function(drift.recent.rate)
            self._series("drafter_acceptance_past", drafter).set_function(drift.past.rate)
        return self._drifts[drafter]

    def _observe_speedup(self, baseline: float, taken: float, num_steps: int) -> None:
        self._metrics["baseline_seconds"].inc(baseline)
        self._metrics["decode_seconds"].inc(taken)
        self._recent.append((baseline, taken, num_steps))
        self._baseline += baseline
        self._taken += taken
        self._num_recent += num_steps
        while self._num_recent > _SPEEDUP_WINDOW_STEPS and len(self._recent) > 1:
            old_baseline, old_taken, old_steps = self._recent.popleft()
            self._baseline -= old_baseline
            self._taken -= old_taken
            self._num_recent -= old_steps
        self._metrics["spec_speedup_ratio"].set(self._baseline / self._taken)

    def _observe_drafter(self, drafter: str, stats: SpeculativeStats) -> None:
        at = self._series
        at("spec_draft_tokens", drafter).inc(stats.num_draft_tokens)
        at("spec_accepted_tokens", drafter).inc(stats.num_accepted_tokens)
        at("spec_emitted_tokens", drafter).inc(stats.num_emitted_tokens)
        at("spec_steps", drafter).inc(stats.num_steps)
        for position, count in enumerate(stats.accepted_per_position):
            at("spec_accepted_tokens_per_position", drafter, position).inc(count)
        self._gammas.observe(drafter, stats.gammas)
        for reason, count in stats.disabled.items():
            at("spec_disabled", drafter, reason).inc(count)

    def observe_request(self, info: FinishInfo, num_tokens: int, tenant: str) -> None:
        """A choice ended; ``num_tokens`` were returned. ``tenant``: "" where there are none."""
        own, at = self._metrics, self._series
        if tenant:
            at("tenant_tokens", tenant, "prompt").inc(info.num_prompt_tokens)
            at("tenant_tokens", tenant, "written").inc(info.num_output_tokens)
        own["queue_seconds"].observe(info.queue_seconds)
        own["e2e_seconds"].observe(info.e2e_seconds)
        own["request_inference_seconds"].observe(info.e2e_seconds - info.queue_seconds)
        own["request_prompt_tokens"].observe(info.num_prompt_tokens)
        own["request_generation_tokens"].observe(num_tokens)
        if info.num_output_tokens > 0:
            first = info.time_to_first_token_seconds
            rest = info.e2e_seconds - first
            own["time_to_first_token_seconds"].observe(first)
            own["request_prefill_seconds"].observe(first - info.queue_seconds)
            own["request_decode_seconds"].observe(rest)
            if info.num_output_tokens > 1:
                per_token = rest / (info.num_output_tokens - 1)
                own["time_per_output_token_seconds"].observe(per_token)
        stats = info.speculative
        if stats.acceptance_rate is not None:
            at("spec_request_acceptance_rate", stats.drafter).observe(stats.acceptance_rate)
        if stats.estimated_speedup is not None:
            at("spec_request_speedup", stats.drafter).observe(stats.estimated_speedup)
        at("spec_draft_seconds", stats.drafter).inc(stats.draft_seconds)
        at("spec_verify_seconds", stats.drafter).inc(stats.verify_seconds)

    def count(self, name: str, *labels: str) -> None:
        """Adds one to a counter. Its labels have few values: codes of errors, templates of routes, never
        what a client made up."""
        (self._series(name, *labels) if labels else self._metrics[name]).inc()


def exposition(shown: Collector, accept: str) -> tuple[bytes, str]:
    """All figures of a collector for a client with this Accept header, and their content type."""
    encode, content_type = choose_encoder(accept)
    # All names are valid as they are. Other ways to escape write "vllm_" for "vllm:" in OpenMetrics.
    return encode(shown, escaping=ALLOWUTF8), content_type  # type: ignore[call-arg]
