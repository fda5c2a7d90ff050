"""Prometheus metrics, in a registry of their own: two servers in one process do not mix.

Fed by the engine's ``StepStats`` (once per step) and each request's ``FinishInfo``. No label names
a request; those that name tenants have the names of the file of API keys. Speculation is counted
before stop strings trim: it is work done. docs/metrics.md has useful queries.

Many are shown a second time under vLLM's names, which benchmarks, dashboards and schedulers read. An
alias counts nothing: it is worked out of our own series when ``/metrics`` is read, so a step pays nothing
for it, and the two cannot disagree. What vLLM has and we have no figure of (times between tokens as the
engine sees them, caches of images, lives of blocks) has no alias: a zero would be a lie.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector

from drafters.options import SpeculativeParams
from engine.request.events import FinishInfo
from engine.request.info import AdapterInfo, EngineInfo
from engine.request.stats import SpeculativeStats, StepStats, idle_stats
from server.metrics.drift import AcceptanceDrift

PREFIX = "slipstream_"
_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_GAMMA = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_RATE = tuple(step / 10 for step in range(1, 11))
_SPEEDUP = (0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 1.5, 2, 2.5, 3, 4, 6)
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


# By name, after "slipstream_": what it counts, and its labels.
COUNTERS = {
    "spec_draft_tokens": ("Draft tokens verified.", "drafter"),
    "spec_accepted_tokens": ("Draft tokens accepted.", "drafter"),
    "spec_accepted_tokens_per_position": ("Accepted, by depth from 0.", "drafter", "position"),
    "spec_emitted_tokens": ("Tokens emitted, the target's own included.", "drafter"),
    "spec_steps": ("Decoding steps of requests, those without a draft included.", "drafter"),
    "spec_disabled": ("Proposals of requests cut to nothing.", "drafter", "reason"),
    "spec_draft_seconds": ("Requests' share of drafting.", "drafter"),
    "spec_verify_seconds": ("Requests' share of forward and verify.", "drafter"),
    "spec_draft_failures": ("Drafts lost to an error in the drafter.",),
    "steps": ("Engine steps.",),
    "rows": ("Rows through the target's forward.",),
    "prompt_tokens": ("Prompt tokens computed.",),
    "generation_tokens": ("Tokens emitted.",),
    "step_seconds": ("Time of engine steps.", "part"),
    "baseline_seconds": ("Estimated time of the same tokens at gamma 0.",),
    "decode_seconds": ("Time of the steps that slipstream_baseline_seconds estimates.",),
    "preemptions": ("Requests preempted.",),
    "prefix_cache_queries": ("Prompt tokens looked up.",),
    "prefix_cache_hits": ("Prompt tokens found.",),
    "state_hits": ("Requests that began from a kept state.",),
    "kv_events": ("KV events sent.",),
    "kv_events_dropped": ("KV events lost because too many were waiting to be sent.",),
    "kv_offload_restored_tokens": ("Prompt tokens whose evicted blocks were brought back.",),
    "kv_offload_damaged": ("Kept blocks that were found damaged.",),
    "kv_offload_dropped": ("Evicted blocks that could not be kept.",),
    "requests": ("Choices by how they ended.", "finish_reason"),
    "rejections": ("Requests turned away.", "reason"),
    "tenant_requests": ("Choices of a tenant by how they ended.", "tenant", "finish_reason"),
    "tenant_tokens": ("Tokens of a tenant's choices that were done.", "tenant", "kind"),
    "tenant_rejections": (
        "Choices of a tenant turned away by a limit, and its requests of /tokenize and /detokenize.",
        "tenant",
        "reason",
    ),
    "http_requests": ("Answers.", "method", "path", "status"),
    "connections_cut_off": ("Connections of clients that took too long.", "waiting_for"),
    "speculative_changes": ("Changes of speculative defaults and caps while serving.",),
}
GAUGES = {
    "spec_speedup_ratio": ("Estimated speed-up over gamma 0, last 512 steps.",),
    "draft_agreement": ("Share of a draft's tokens that were the target's at start.", "drafter"),
    "drafter_acceptance_recent": (
        "Share of first drafts accepted, over about 2,000 draft tokens.",
        "drafter",
    ),
    "drafter_acceptance_past": (
        "The same over 200,000 draft tokens or a day of work, whichever is more.",
        "drafter",
    ),
    "requests_running": ("Requests in the batch.",),
    "requests_waiting": ("Requests in the queue.",),
    "kv_blocks": ("KV blocks by state.", "state"),
    "state_slots": ("Slots for states of layers by what they hold.", "state"),
    "kv_offload_blocks": ("Blocks that are kept outside of the KV store.",),
    "kv_offload_bytes": ("Bytes of these.",),
    "kv_blocks_total": ("KV blocks in the pool.",),
    "kv_block_size": ("Tokens in a KV block.",),
    "lora_adapters": ("Adapters that are loaded.",),
    "engine_up": ("1 while the engine lives.",),
    "draining": ("1 while open requests finish and no new ones are taken.",),
    "gpu_memory_bytes": ("Device memory.", "kind"),
}
# Only of models whose layers keep a state.
_OF_STATES = {"state_hits", "state_slots"}
# Buckets, what it shows, labels.
_HISTOGRAMS: dict[str, tuple[Sequence[float], str, tuple[str, ...]]] = {
    "spec_request_acceptance_rate": (
        _RATE,
        "Accepted over verified draft tokens, per request.",
        ("drafter",),
    ),
    "spec_request_speedup": (
        _SPEEDUP,
        "Estimated speed-up over gamma 0, per request.",
        ("drafter",),
    ),
    "time_to_first_token_seconds": (_LATENCY, "From arrival to the first token.", ()),
    "time_per_output_token_seconds": (_PER_TOKEN, "Per request: mean after the first token.", ()),
    "e2e_seconds": (_LATENCY, "From arrival to the last token.", ()),
    "queue_seconds": (_LATENCY, "From arrival into the batch.", ()),
    "request_inference_seconds": (_LATENCY, "From the batch to the last token.", ()),
    "request_prefill_seconds": (_LATENCY, "From the batch to the first token.", ()),
    "request_decode_seconds": (_LATENCY, "From the first token to the last.", ()),
    "request_prompt_tokens": (_TOKENS, "Prompt tokens per choice.", ()),
    "request_generation_tokens": (_TOKENS, "Tokens returned per choice.", ()),
}
# A rate sees a first event only if the series was there before it; alerts watch these.
_SHOWN_AS_ZERO = {
    "requests": ("stop", "length", "abort", "error", "deadline", "rejected"),
    "rejections": ("queue_full",),
    "connections_cut_off": ("read", "write"),
}
# vLLM's names, after "vllm:", of what is the same there but for our labels.
_SAME_IN_VLLM = {
    "spec_decode_num_draft_tokens": "spec_draft_tokens",
    "spec_decode_num_accepted_tokens": "spec_accepted_tokens",
    "generation_tokens": "generation_tokens",
    "num_preemptions": "preemptions",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "num_requests_running": "requests_running",
    "num_requests_waiting": "requests_waiting",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "request_time_per_output_token_seconds": "time_per_output_token_seconds",
    "e2e_request_latency_seconds": "e2e_seconds",
    "request_queue_time_seconds": "queue_seconds",
    "request_inference_time_seconds": "request_inference_seconds",
    "request_prefill_time_seconds": "request_prefill_seconds",
    "request_decode_time_seconds": "request_decode_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generation_tokens",
}


_COUNTER, _GAUGE = CounterMetricFamily, GaugeMetricFamily
_Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]
_Series = dict[tuple[str, ...], float]
"""Figures by the values of an alias's labels beside the model's name."""


class _Aliases:
    """Our own series as they stand, as vLLM's for this model."""

    def __init__(self, families: Iterable[Metric], model_name: str) -> None:
        self._model_name = model_name
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for family in families:
            for each in family.samples:
                self._samples[each.name].append((each.labels, each.value))

    def same(self, alias: str, name: str) -> Metric:
        """Returns a family of ours under another name, summed over its labels."""
        if name in COUNTERS:
            return self._add(_COUNTER, alias, COUNTERS[name][0], {(): self._total(f"{name}_total")})
        if name in GAUGES:
            return self._add(_GAUGE, alias, GAUGES[name][0], {(): self._total(name)})
        text = _HISTOGRAMS[name][1]
        found = HistogramMetricFamily(f"vllm:{alias}", text, labels=["model_name"])
        buckets = list(self._by(f"{name}_bucket", "le").items())
        found.add_metric([self._model_name], buckets, self._total(f"{name}_sum"))
        return found

    def made(self) -> Iterator[Metric]:
        """Yields what is more than another name."""
        gammas, hits = self._by("spec_gamma_bucket", "le"), self._total("prefix_cache_hits_total")
        # A draft is a request's step with a gamma above 0.
        drafts = self._total("spec_gamma_count") - gammas.get("0.0", 0.0)
        yield self._add(
            _COUNTER,
            "spec_decode_num_drafts",
            "Drafts that were verified.",
            {(): drafts},
        )
        yield self._add(
            _COUNTER,
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted, by depth from 0.",
            _keyed(self._by("spec_accepted_tokens_per_position_total", "position")),
            "position",
        )
        computed = self._total("prompt_tokens_total")
        text = "Prompt tokens computed, or found in the prefix cache."
        yield self._add(_COUNTER, "prompt_tokens", text, {(): computed + hits})
        yield self._add(_COUNTER, "prompt_tokens_cached", "Prompt tokens found in it.", {(): hits})
        ends = self._by("requests_total", "finish_reason")
        ends.pop("rejected", None)  # which vLLM does not know
        text = "Choices by how they ended."
        yield self._add(_COUNTER, "request_success", text, _keyed(ends), "finished_reason")
        # Cached blocks that nobody uses are free, as vLLM counts.
        blocks, num_blocks = self._by("kv_blocks", "state"), self._total("kv_blocks_total")
        held = blocks.get("committed", 0.0) + blocks.get("draft", 0.0)
        text = "Share of KV blocks that requests hold, 1 for all."
        yield self._add(_GAUGE, "kv_cache_usage_perc", text, {(): held / num_blocks})
        # vLLM's ``info`` is a gauge of 1 whose labels say it.
        sizes = (f"{self._total('kv_block_size'):.0f}", f"{num_blocks:.0f}")
        text = "The size of a KV block in tokens, and how many there are."
        yield self._add(
            _GAUGE,
            "cache_config_info",
            text,
            {sizes: 1.0},
            "block_size",
            "num_gpu_blocks",
        )

    def _add(self, kind: _Kind, name: str, text: str, series: _Series, *labels: str) -> Metric:
        found = kind(f"vllm:{name}", text, labels=["model_name", *labels])
        for values, figure in series.items():
            found.add_metric([self._model_name, *values], figure)
        return found

    def _by(self, name: str, label: str) -> dict[str, float]:
        """The series ``slipstream_NAME``, by that label's values, summed over other labels."""
        found: dict[str, float] = defaultdict(float)
        for labels, value in self._samples[f"{PREFIX}{name}"]:
            found[labels[label]] += value
        return found

    def _total(self, name: str) -> float:
        """The same, summed over all labels."""
        return sum(value for _, value in self._samples[f"{PREFIX}{name}"])


def _keyed(figures: dict[str, float]) -> _Series:
    return {(value,): figure for value, figure in figures.items()}


def aliases(families: Iterable[Metric], model_name: str) -> list[Metric]:
    """Returns the aliases of our own ``families``, in a fixed order."""
    found = _Aliases(families, model_name)
    return [*(found.same(*each) for each in _SAME_IN_VLLM.items()), *found.made()]


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
                if name in _OF_STATES and info.states is None:
                    continue
                self._metrics[name] = kind(f"{PREFIX}{name}", text, labels, registry=self.registry)
        for name, (buckets, text, names) in _HISTOGRAMS.items():
            self._metrics[name] = Histogram(
                f"{PREFIX}{name}", text, names, registry=self.registry, buckets=buckets
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
        for name, values in _SHOWN_AS_ZERO.items():
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
