"""Text exposition of all metrics, the response of /metrics."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from specdecode_worker.contract import Report
from specdecode_worker.metrics.api_keys import api_keys
from specdecode_worker.metrics.capture import capture
from specdecode_worker.metrics.latency import latency
from specdecode_worker.metrics.server_counters import ServerCounters
from specdecode_worker.metrics.speculation import speculation
from specdecode_worker.metrics.traffic import traffic

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(report: Report, counts: ServerCounters) -> bytes:
    """Return all metrics in the Prometheus text format."""
    registry = CollectorRegistry()
    families = [*speculation(report, counts), *traffic(report), *latency(report, counts)]
    families += [*capture(report.model, counts.capture), *api_keys(report.model, counts)]
    registry.register(_StaticCollector(families))
    return generate_latest(registry)


class _StaticCollector(Collector):
    """Collector of metric families that are already built."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families
