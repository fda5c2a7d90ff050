"""vLLM's names for figures that ``server.metrics.prometheus`` has: benchmarks, dashboards
and schedulers read these.

An alias counts nothing. It is worked out of our own series when ``/metrics`` is read, so a step
pays nothing for it, and the two cannot disagree. What vLLM has and we have no figure of (times between
tokens as the engine sees them, caches of images, lives of blocks) has no alias: a zero would be a lie.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

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


_Read = Callable[[_Figures], Iterable[tuple[Sequence[str], float]]]
"""Gives an alias's series: the values of its labels, and the figure."""


@dataclass(frozen=True)
class _Alias:
    """``labels`` come after the model's name."""

    family: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    text: str
    read: _Read
    labels: tuple[str, ...] = ()

    def metric(self, model_name: str, figures: _Figures) -> Metric:
        labels = ["model_name", *self.labels]
        family = self.family(f"vllm:{self.name}", self.text, labels=labels)
        for values, figure in self.read(figures):
            family.add_metric([model_name, *values], figure)
        return family


@dataclass(frozen=True)
class _Histogram:
    """``source`` under another name."""

    name: str
    text: str
    source: str

    def metric(self, model_name: str, figures: _Figures) -> Metric:
        family = HistogramMetricFamily(f"vllm:{self.name}", self.text, labels=["model_name"])
        buckets = list(figures.by(f"{self.source}_bucket", "le").items())
        family.add_metric([model_name], buckets, figures.total(f"{self.source}_sum"))
        return family


def _total(*names: str) -> _Read:
    """Reads the sum of these series, over all their labels."""
    return lambda figures: [((), sum(figures.total(name) for name in names))]


def _by(name: str, label: str, leave_out: str = "") -> _Read:
    """Reads a series by that label. ``leave_out``: a value of it that vLLM does not know."""
    return lambda figures: [
        ((key,), figure) for key, figure in figures.by(name, label).items() if key != leave_out
    ]


def _num_drafts(figures: _Figures) -> list[tuple[Sequence[str], float]]:
    """Steps of requests that verified any draft: those with a gamma above 0."""
    without = figures.by("spec_gamma_bucket", "le").get("0.0", 0.0)
    return [((), figures.total("spec_gamma_count") - without)]


def _kv_usage(figures: _Figures) -> list[tuple[Sequence[str], float]]:
    """Cached blocks that nobody uses are free, as vLLM counts."""
    blocks = figures.by("kv_blocks", "state")
    held = blocks.get("committed", 0.0) + blocks.get("draft", 0.0)
    return [((), held / figures.total("kv_blocks_total"))]


def _cache_sizes(figures: _Figures) -> list[tuple[Sequence[str], float]]:
    """vLLM's ``info`` is a gauge of 1 whose labels say it."""
    sizes = [f"{figures.total(each):.0f}" for each in ("kv_block_size", "kv_blocks_total")]
    return [(sizes, 1.0)]


_Counter, _Gauge = partial(_Alias, CounterMetricFamily), partial(_Alias, GaugeMetricFamily)

_ALIASES: tuple[_Alias | _Histogram, ...] = (
    _Counter("spec_decode_num_drafts", "Drafts that were verified.", _num_drafts),
    _Counter(
        "spec_decode_num_draft_tokens", "Draft tokens verified.", _total("spec_draft_tokens_total")
    ),
    _Counter("spec_decode_num_accepted_tokens", "Accepted.", _total("spec_accepted_tokens_total")),
    _Counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "Accepted, by depth from 0.",
        _by("spec_accepted_tokens_per_position_total", "position"),
        labels=("position",),
    ),
    _Counter(
        "prompt_tokens",
        "Prompt tokens computed, or found in the prefix cache.",
        _total("prompt_tokens_total", "prefix_cache_hits_total"),
    ),
    _Counter(
        "prompt_tokens_cached", "Prompt tokens found in it.", _total("prefix_cache_hits_total")
    ),
    _Counter("generation_tokens", "Tokens emitted.", _total("generation_tokens_total")),
    _Counter(
        "request_success",
        "Choices by how they ended.",
        _by("requests_total", "finish_reason", leave_out="rejected"),
        labels=("finished_reason",),
    ),
    _Counter("num_preemptions", "Requests preempted.", _total("preemptions_total")),
    _Counter(
        "prefix_cache_queries", "Prompt tokens looked up.", _total("prefix_cache_queries_total")
    ),
    _Counter("prefix_cache_hits", "Prompt tokens found.", _total("prefix_cache_hits_total")),
    _Gauge("num_requests_running", "Requests in the batch.", _total("requests_running")),
    _Gauge("num_requests_waiting", "Requests in the queue.", _total("requests_waiting")),
    _Gauge("kv_cache_usage_perc", "Share of KV blocks that requests hold, 1 for all.", _kv_usage),
    _Gauge(
        "cache_config_info",
        "The size of a KV block in tokens, and how many there are.",
        _cache_sizes,
        labels=("block_size", "num_gpu_blocks"),
    ),
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
    """Returns the aliases of our own ``families``, in a fixed order."""
    figures = _Figures(families)
    return [each.metric(model_name, figures) for each in _ALIASES]
