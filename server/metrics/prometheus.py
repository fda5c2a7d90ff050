"""Prometheus metrics, in a registry of their own: two servers in one process do not mix.

Fed by the engine's ``StepStats`` (once per step) and each request's ``FinishInfo``. No label names
a request; those that name tenants have the names of the file of API keys. Speculation is counted before
stop strings trim: it is work done. Useful queries:

    # acceptance rate, and by depth
    rate(slipstream_spec_accepted_tokens_total[5m])
      / rate(slipstream_spec_draft_tokens_total[5m])
    rate(slipstream_spec_accepted_tokens_per_position_total[5m])
      / ignoring(position) group_left rate(slipstream_spec_steps_total[5m])
    # tokens per step; mean gamma
    rate(slipstream_spec_emitted_tokens_total[5m]) / rate(slipstream_spec_steps_total[5m])
    rate(slipstream_spec_gamma_sum[5m]) / rate(slipstream_spec_gamma_count[5m])
    # speed-up over gamma 0
    rate(slipstream_baseline_seconds_total[5m]) / rate(slipstream_decode_seconds_total[5m])
    # share of step time spent drafting
    rate(slipstream_step_seconds_total{part="draft"}[5m])
      / ignoring(part) sum without(part) (rate(slipstream_step_seconds_total[5m]))
    # why drafts were cut to nothing
    sum by (drafter, reason) (rate(slipstream_spec_disabled_total[5m]))
    # 95th percentile of the time to the first token
    histogram_quantile(.95, sum by (le) (rate(slipstream_time_to_first_token_seconds_bucket[5m])))
    # prefix cache hit rate; share of KV blocks in use; requests turned away
    rate(slipstream_prefix_cache_hits_total[5m]) / rate(slipstream_prefix_cache_queries_total[5m])
    1 - slipstream_kv_blocks{state="free"} / ignoring(state) slipstream_kv_blocks_total
    sum by (reason) (rate(slipstream_rejections_total[5m]))

``metric_aliases.py`` shows many of them a second time, under the names that existing tools scrape.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8

from drafters.options import SpeculativeParams
from engine.request.events import FinishInfo
from engine.request.info import EngineInfo
from engine.request.stats import SpeculativeStats, StepStats, idle_stats
from server.metrics.aliases import WithVllmNames

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


class _RecentRatio:
    """Sum over sum of the latest pairs."""

    def __init__(self, num_pairs: int) -> None:
        self._pairs: deque[tuple[float, float]] = deque()
        self._num_pairs = num_pairs
        self._above = self._below = 0.0

    def add(self, above: float, below: float) -> float:
        """The ratio, this pair included; ``below`` > 0."""
        self._pairs.append((above, below))
        self._above += above
        self._below += below
        if len(self._pairs) > self._num_pairs:
            old_above, old_below = self._pairs.popleft()
            self._above -= old_above
            self._below -= old_below
        return self._above / self._below


class _SpeculationFigures:
    """Collectors of speculation, all with a ``drafter`` label but for the times of whole steps."""

    def __init__(self, registry: CollectorRegistry) -> None:
        by_drafter = ["drafter"]

        def counter(name: str, text: str, labels: list[str] = by_drafter) -> Counter:
            return Counter(f"slipstream_spec_{name}", text, labels, registry=registry)

        self.drafted = counter("draft_tokens", "Draft tokens verified.")
        self.accepted = counter("accepted_tokens", "Draft tokens accepted.")
        self.emitted = counter("emitted_tokens", "Tokens emitted, the target's own included.")
        self.accepted_at = counter(
            "accepted_tokens_per_position", "Accepted, by depth from 0.", ["drafter", "position"]
        )
        self.steps = counter("steps", "Decoding steps of requests, those without a draft included.")
        self.disabled = counter(
            "disabled", "Proposals of requests cut to nothing.", ["drafter", "reason"]
        )
        self.draft_seconds = counter("draft_seconds", "Requests' share of drafting.")
        self.verify_seconds = counter("verify_seconds", "Requests' share of forward and verify.")
        self.failures = counter("draft_failures", "Drafts lost to an error in the drafter.", [])
        self.gamma = Histogram(
            "slipstream_spec_gamma",
            "Draft tokens granted per request and step.",
            by_drafter,
            buckets=_GAMMA,
            registry=registry,
        )
        self.acceptance_rate = Histogram(
            "slipstream_spec_request_acceptance_rate",
            "Accepted over verified draft tokens, per request.",
            by_drafter,
            buckets=_RATE,
            registry=registry,
        )
        self.speedup = Histogram(
            "slipstream_spec_request_speedup",
            "Estimated speed-up over gamma 0, per request.",
            by_drafter,
            buckets=_SPEEDUP,
            registry=registry,
        )
        self._of_drafters: dict[str, _DrafterFigures] = {}

    def of(self, drafter: str) -> _DrafterFigures:
        found = self._of_drafters.get(drafter)
        if found is None:
            found = self._of_drafters[drafter] = _DrafterFigures(self, drafter)
        return found


class _DrafterFigures:
    """One drafter's series, looked up once: a step has few microseconds for its metrics."""

    def __init__(self, figures: _SpeculationFigures, drafter: str) -> None:
        self._drafted = figures.drafted.labels(drafter)
        self._accepted = figures.accepted.labels(drafter)
        self._emitted = figures.emitted.labels(drafter)
        self._steps = figures.steps.labels(drafter)
        self._gamma = figures.gamma.labels(drafter)
        self._accepted_at = lru_cache(None)(partial(figures.accepted_at.labels, drafter))
        self._disabled = lru_cache(None)(partial(figures.disabled.labels, drafter))

    def observe(self, stats: SpeculativeStats) -> None:
        self._drafted.inc(stats.num_draft_tokens)
        self._accepted.inc(stats.num_accepted_tokens)
        self._emitted.inc(stats.num_emitted_tokens)
        self._steps.inc(stats.num_steps)
        for position, count in enumerate(stats.accepted_per_position):
            self._accepted_at(position).inc(count)
        for gamma, count in stats.gammas.items():
            for _ in range(count):
                self._gamma.observe(gamma)
        for reason, count in stats.disabled.items():
            self._disabled(reason).inc(count)


class RequestMetrics(Protocol):
    """The metrics as the answering of requests and ``/metrics`` see them: ``Metrics`` itself, or the way
    to it from another process."""

    def observe_request(self, info: FinishInfo, num_tokens: int, tenant: str) -> None: ...

    def count_request(self, outcome: str, tenant: str) -> None: ...

    def count_turned_away(self, reason: str, tenant: str) -> None: ...

    def count_rejection(self, reason: str) -> None: ...

    def count_http(self, method: str, path: str, status: int) -> None: ...

    def count_cut_off(self, waiting_for: str) -> None: ...

    async def expose(self, accept: str) -> tuple[bytes, str]:
        """All figures for a client with this Accept header, and their content type."""


class Metrics:
    """All collectors of one server, in ``registry``; ``/metrics`` prints these, and aliases."""

    def __init__(
        self,
        info: EngineInfo,
        model_name: str,
        is_alive: Callable[[], bool],
        is_draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._speculation = _SpeculationFigures(self.registry)
        self._shown = WithVllmNames(self.registry, model_name)
        self._recent = _RecentRatio(_SPEEDUP_WINDOW_STEPS)
        self._make_serving()
        self._make_requests()
        self._make_static(info, model_name, is_alive, is_draining)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"slipstream_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"slipstream_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"slipstream_{name}", text, buckets=buckets, registry=self.registry)

    def _make_serving(self) -> None:
        self._steps = self._counter("steps", "Engine steps.")
        self._rows = self._counter("rows", "Rows through the target's forward.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens computed.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens emitted.")
        step_seconds = self._counter("step_seconds", "Time of engine steps.", "part")
        self._part_seconds = {
            f"{part}_seconds": step_seconds.labels(part)
            for part in ("draft", "forward", "verify", "other")
        }
        self._baseline_seconds = self._counter(
            "baseline_seconds", "Estimated time of the same tokens at gamma 0."
        )
        self._decode_seconds = self._counter(
            "decode_seconds", "Time of the steps that slipstream_baseline_seconds estimates."
        )
        self._speedup = self._gauge(
            "spec_speedup_ratio", "Estimated speed-up over gamma 0, last 512 steps."
        )
        self._preemptions = self._counter("preemptions", "Requests preempted.")
        self._running = self._gauge("requests_running", "Requests in the batch.")
        self._waiting = self._gauge("requests_waiting", "Requests in the queue.")
        blocks = self._gauge("kv_blocks", "KV blocks by state.", "state")
        self._blocks_in = lru_cache(None)(blocks.labels)
        self._cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up.")
        self._cache_hits = self._counter("prefix_cache_hits", "Prompt tokens found.")
        self._kv_events = self._counter("kv_events", "KV events sent.")
        self._kv_events_dropped = self._counter(
            "kv_events_dropped", "KV events lost because too many were waiting to be sent."
        )

    def _make_requests(self) -> None:
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _LATENCY
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds", "Per request: mean after the first token.", _PER_TOKEN
        )
        self._e2e = self._histogram("e2e_seconds", "From arrival to the last token.", _LATENCY)
        self._queue = self._histogram("queue_seconds", "From arrival into the batch.", _LATENCY)
        self._inference = self._histogram(
            "request_inference_seconds", "From the batch to the last token.", _LATENCY
        )
        self._prefill = self._histogram(
            "request_prefill_seconds", "From the batch to the first token.", _LATENCY
        )
        self._decode = self._histogram(
            "request_decode_seconds", "From the first token to the last.", _LATENCY
        )
        self._request_prompt = self._histogram(
            "request_prompt_tokens", "Prompt tokens per choice.", _TOKENS
        )
        self._request_output = self._histogram(
            "request_generation_tokens", "Tokens returned per choice.", _TOKENS
        )
        self._requests = self._counter("requests", "Choices by how they ended.", "finish_reason")
        self._rejections = self._counter("rejections", "Requests turned away.", "reason")
        # A rate sees a first event only if the series was there before it; alerts watch these.
        for outcome in ("stop", "length", "abort", "error", "deadline", "rejected"):
            self._requests.labels(outcome)
        self._tenant_requests = self._counter(
            "tenant_requests", "Choices of a tenant by how they ended.", "tenant", "finish_reason"
        )
        self._tenant_tokens = self._counter(
            "tenant_tokens", "Tokens of a tenant's choices that were done.", "tenant", "kind"
        )
        self._tenant_rejections = self._counter(
            "tenant_rejections",
            "Choices of a tenant turned away by a limit, and its requests of /tokenize and /detokenize.",
            "tenant",
            "reason",
        )
        self._rejections.labels("queue_full")
        self._http = self._counter("http_requests", "Answers.", "method", "path", "status")
        self._cut_off = self._counter(
            "connections_cut_off", "Connections of clients that took too long.", "waiting_for"
        )
        for waiting_for in ("read", "write"):
            self._cut_off.labels(waiting_for)

    def _make_static(
        self,
        info: EngineInfo,
        model_name: str,
        is_alive: Callable[[], bool],
        is_draining: Callable[[], bool],
    ) -> None:
        up = self._gauge("engine_up", "1 while the engine lives.")
        up.set_function(lambda: float(is_alive()))
        draining = self._gauge(
            "draining", "1 while open requests finish and no new ones are taken."
        )
        draining.set_function(lambda: float(is_draining()))
        self._gauge("kv_blocks_total", "KV blocks in the pool.").set(info.num_blocks)
        self._gauge("kv_block_size", "Tokens in a KV block.").set(info.block_size)
        for state, count in idle_stats(
            info.num_blocks
        ).blocks.items():  # until the first step tells
            self._blocks_in(state).set(count)
        about = Info("slipstream_model", "What is served.", registry=self.registry)
        about.info(
            {
                "model_name": model_name,
                "device": info.device,
                "dtype": info.dtype,
                "determinism": info.determinism,
                "max_model_len": str(info.max_model_len),
                "num_parameters": str(info.num_parameters),
            }
        )
        self._defaults = Info(
            "slipstream_speculative_defaults",
            "Speculation of requests that do not say otherwise.",
            registry=self.registry,
        )
        self.show_speculation(SpeculativeParams())
        self._changes = self._counter(
            "speculative_changes", "Changes of speculative defaults and caps while serving."
        )
        self._device_memory = self._gauge("gpu_memory_bytes", "Device memory.", "kind")

    def show_speculation(self, defaults: SpeculativeParams, is_change: bool = False) -> None:
        """Shows the speculation of requests that say nothing; ``is_change``: changed while serving."""
        self._defaults.info({name: str(getattr(defaults, name)) for name in _SHOWN_DEFAULTS})
        if is_change:
            self._changes.inc()

    async def expose(self, accept: str) -> tuple[bytes, str]:
        return self.exposition(accept)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All figures for a client with this Accept header, and their content type."""
        encode, content_type = choose_encoder(accept)
        # All names are valid as they are. Other ways to escape write "vllm_" for "vllm:" in OpenMetrics.
        return encode(self._shown, escaping=ALLOWUTF8), content_type  # type: ignore[call-arg]

    def observe_step(self, stats: StepStats) -> None:
        """The engine's step listener."""
        # Without rows it was no step, only a last look at the gauges.
        self._steps.inc(stats.num_rows > 0)
        self._rows.inc(stats.num_rows)
        self._prompt_tokens.inc(stats.num_prompt_tokens)
        self._generation_tokens.inc(stats.num_emitted_tokens)
        for part, seconds in self._part_seconds.items():
            seconds.inc(getattr(stats, part))
        self._observe_speedup(stats)
        self._preemptions.inc(stats.num_preemptions)
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        for state, count in stats.blocks.items():
            self._blocks_in(state).set(count)
        for kind, num_bytes in stats.device_memory.items():
            self._device_memory.labels(kind).set(num_bytes)
        self._cache_queries.inc(stats.prefix_cache_queries)
        self._cache_hits.inc(stats.prefix_cache_hits)
        self._kv_events.inc(stats.num_kv_events)
        self._kv_events_dropped.inc(stats.num_kv_events_dropped)
        self._observe_speculation(stats)

    def _observe_speedup(self, stats: StepStats) -> None:
        if stats.baseline_seconds > 0 and stats.step_seconds > 0:
            self._baseline_seconds.inc(stats.baseline_seconds)
            self._decode_seconds.inc(stats.step_seconds)
            self._speedup.set(self._recent.add(stats.baseline_seconds, stats.step_seconds))

    def _observe_speculation(self, stats: StepStats) -> None:
        for drafter, each in stats.by_drafter.items():
            self._speculation.of(drafter).observe(each)
        self._speculation.failures.inc(stats.num_draft_failures)

    def observe_request(self, info: FinishInfo, num_tokens: int, tenant: str) -> None:
        """A choice ended; ``num_tokens`` were returned. ``tenant``: "" where there are none."""
        if tenant:
            self._tenant_tokens.labels(tenant, "prompt").inc(info.num_prompt_tokens)
            self._tenant_tokens.labels(tenant, "written").inc(info.num_output_tokens)
        self._queue.observe(info.queue_seconds)
        self._e2e.observe(info.e2e_seconds)
        self._inference.observe(info.e2e_seconds - info.queue_seconds)
        self._request_prompt.observe(info.num_prompt_tokens)
        self._request_output.observe(num_tokens)
        if info.num_output_tokens > 0:
            first = info.time_to_first_token_seconds
            rest = info.e2e_seconds - first
            self._ttft.observe(first)
            self._prefill.observe(first - info.queue_seconds)
            self._decode.observe(rest)
            if info.num_output_tokens > 1:
                self._per_token.observe(rest / (info.num_output_tokens - 1))
        stats = info.speculative
        if stats.acceptance_rate is not None:
            self._speculation.acceptance_rate.labels(stats.drafter).observe(stats.acceptance_rate)
        if stats.estimated_speedup is not None:
            self._speculation.speedup.labels(stats.drafter).observe(stats.estimated_speedup)
        self._speculation.draft_seconds.labels(stats.drafter).inc(stats.draft_seconds)
        self._speculation.verify_seconds.labels(stats.drafter).inc(stats.verify_seconds)

    def count_request(self, outcome: str, tenant: str) -> None:
        """stop, length, abort (the client left), error, deadline or rejected."""
        self._requests.labels(outcome).inc()
        if tenant:
            self._tenant_requests.labels(tenant, outcome).inc()

    def count_turned_away(self, reason: str, tenant: str) -> None:
        """``reason``: the code of the limit."""
        if tenant:
            self._tenant_rejections.labels(tenant, reason).inc()

    def count_rejection(self, reason: str) -> None:
        """``reason`` is an error code, of which there are few."""
        self._rejections.labels(reason).inc()

    def count_http(self, method: str, path: str, status: int) -> None:
        """``path`` is a route's template, never what a client made up."""
        self._http.labels(method, path, str(status)).inc()

    def count_cut_off(self, waiting_for: str) -> None:
        """A connection was cut off: the client took too long to send ("read") or to read ("write")."""
        self._cut_off.labels(waiting_for).inc()
