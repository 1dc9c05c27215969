"""Metrics in Prometheus' text format, from what the engine and the guard count."""

from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from longstride.serving.engine import Engine

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the histogram of durations."""


class HttpCounts:
    """Requests by status, and how long they took."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.durations = [0] * (len(SECONDS) + 1)
        self.seconds = 0.0

    def add(self, status: int, seconds: float) -> None:
        """Counts a request; status 0 if the client left before there was an answer."""
        self.statuses[status] += 1
        self.durations[next((at for at, bound in enumerate(SECONDS) if seconds <= bound), -1)] += 1
        self.seconds += seconds


class EngineCollector(Collector):
    """Reads the numbers when they are asked for."""

    def __init__(self, engine: Engine, http: HttpCounts) -> None:
        self.engine, self.http = engine, http

    def collect(self) -> Iterable[Metric]:
        counts, http = self.engine.counts, self.http
        yield GaugeMetricFamily("longstride_places", "Samples that can be made at once", self.engine.places.count)
        yield GaugeMetricFamily("longstride_running", "Samples that are being made", counts.running)
        yield GaugeMetricFamily("longstride_waiting", "Samples in the queue", counts.waiting)
        yield CounterMetricFamily("longstride_prompt_bytes", "Bytes of prompts", counts.prompt_bytes)
        yield CounterMetricFamily("longstride_bytes", "Bytes made", counts.bytes)
        yield CounterMetricFamily("longstride_steps", "Steps of the model", counts.steps)
        yield CounterMetricFamily("longstride_refused", "Samples that found the queue full", counts.refused)
        samples = CounterMetricFamily("longstride_samples", "Samples by the way they ended", labels=["end"])
        for end, count in counts.samples.items():
            samples.add_metric([end], count)
        yield samples
        requests = CounterMetricFamily("longstride_requests", "Requests by status; 0: the client left", labels=["status"])
        for status, count in sorted(http.statuses.items()):
            requests.add_metric([str(status)], count)
        yield requests
        seconds = HistogramMetricFamily("longstride_request_seconds", "Time until a request is answered whole")
        sums = [sum(http.durations[: at + 1]) for at in range(len(http.durations))]
        bounds = [*map(str, SECONDS), "+Inf"]
        seconds.add_metric([], list(zip(bounds, sums)), http.seconds)
        yield seconds


def make_registry(engine: Engine, http: HttpCounts) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(engine, http))
    return registry


def metrics_page(registry: CollectorRegistry) -> bytes:
    page: bytes = generate_latest(registry)
    return page
