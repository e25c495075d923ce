"""The operator's own metrics, on a port of their own."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

RECONCILES = Counter("specdecode_operator_reconciles", "Looks at a deployment, by how they ended.", ["outcome"])
RECONCILE_SECONDS = Histogram("specdecode_operator_reconcile_seconds", "Duration of a look at a deployment.")
DESIRED_REPLICAS = Gauge("specdecode_desired_replicas", "Workers that should run.", ["namespace", "name"])
READY_REPLICAS = Gauge("specdecode_ready_replicas", "Workers that are ready.", ["namespace", "name"])
PLAN_VERSION = Gauge("specdecode_operator_plan_version", "Version of the plan that is out.", ["namespace", "name"])
PLAN_CHANGES = Counter("specdecode_operator_plan_changes", "Changed rows of plans.", ["namespace", "name"])
REPORTS_REFUSED = Counter("specdecode_operator_reports_refused", "Reports that could not be had or used.")


def forget(namespace: str, name: str) -> None:
    """Drops the series of a deployment that is gone."""
    for metric in (DESIRED_REPLICAS, READY_REPLICAS, PLAN_VERSION, PLAN_CHANGES):
        metric.remove_by_labels({"namespace": namespace, "name": name})
