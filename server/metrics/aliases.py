"""Our metrics under vLLM's names, which benchmarks, dashboards and schedulers read.

An alias counts nothing: it is worked out of our own series when ``/metrics`` is read, so a step pays
nothing for it, and the two cannot disagree. What vLLM has and we have no figure of (times between tokens
as the engine sees them, caches of images, lives of blocks) has no alias: a zero would be a lie.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from server.metrics.series import COUNTERS, GAUGES, HISTOGRAMS, PREFIX

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
        text = HISTOGRAMS[name][1]
        found = HistogramMetricFamily(f"vllm:{alias}", text, labels=["model_name"])
        buckets = list(self._by(f"{name}_bucket", "le").items())
        found.add_metric([self._model_name], buckets, self._total(f"{name}_sum"))
        return found

    def made(self) -> Iterator[Metric]:
        """Yields what is more than another name."""
        gammas, hits = self._by("spec_gamma_bucket", "le"), self._total("prefix_cache_hits_total")
        # A draft is a request's step with a gamma above 0.
        drafts = self._total("spec_gamma_count") - gammas.get("0.0", 0.0)
        text = "Drafts that were verified."
        yield self._add(_COUNTER, "spec_decode_num_drafts", text, {(): drafts})
        accepted = _keyed(self._by("spec_accepted_tokens_per_position_total", "position"))
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Accepted, by depth from 0."
        yield self._add(_COUNTER, name, text, accepted, "position")
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
        labels = "block_size", "num_gpu_blocks"
        yield self._add(_GAUGE, "cache_config_info", text, {sizes: 1.0}, *labels)

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
