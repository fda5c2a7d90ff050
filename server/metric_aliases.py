"""vLLM's names for figures that ``server.metrics`` has: benchmarks, dashboards and schedulers read these.

An alias counts nothing. It is worked out of our own series when ``/metrics`` is read, so a step
pays nothing for it, and the two cannot disagree. What vLLM has and we have no figure of (times between
tokens as the engine sees them, caches of images, lives of blocks) has no alias: a zero would be a lie.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector


class _Figures:
    """Our own series as they stand."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for family in families:
            for each in family.samples:
                self._samples[each.name].append((each.labels, each.value))

    def by(self, name: str, label: str) -> dict[str, float]:
        """The series ``slipstream_NAME``, by that label's values, summed over other labels."""
        found: dict[str, float] = defaultdict(float)
        for labels, value in self._samples[f"slipstream_{name}"]:
            found[labels[label]] += value
        return found

    def total(self, name: str) -> float:
        """The same, summed over all labels."""
        return sum(value for _, value in self._samples[f"slipstream_{name}"])


@dataclass(frozen=True)
class _Sum:
    """Of the counters ``sources`` (names without prefix and ``_total``), by ``label`` if there is one,
    which vLLM calls ``shown_as``. ``leave_out``: a value of it that vLLM does not know."""

    name: str
    text: str
    sources: tuple[str, ...]
    label: str = ""
    shown_as: str = ""
    leave_out: str = ""

    def family(self, model_name: str, figures: _Figures) -> Metric:
        shown = [self.shown_as or self.label] if self.label else []
        family = CounterMetricFamily(f"vllm:{self.name}", self.text, labels=["model_name", *shown])
        names = [f"{source}_total" for source in self.sources]
        if not self.label:
            family.add_metric([model_name], sum(figures.total(name) for name in names))
            return family
        for name in names:
            for key, value in figures.by(name, self.label).items():
                if key != self.leave_out:
                    family.add_metric([model_name, key], value)
        return family


@dataclass(frozen=True)
class _Drafts:
    """Steps of requests that verified any draft: those with a gamma above 0."""

    name: str = "spec_decode_num_drafts"
    text: str = "Drafts that were verified."

    def family(self, model_name: str, figures: _Figures) -> Metric:
        family = CounterMetricFamily(f"vllm:{self.name}", self.text, labels=["model_name"])
        without = figures.by("spec_gamma_bucket", "le").get("0.0", 0.0)
        family.add_metric([model_name], figures.total("spec_gamma_count") - without)
        return family


@dataclass(frozen=True)
class _Gauge:
    name: str
    text: str
    source: str

    def family(self, model_name: str, figures: _Figures) -> Metric:
        family = GaugeMetricFamily(f"vllm:{self.name}", self.text, labels=["model_name"])
        family.add_metric([model_name], figures.total(self.source))
        return family


@dataclass(frozen=True)
class _KvUsage:
    """Cached blocks that nobody uses are free, as vLLM counts."""

    name: str = "kv_cache_usage_perc"
    text: str = "Share of KV blocks that requests hold, 1 for all."

    def family(self, model_name: str, figures: _Figures) -> Metric:
        family = GaugeMetricFamily(f"vllm:{self.name}", self.text, labels=["model_name"])
        blocks = figures.by("kv_blocks", "state")
        held = blocks.get("committed", 0.0) + blocks.get("draft", 0.0)
        family.add_metric([model_name], held / figures.total("kv_blocks_total"))
        return family


@dataclass(frozen=True)
class _Histogram:
    name: str
    text: str
    source: str

    def family(self, model_name: str, figures: _Figures) -> Metric:
        family = HistogramMetricFamily(f"vllm:{self.name}", self.text, labels=["model_name"])
        buckets = list(figures.by(f"{self.source}_bucket", "le").items())
        family.add_metric([model_name], buckets, figures.total(f"{self.source}_sum"))
        return family


@dataclass(frozen=True)
class _CacheConfig:
    """vLLM's ``info`` is a gauge of 1 whose labels say it."""

    name: str = "cache_config_info"
    text: str = "The size of a KV block in tokens, and how many there are."

    def family(self, model_name: str, figures: _Figures) -> Metric:
        labels = ["model_name", "block_size", "num_gpu_blocks"]
        family = GaugeMetricFamily(f"vllm:{self.name}", self.text, labels=labels)
        sizes = [f"{figures.total(each):.0f}" for each in ("kv_block_size", "kv_blocks_total")]
        family.add_metric([model_name, *sizes], 1)
        return family


_Alias = _Sum | _Drafts | _Gauge | _KvUsage | _CacheConfig | _Histogram

_ALIASES: tuple[_Alias, ...] = (
    _Drafts(),
    _Sum("spec_decode_num_draft_tokens", "Draft tokens verified.", ("spec_draft_tokens",)),
    _Sum("spec_decode_num_accepted_tokens", "Accepted.", ("spec_accepted_tokens",)),
    _Sum(
        "spec_decode_num_accepted_tokens_per_pos",
        "Accepted, by depth from 0.",
        ("spec_accepted_tokens_per_position",),
        label="position",
    ),
    _Sum(
        "prompt_tokens",
        "Prompt tokens computed, or found in the prefix cache.",
        ("prompt_tokens", "prefix_cache_hits"),
    ),
    _Sum("prompt_tokens_cached", "Prompt tokens found in it.", ("prefix_cache_hits",)),
    _Sum("generation_tokens", "Tokens emitted.", ("generation_tokens",)),
    _Sum(
        "request_success",
        "Choices by how they ended.",
        ("requests",),
        label="finish_reason",
        shown_as="finished_reason",
        leave_out="rejected",
    ),
    _Sum("num_preemptions", "Requests preempted.", ("preemptions",)),
    _Sum("prefix_cache_queries", "Prompt tokens looked up.", ("prefix_cache_queries",)),
    _Sum("prefix_cache_hits", "Prompt tokens found.", ("prefix_cache_hits",)),
    _Gauge("num_requests_running", "Requests in the batch.", "requests_running"),
    _Gauge("num_requests_waiting", "Requests in the queue.", "requests_waiting"),
    _KvUsage(),
    _CacheConfig(),
    _Histogram(
        "time_to_first_token_seconds",
        "From arrival to the first token.",
        "time_to_first_token_seconds",
    ),
    _Histogram(
        "request_time_per_output_token_seconds",
        "Per request: mean after the first token.",
        "time_per_output_token_seconds",
    ),
    _Histogram("e2e_request_latency_seconds", "From arrival to the last token.", "e2e_seconds"),
    _Histogram("request_queue_time_seconds", "From arrival into the batch.", "queue_seconds"),
    _Histogram(
        "request_inference_time_seconds",
        "From the batch to the last token.",
        "request_inference_seconds",
    ),
    _Histogram(
        "request_prefill_time_seconds",
        "From the batch to the first token.",
        "request_prefill_seconds",
    ),
    _Histogram(
        "request_decode_time_seconds",
        "From the first token to the last.",
        "request_decode_seconds",
    ),
    _Histogram("request_prompt_tokens", "Prompt tokens per choice.", "request_prompt_tokens"),
    _Histogram(
        "request_generation_tokens", "Tokens returned per choice.", "request_generation_tokens"
    ),
)


class WithVllmNames(Collector):
    """All that ``own`` collects, and the same figures under vLLM's names, labelled with the model's."""

    def __init__(self, own: Collector, model_name: str) -> None:
        self._own = own
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        families = list(self._own.collect())
        yield from families
        yield from aliases(families, self._model_name)


def aliases(families: Iterable[Metric], model_name: str) -> list[Metric]:
    """Of our own ``families``, in a fixed order."""
    figures = _Figures(families)
    return [each.family(model_name, figures) for each in _ALIASES]
