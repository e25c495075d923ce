"""Prometheus metrics of the operator. docs/metrics.md lists them; a test compares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, get_args

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specdecode_operator.api.draft import Phase
from specdecode_operator.api.v1alpha1 import ConditionType, DraftStatus, Status
from specdecode_operator.api.v1alpha1 import Decision as DecisionRecord
from specdecode_operator.rollout.trial_evidence import gain_of
from specdecode_operator.state.learned import DriftState
from specdecode_operator.types import Decision, Deployment, Figures, Key, Observation, TaskFigures
from specdecode_worker.contract import OTHER_TASK

# Gauge with a series per deployment that takes little memory.
#
# A child of prometheus_client's Gauge takes about a kilobyte, and there are some twenty series per deployment. Here a
# series is an entry of a dictionary. Series are set by the event loop and read by the thread that serves /metrics.


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


# Metrics of the drift of drafts, by task. `metrics` exports them with the others.

DRIFT_EVIDENCE = TaskGauge(
    "specdecode_draft_drift_evidence", "Evidence that a task is slower than its baseline; 1 raises the alarm."
)
DRIFT_LOSS = TaskGauge(
    "specdecode_draft_loss_ratio",
    "Speed that a task lost against its baseline; 0.1 is 10 % slower, below 0 it is faster.",
)


def record_drift(key: Key, drift: DriftState) -> None:
    """Set the series of tasks with a baseline, and remove those of tasks without one."""
    DRIFT_EVIDENCE.replace(key, {task.task: task.evidence for task in drift.watched})
    DRIFT_LOSS.replace(key, {task.task: task.loss for task in drift.watched})


# Series of training runs, of the candidates that ended, and of captured requests.

_OF_DEPLOYMENT = ["namespace", "name"]

DRAFT_RUNS = DeploymentGauge(
    "specdecode_draft_runs", "Training runs that ended, by outcome.", [*_OF_DEPLOYMENT, "outcome"]
)
CANDIDATES = DeploymentGauge(
    "specdecode_draft_candidates", "Candidate drafts that ended, by outcome.", [*_OF_DEPLOYMENT, "outcome"]
)
RUNS_NOT_BETTER = DeploymentGauge(
    "specdecode_draft_runs_not_better", "Verdicts of training runs in a row that were not better.", _OF_DEPLOYMENT
)
CAPTURED = DeploymentGauge(
    "specdecode_captured_conversations", "Captured conversations of all workers.", _OF_DEPLOYMENT
)


def record_runs(deployment: Deployment, observed: Observation) -> None:
    """Set the series of one deployment. Those of runs are absent until one ended."""
    key, record = deployment.key, observed.session.drafts
    for outcome, count in record.candidate_outcomes.items():
        CANDIDATES.set((*key, outcome), count)
    for outcome, count in record.run_outcomes.items():
        DRAFT_RUNS.set((*key, outcome), count)
    if record.run_outcomes:
        RUNS_NOT_BETTER.set(key, record.runs_not_better)
    trial = record.trial if record.phase is Phase.CANARY else None
    _set_or_remove(CANARY_PAIRS, key, len(trial.pairs) if trial else None)
    gain = gain_of(trial) if trial else None
    for bound in ("mean", "least", "most"):
        _set_or_remove(CANDIDATE_GAIN, (*key, bound), getattr(gain, bound, None))
    captures = [report.capture for report in observed.last_reports if report.capture is not None]
    if deployment.spec.distillation.capture is not None and captures:
        CAPTURED.set(key, sum(capture.conversations for capture in captures))
    else:
        CAPTURED.remove(*key)


# Prometheus metrics of the operator. docs/reference/metrics.md lists them; a test compares.

OF_DEPLOYMENT: Final = ["namespace", "name"]
OF_TASK: Final = [*OF_DEPLOYMENT, "task"]
MAX_TASKS = 8
"""Tasks of one deployment with series of their own, so that labels are bounded. The API allows seven and ``other``."""
SECONDS_PER_HOUR = 3600

CallFailure = Literal["timeout", "unreachable", "unauthorized", "bad_report", "refused", "not_asked", "internal"]
"""Reason why a call to a worker failed, as telemetry counts it. docs/reference/metrics.md explains each."""

RECONCILES = Counter("specdecode_operator_reconciles", "Reconciles of a deployment, by outcome.", ["outcome"])
RECONCILE_SECONDS = Histogram("specdecode_operator_reconcile_seconds", "Duration of a reconcile in seconds.")
QUEUE_DEPTH = Gauge("specdecode_operator_queue_depth", "Deployments that are due and wait for a reconcile.")
LEADER = Gauge("specdecode_operator_leader", "1 if this replica of the operator is the leader, else 0.")
WATCH_CONTACT_AGE = Gauge(
    "specdecode_operator_watch_contact_age_seconds",
    "Seconds since the API server last sent anything on the watch of this kind.",
    ["kind"],
)
SCRAPE_ROUNDS = Counter(
    "specdecode_operator_scrape_rounds", "Rounds in which all workers of one deployment were asked for their reports."
)
SCRAPE_SECONDS = Histogram("specdecode_operator_scrape_seconds", "Duration of such a round in seconds.")
REPORTS_FAILED = Counter(
    "specdecode_operator_reports_failed", "Reports of workers that were not read, by reason.", ["reason"]
)
PUSH_FAILED = Counter(
    "specdecode_operator_push_failed", "Plans that were pushed and not accepted by the worker, by reason.", ["reason"]
)

DESIRED_REPLICAS = DeploymentGauge("specdecode_desired_replicas", "Desired number of workers.", OF_DEPLOYMENT)
PREFILL_REPLICAS = DeploymentGauge(
    "specdecode_ready_prefill_replicas", "Number of ready prefill workers.", OF_DEPLOYMENT
)
READY_REPLICAS = DeploymentGauge("specdecode_ready_replicas", "Number of ready workers.", OF_DEPLOYMENT)
WANTED_REPLICAS = DeploymentGauge(
    "specdecode_wanted_replicas", "Workers that the demand needs, before the bounds of spec.scaling.", OF_DEPLOYMENT
)
CAPACITY = DeploymentGauge(
    "specdecode_capacity_requests_per_second",
    "Requests per second that one worker serves within the objectives.",
    OF_DEPLOYMENT,
)
DEPTH = DeploymentGauge("specdecode_depth", "Draft depth at the current load.", OF_DEPLOYMENT)
ACCEPTANCE = DeploymentGauge("specdecode_acceptance_rate", "Accepted over drafted tokens.", OF_DEPLOYMENT)
FIRST_ACCEPTANCE = DeploymentGauge(
    "specdecode_first_token_acceptance",
    "Acceptance rate of the first drafted token. It does not depend on the depth.",
    OF_DEPLOYMENT,
)
ACCEPTED_LENGTH = DeploymentGauge(
    "specdecode_accepted_length", "Tokens per step of a sequence with a draft.", OF_DEPLOYMENT
)
SPEEDUP = DeploymentGauge(
    "specdecode_speedup",
    "Time that plain decoding would take, divided by the time taken, at equal load.",
    OF_DEPLOYMENT,
)
DEVICE_HOURS_SAVED = DeploymentGauge(
    "specdecode_device_hours_saved",
    "Device hours saved against plain decoding since the deployment was created. It falls while speculation is slower.",
    OF_DEPLOYMENT,
)
RUNNING = DeploymentGauge("specdecode_running_requests", "Running requests, mean of the last minute.", OF_DEPLOYMENT)
WAITING = DeploymentGauge("specdecode_waiting_requests", "Waiting requests, mean of the last minute.", OF_DEPLOYMENT)
TOKENS_PER_SECOND = DeploymentGauge(
    "specdecode_tokens_per_second", "Generated tokens per second, mean of the last minute.", OF_DEPLOYMENT
)
CONDITION = DeploymentGauge(
    "specdecode_condition", "Condition of a deployment: 1 True, 0 False, -1 Unknown.", [*OF_DEPLOYMENT, "condition"]
)
STALE_REPORTS = DeploymentGauge("specdecode_stale_reports", "Ready workers without a report for 30 s.", OF_DEPLOYMENT)
SUSPECTS = DeploymentGauge(
    "specdecode_suspect_workers", "Workers that are worse than their own past and their peers.", OF_DEPLOYMENT
)
OBJECTIVE = DeploymentGauge(
    "specdecode_objective_seconds", "Latency objective of spec.speculation.objective.", [*OF_DEPLOYMENT, "latency"]
)
PLAN_VERSION = DeploymentGauge("specdecode_operator_plan_version", "Version of the current plan.", OF_DEPLOYMENT)
PLAN_CHANGES = Counter("specdecode_operator_plan_changes", "Plan changes that follow from measurements.", OF_DEPLOYMENT)
DECISIONS = Counter(
    "specdecode_operator_decisions", "Decisions, by kind and reason.", [*OF_DEPLOYMENT, "kind", "reason"]
)
EXPECTED_GAIN = DeploymentGauge(
    "specdecode_expected_gain_ratio",
    "Expected gain of the last plan change whose gain was measured; 0.1 is 10 % more tokens in the same time.",
    OF_DEPLOYMENT,
)
REALISED_GAIN = DeploymentGauge("specdecode_realised_gain_ratio", "Realised gain of that plan change.", OF_DEPLOYMENT)

DRAFT_PHASE = DeploymentGauge(
    "specdecode_draft_phase", "1 for the phase of the rollout of drafts.", [*OF_DEPLOYMENT, "phase"]
)
CANARY_PAIRS = DeploymentGauge(
    "specdecode_draft_canary_pairs",
    "Pairs of request blocks that a candidate draft's trial has counted.",
    OF_DEPLOYMENT,
)
CANDIDATE_GAIN = DeploymentGauge(
    "specdecode_draft_candidate_gain_ratio",
    "Gain in speed of the candidate draft that is tried: mean, least and most; 0.1 is 10 % faster.",
    [*OF_DEPLOYMENT, "bound"],
)

TASK_ACCEPTANCE = DeploymentGauge(
    "specdecode_task_acceptance_rate", "Accepted tokens over the depth of the task's row.", OF_TASK
)
TASK_LENGTH = DeploymentGauge(
    "specdecode_task_accepted_length", "Tokens per step of a sequence with a draft, by task.", OF_TASK
)
TASK_SPEEDUP = DeploymentGauge(
    "specdecode_task_speedup",
    "Time that plain decoding would take for the task's tokens, divided by the time taken.",
    OF_TASK,
)
TASK_TTFT = DeploymentGauge(
    "specdecode_task_ttft_seconds", "Mean time to the first token of the last minute, by task.", OF_TASK
)
TASK_ITL = DeploymentGauge(
    "specdecode_task_itl_seconds", "Mean inter-token latency of the last minute, by task.", OF_TASK
)

_VALUES = {"True": 1, "False": 0, "Unknown": -1}
_TASK_GAUGES = (TASK_ACCEPTANCE, TASK_LENGTH, TASK_SPEEDUP, TASK_TTFT, TASK_ITL)
_OF_DRAFTS = (CANDIDATES, CAPTURED, DRAFT_RUNS, RUNS_NOT_BETTER, DRIFT_EVIDENCE, DRIFT_LOSS)
_GAUGES = {*_OF_DRAFTS, *(v for v in globals().values() if isinstance(v, DeploymentGauge))}
_COUNTERS = (PLAN_CHANGES, DECISIONS)
_tasks_by_key: dict[Key, frozenset[str]] = {}
"""Tasks that have series now."""

for _reason in get_args(CallFailure):
    REPORTS_FAILED.labels(_reason)
    PUSH_FAILED.labels(_reason)


def record(deployment: Deployment, observed: Observation, decision: Decision, status: Status) -> None:
    """Set the series of one deployment from the results of a reconcile."""
    key = deployment.key
    DESIRED_REPLICAS.set(key, decision.scale.desired)
    READY_REPLICAS.set(key, status.ready_replicas)
    PREFILL_REPLICAS.set(key, status.prefill.ready_replicas if status.prefill else 0)
    PLAN_VERSION.set(key, decision.plan.version)
    STALE_REPORTS.set(key, len(decision.shown.silent))
    SUSPECTS.set(key, len({suspect.pod for suspect in decision.health.unhealthy}))
    _set_known(WANTED_REPLICAS, key, decision.scale.wanted)
    _set_known(CAPACITY, key, decision.scale.capacity.rate if decision.scale.capacity else None)
    _set_known(DEPTH, key, decision.shown.depth)
    _set_known(FIRST_ACCEPTANCE, key, decision.shown.first_acceptance)
    _record_objectives(deployment)
    _record_decisions(key, decision.changes)
    if decision.shown.figures is not None:
        _record_figures(key, decision.shown.figures)
        tasks = [task.name for task in deployment.spec.speculation.tasks] + [OTHER_TASK]
        _record_tasks(key, {name: decision.shown.figures.tasks.get(name, TaskFigures()) for name in tasks[:MAX_TASKS]})
    _record_gains(key, decision.shown.history)
    _record_drafts(key, status.draft)
    record_runs(deployment, observed)
    record_drift(key, observed.session.learned.drift)
    _record_conditions(key, status)


def record_failure(key: Key, status: Status) -> None:
    """Set the series of a deployment whose spec was refused; its measurements stay as they are."""
    READY_REPLICAS.set(key, status.ready_replicas)
    _record_conditions(key, status)


def forget(namespace: str, name: str) -> None:
    """Remove the series of a deployment that was deleted."""
    _tasks_by_key.pop((namespace, name), None)
    for gauge in _GAUGES:
        gauge.forget(namespace, name)
    for counter in _COUNTERS:
        counter.remove_by_labels({"namespace": namespace, "name": name})


def forget_all() -> None:
    """Remove the series of all deployments. A replica that is no longer the leader must not export old values."""
    _tasks_by_key.clear()
    for gauge in _GAUGES:
        gauge.clear()
    for counter in _COUNTERS:
        counter.clear()


def _set_known(gauge: DeploymentGauge, labels: tuple[str, ...], value: float | None) -> None:
    """Set ``gauge`` if the value is known. Otherwise it keeps its last value, as status does."""
    if value is not None:
        gauge.set(labels, value)


def _set_or_remove(gauge: DeploymentGauge, labels: tuple[str, ...], value: float | None) -> None:
    """Set the series, or remove it if there is no value."""
    if value is None:
        gauge.remove(*labels)
    else:
        gauge.set(labels, value)


def _record_objectives(deployment: Deployment) -> None:
    objective = deployment.spec.speculation.objective
    for latency, seconds in (("ttft", objective.ttft_seconds), ("itl", objective.itl_seconds)):
        _set_or_remove(OBJECTIVE, (*deployment.key, latency), seconds)


def _record_decisions(key: Key, changes: Iterable[DecisionRecord]) -> None:
    changes = list(changes)
    PLAN_CHANGES.labels(*key).inc(sum(change.kind == "Plan" for change in changes))
    for change in changes:
        DECISIONS.labels(*key, change.kind, change.cause or "unknown").inc()


def _record_figures(key: Key, figures: Figures) -> None:
    RUNNING.set(key, figures.running)
    WAITING.set(key, figures.waiting)
    TOKENS_PER_SECOND.set(key, figures.tokens_per_second)
    if figures.speed is not None:
        ACCEPTANCE.set(key, figures.speed.acceptance_rate)
        ACCEPTED_LENGTH.set(key, figures.speed.accepted_length)
    _set_known(SPEEDUP, key, figures.speedup)
    if figures.saved_device_seconds is not None:
        DEVICE_HOURS_SAVED.set(key, figures.saved_device_seconds / SECONDS_PER_HOUR)


def _record_tasks(key: Key, tasks: dict[str, TaskFigures]) -> None:
    """Set the series of tasks, and remove those that were not measured: an idle task must not raise an alert."""
    for name, task in tasks.items():
        values = (task.acceptance_rate, task.accepted_length, task.speedup, task.ttft_seconds, task.itl_seconds)
        for gauge, value in zip(_TASK_GAUGES, values, strict=True):
            _set_or_remove(gauge, (*key, name), value)
    for name in _tasks_by_key.get(key, frozenset()) - tasks.keys():
        for gauge in _TASK_GAUGES:
            gauge.remove(*key, name)
    _tasks_by_key[key] = frozenset(tasks)


def _record_gains(key: Key, history: Iterable[DecisionRecord]) -> None:
    plans = (change for change in history if change.kind == "Plan")
    measured = next((change for change in plans if change.realised_gain_percent is not None), None)
    if measured is not None and measured.realised_gain_percent is not None:
        REALISED_GAIN.set(key, measured.realised_gain_percent / 100)
        EXPECTED_GAIN.set(key, (measured.expected_gain_percent or 0) / 100)


def _record_drafts(key: Key, draft: DraftStatus | None) -> None:
    """Set the series of the phase of a rollout."""
    for phase in Phase:
        is_present = draft is not None and draft.phase == phase
        _set_or_remove(DRAFT_PHASE, (*key, phase.value), 1 if is_present else None)


def _record_conditions(key: Key, status: Status) -> None:
    """Set one series for each condition, and remove those of absent conditions.

    They are removed by name, because a search would go through the series of all deployments.
    """
    by_type = {condition.type: condition.status for condition in status.conditions}
    for kind in ConditionType:
        if kind in by_type:
            CONDITION.set((*key, kind.value), _VALUES[by_type[kind]])
        else:
            CONDITION.remove(*key, kind.value)
