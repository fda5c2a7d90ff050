"""Metrics of a server of several models: those of each, with a label ``model``, and those that belong to
none. Series are put together when they are read, so a step pays nothing for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from engine.request.info import EngineInfo
from server.metrics.prometheus import Metrics, exposition
from server.metrics.series import COUNTERS, GAUGES, PREFIX

_OWN = {"http_requests", "rejections", "connections_cut_off"}
_MODELS = {
    "model_loads": ("Models loaded, or not, by name.", "model", "outcome"),
    "model_ends": ("Models whose engine was ended, and why.", "model", "reason"),
}


class SeveralMetrics(Collector):
    """``names``: of all models; ``loaded``: of those that are loaded now."""

    def __init__(
        self,
        names: Iterable[str],
        loaded: Callable[[], Iterable[str]],
        is_draining: Callable[[], bool],
    ) -> None:
        self.registry = CollectorRegistry()
        self._names = tuple(names)
        self._loaded = loaded
        self._by_model: dict[str, Metrics] = {}
        ProcessCollector(registry=self.registry)
        counters = {name: COUNTERS[name] for name in _OWN} | _MODELS
        self._counters = {
            name: Counter(f"{PREFIX}{name}", text, labels, registry=self.registry)
            for name, (text, *labels) in counters.items()
        }
        draining = Gauge(f"{PREFIX}draining", GAUGES["draining"][0], registry=self.registry)
        draining.set_function(lambda: float(is_draining()))

    def of(self, name: str, info: EngineInfo) -> Metrics:
        """Returns the metrics of a model, which outlast its engines."""
        if name not in self._by_model:
            self._by_model[name] = Metrics(info, name)
        return self._by_model[name]

    def count(self, name: str, *labels: str) -> None:
        self._counters[name].labels(*labels).inc()

    async def expose(self, accept: str) -> tuple[bytes, str]:
        return exposition(self, accept)

    def collect(self) -> Iterator[Metric]:
        yield from self.registry.collect()
        loaded = set(self._loaded())
        shown = GaugeMetricFamily(
            f"{PREFIX}model_loaded", "1 for models that are loaded.", labels=["model"]
        )
        for name in self._names:
            shown.add_metric([name], float(name in loaded))
        yield shown
        yield from self._merged(loaded)

    def _merged(self, loaded: set[str]) -> Iterable[Metric]:
        """Returns the families of all models, each once."""
        own = {f"{PREFIX}{name}" for name in (*_OWN, "draining")}
        found: dict[str, Metric] = {}
        # A launcher's thread may add one meanwhile.
        for model, metrics in list(self._by_model.items()):
            # That an engine is gone on purpose is no fault.
            left_out = own if model in loaded else {*own, f"{PREFIX}engine_up"}
            for family in metrics.collect():
                if family.name in left_out or family.name.startswith("process_"):
                    continue
                same = Metric(family.name, family.documentation, family.type, family.unit)
                into = found.setdefault(family.name, same)
                into.samples += [
                    each._replace(labels={"model": model, **each.labels}) for each in family.samples
                ]
        return found.values()
