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


Histograms = Iterable[tuple[tuple[str, ...], Sequence[int], float]]
"""Triples of values of the further labels, observations per bucket (not accumulated) and sum of the observations."""


def histogram(
    name: Metric, text: str, model: str, labels: Sequence[str], edges: Sequence[float], histograms: Histograms
) -> Family:
    """Build a histogram with the labels ``model_name`` and ``labels``.

    Args:
        name: Name of the metric.
        text: Help text.
        model: Value of the label ``model_name``.
        labels: Names of the further labels.
        edges: Upper bounds of the buckets, inclusive; the last bucket has no upper bound.
        histograms: Counts and sums, one for each combination of label values.
    """
    family = HistogramMetricFamily(name, text, labels=("model_name", *labels))
    bounds = [*(str(edge) for edge in edges), "+Inf"]
    for values, counts, total in histograms:
        buckets = list(zip(bounds, map(float, accumulate(counts)), strict=True))
        family.add_metric((model, *values), buckets, total)
    return family
