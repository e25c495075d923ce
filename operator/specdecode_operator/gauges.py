"""Gauge with a series per deployment that takes little memory.

A child of prometheus_client's Gauge takes about a kilobyte, and there are some twenty series per deployment. Here a
series is an entry of a dictionary. Series are set by the event loop and read by the thread that serves /metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class DeploymentGauge(Collector):
    """Values by their labels, of which the first two are namespace and name of a deployment."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str]) -> None:
        """Register the gauge.

        Args:
            name: Name of the metric.
            documentation: Help text.
            labels: Names of the labels.
        """
        self.name, self.labels = name, tuple(labels)
        self._documentation = documentation
        self._values: dict[tuple[str, ...], float] = {}
        REGISTRY.register(self)

    def set(self, labels: tuple[str, ...], value: float) -> None:
        """Set the series with these values of the labels."""
        self._values[labels] = value

    def remove(self, *labels: str) -> None:
        """Remove the series with these values of the labels, if there is one."""
        self._values.pop(labels, None)

    def forget(self, namespace: str, name: str) -> None:
        """Remove all series of a deployment."""
        for labels in [labels for labels in self._values if labels[:2] == (namespace, name)]:
            del self._values[labels]

    def clear(self) -> None:
        """Remove all series."""
        self._values.clear()

    def collect(self) -> Iterator[Metric]:
        """Yield the metric with its present series."""
        family = GaugeMetricFamily(self.name, self._documentation, labels=self.labels)
        for labels, value in list(self._values.items()):
            family.add_metric(labels, value)
        yield family


class TaskGauge(DeploymentGauge):
    """Gauge with a series for each task of a deployment. Its labels are namespace, name and task."""

    def __init__(self, name: str, documentation: str) -> None:
        """Register the gauge.

        Args:
            name: Name of the metric.
            documentation: Help text.
        """
        super().__init__(name, documentation, ("namespace", "name", "task"))
        self._tasks: dict[tuple[str, str], frozenset[str]] = {}
        """Tasks with a series, by deployment: a search would go through the series of all deployments."""

    def replace(self, key: tuple[str, str], values: Mapping[str, float]) -> None:
        """Set the series of a deployment by task, and remove those of other tasks."""
        for task in self._tasks.pop(key, frozenset()) - values.keys():
            self.remove(*key, task)
        for task, value in values.items():
            self.set((*key, task), value)
        if values:
            self._tasks[key] = frozenset(values)

    def forget(self, namespace: str, name: str) -> None:
        """Remove all series of a deployment."""
        super().forget(namespace, name)
        self._tasks.pop((namespace, name), None)

    def clear(self) -> None:
        """Remove all series."""
        super().clear()
        self._tasks.clear()
