"""The operator's own metrics, on a port of their own. docs/metrics.md lists them; a test compares."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from specdecode_operator.api.v1alpha1 import ConditionType, Status
from specdecode_operator.api.v1alpha1 import Decision as DecisionRecord
from specdecode_operator.types import Decision, Deployment, Key, Observation

OF_ONE = ["namespace", "name"]
"""Labels of what is said of one deployment."""

RECONCILES = Counter("specdecode_operator_reconciles", "Looks at a deployment, by how they ended.", ["outcome"])
RECONCILE_SECONDS = Histogram("specdecode_operator_reconcile_seconds", "Duration of a look at a deployment.")
QUEUE_DEPTH = Gauge("specdecode_operator_queue_depth", "Deployments that are due for a look and wait for it.")
DESIRED_REPLICAS = Gauge("specdecode_desired_replicas", "Workers that should run.", OF_ONE)
READY_REPLICAS = Gauge("specdecode_ready_replicas", "Workers that are ready.", OF_ONE)
WANTED_REPLICAS = Gauge("specdecode_wanted_replicas", "Workers that demand asks for, before the bounds.", OF_ONE)
CAPACITY = Gauge("specdecode_capacity_requests_per_second", "Arrivals that one worker carries.", OF_ONE)
DEPTH = Gauge("specdecode_depth", "Draft depth at the present load.", OF_ONE)
ACCEPTANCE = Gauge("specdecode_acceptance_rate", "Accepted over drafted tokens, last measured.", OF_ONE)
FIRST_ACCEPTANCE = Gauge(
    "specdecode_first_token_acceptance", "How often the draft's first token is right, whatever the depth.", OF_ONE
)
ACCEPTED_LENGTH = Gauge("specdecode_accepted_length", "Tokens per step, last measured.", OF_ONE)
SPEEDUP = Gauge("specdecode_speedup", "Time that plain decoding would take over the time taken, last measured.", OF_ONE)
RUNNING = Gauge("specdecode_running_requests", "Requests that run, mean of a minute.", OF_ONE)
WAITING = Gauge("specdecode_waiting_requests", "Requests that wait, mean of a minute.", OF_ONE)
TOKENS_PER_SECOND = Gauge("specdecode_tokens_per_second", "Tokens of answers a second, mean of a minute.", OF_ONE)
CONDITION = Gauge("specdecode_condition", "1 for True, 0 for False, -1 for Unknown.", [*OF_ONE, "condition"])
STALE_REPORTS = Gauge("specdecode_stale_reports", "Ready workers without a report for some time.", OF_ONE)
SUSPECTS = Gauge("specdecode_suspect_workers", "Workers that differ from their past and their peers.", OF_ONE)
PLAN_VERSION = Gauge("specdecode_operator_plan_version", "Version of the plan that is out.", OF_ONE)
PLAN_CHANGES = Counter("specdecode_operator_plan_changes", "Changes of plans by measurement.", OF_ONE)
DECISIONS = Counter("specdecode_operator_decisions", "Decisions, by kind and why.", [*OF_ONE, "kind", "reason"])
EXPECTED_GAIN = Gauge("specdecode_expected_gain_ratio", "Of the last change whose gain was measured after.", OF_ONE)
REALISED_GAIN = Gauge("specdecode_realised_gain_ratio", "What that change brought.", OF_ONE)
REPORTS_REFUSED = Counter("specdecode_operator_reports_refused", "Reports that could not be had or used.")

_VALUES = {"True": 1, "False": 0, "Unknown": -1}


def record(deployment: Deployment, observed: Observation, decision: Decision, status: Status) -> None:
    """Everything that one look says about one deployment."""
    key = deployment.key
    REPORTS_REFUSED.inc(sum(worker.report_problem is not None for worker in observed.workers))
    DESIRED_REPLICAS.labels(*key).set(decision.desired)
    READY_REPLICAS.labels(*key).set(status.ready_replicas)
    PLAN_VERSION.labels(*key).set(decision.plan.version)
    STALE_REPORTS.labels(*key).set(len(decision.silent))
    SUSPECTS.labels(*key).set(len({suspect.pod for suspect in decision.suspects}))
    _known(WANTED_REPLICAS, key, decision.wanted)
    _known(CAPACITY, key, decision.capacity.rate if decision.capacity else None)
    _known(DEPTH, key, decision.depth)
    _known(FIRST_ACCEPTANCE, key, decision.first_acceptance)
    _decisions(key, decision.changes)
    _figures(key, decision)
    _gains(key, decision.history)
    _conditions(key, status)


def forget(namespace: str, name: str) -> None:
    """Drops the series of a deployment that is gone."""
    for metric in _of_deployments():
        metric.remove_by_labels({"namespace": namespace, "name": name})


def _of_deployments() -> list[Any]:
    found = [value for value in globals().values() if isinstance(value, (Counter, Gauge, Histogram))]
    return [metric for metric in found if metric._labelnames[: len(OF_ONE)] == tuple(OF_ONE)]


def _known(gauge: Gauge, key: Key, value: float | None) -> None:
    """What is not known now keeps what was known last, as status does."""
    if value is not None:
        gauge.labels(*key).set(value)


def _decisions(key: Key, changes: Iterable[DecisionRecord]) -> None:
    changes = list(changes)
    PLAN_CHANGES.labels(*key).inc(sum(change.kind == "Plan" for change in changes))
    for change in changes:
        DECISIONS.labels(*key, change.kind, change.cause or "unknown").inc()


def _figures(key: Key, decision: Decision) -> None:
    figures = decision.figures
    if figures is None:
        return
    RUNNING.labels(*key).set(figures.running)
    WAITING.labels(*key).set(figures.waiting)
    TOKENS_PER_SECOND.labels(*key).set(figures.tokens_per_second)
    if figures.speed is not None:
        ACCEPTANCE.labels(*key).set(figures.speed.acceptance_rate)
        ACCEPTED_LENGTH.labels(*key).set(figures.speed.accepted_length)
    _known(SPEEDUP, key, figures.speedup)


def _gains(key: Key, history: Iterable[DecisionRecord]) -> None:
    measured = next((found for found in history if found.realised_gain_percent is not None), None)
    if measured is not None and measured.realised_gain_percent is not None:
        REALISED_GAIN.labels(*key).set(measured.realised_gain_percent / 100)
        _known(EXPECTED_GAIN, key, (measured.expected_gain_percent or 0) / 100)


def _conditions(key: Key, status: Status) -> None:
    """A condition that is gone takes its series with it; by name, since a search would go through all deployments."""
    found = {condition.type: condition.status for condition in status.conditions}
    for kind in ConditionType:
        if kind in found:
            CONDITION.labels(*key, kind.value).set(_VALUES[found[kind]])
        else:
            CONDITION.remove(*key, kind.value)
