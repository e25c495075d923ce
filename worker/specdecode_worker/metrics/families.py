"""Families of samples; every one carries the name of the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family

from specdecode_worker.contract import Metric

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values by the values of the further labels."""


def counter(name: Metric, text: str, model: str, labels: Sequence[str], samples: Samples) -> Family:
    family = CounterMetricFamily(name, text, labels=("model_name", *labels))
    for values, value in samples:
        family.add_metric((model, *values), value)
    return family


def gauge(name: Metric, text: str, model: str, labels: Sequence[str], samples: Samples) -> Family:
    family = GaugeMetricFamily(name, text, labels=("model_name", *labels))
    for values, value in samples:
        family.add_metric((model, *values), value)
    return family


def histogram(
    name: Metric, text: str, model: str, edges: Sequence[float], counts: Sequence[int], total: float
) -> Family:
    """``counts`` are per bucket, the last without an edge; Prometheus wants them accumulated."""
    family = HistogramMetricFamily(name, text, labels=("model_name",))
    bounds = [*(str(edge) for edge in edges), "+Inf"]
    family.add_metric((model,), list(zip(bounds, map(float, accumulate(counts)), strict=True)), total)
    return family
