"""Metrics of traffic capture.

They exist with value 0 if capture is off, so that an alert rule on dropped records needs no special case.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric as Family

from specdecode_worker.capture import CaptureCounts, Dropped
from specdecode_worker.contract import Metric
from specdecode_worker.metrics.families import counter, gauge


def capture(model: str, counts: CaptureCounts) -> Iterator[Family]:
    """Yield the metrics of captured records, dropped records and stored bytes."""
    records = [((task,), float(count)) for task, count in counts.records.items()]
    yield counter(Metric.capture_records, "Requests that were captured.", model, ("task",), records)
    dropped = [((reason.value,), float(counts.dropped[reason])) for reason in Dropped]
    yield counter(
        Metric.capture_dropped,
        "Requests that were not captured.",
        model,
        ("reason",),
        dropped,
    )
    stored = [((), float(counts.stored_bytes))]
    yield gauge(Metric.capture_stored_bytes, "Size of the capture folder in bytes.", model, (), stored)
