"""Builders of Prometheus metric families. Every sample has the label ``model_name``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family

from specdecode_worker.contract import Metric

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Pairs of (values of the further labels, sample value)."""


def counter(name: Metric, text: str, model: str, labels: Sequence[str], samples: Samples) -> Family:
    """Build a counter with the labels ``model_name`` and ``labels``."""
    family = CounterMetricFamily(name, text, labels=("model_name", *labels))
    for values, value in samples:
        family.add_metric((model, *values), value)
    return family


def gauge(name: Metric, text: str, model: str, labels: Sequence[str], samples: Samples) -> Family:
    """Build a gauge with the labels ``model_name`` and ``labels``."""
    family = GaugeMetricFamily(name, text, labels=("model_name", *labels))
    for values, value in samples:
        family.add_metric((model, *values), value)
    return family


def histogram(
    name: Metric, text: str, model: str, edges: Sequence[float], counts: Sequence[int], total: float
) -> Family:
    """Build a histogram.

    Args:
        name: Name of the metric.
        text: Help text.
        model: Value of the label ``model_name``.
        edges: Upper bounds of the buckets, inclusive.
        counts: Observations per bucket, not accumulated; the last bucket has no upper bound.
        total: Sum of all observations.
    """
    family = HistogramMetricFamily(name, text, labels=("model_name",))
    bounds = [*(str(edge) for edge in edges), "+Inf"]
    family.add_metric((model,), list(zip(bounds, map(float, accumulate(counts)), strict=True)), total)
    return family
