"""Prometheus metrics of the operator. docs/reference/metrics.md lists them; a test compares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal, get_args

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specdecode_operator.api.draft import Phase
from specdecode_operator.api.v1alpha1 import Decision as DecisionRecord
from specdecode_operator.api.v1alpha1 import Status
from specdecode_operator.rollout.phases import gain_of
from specdecode_operator.state.learned import DriftState
from specdecode_operator.types import Decision, Deployment, Figures, Key, Observation, TaskFigures
from specdecode_worker.contract import OTHER_TASK

# Gauge with a series per deployment that takes little memory.
#
# A child of prometheus_client's Gauge takes about a kilobyte, and there are some twenty series per deployment. Here a
# series is an entry of a dictionary. Series are set by the event loop and read by the thread that serves /metrics.


class DeploymentGauge(Collector):
    """Values by their labels, of which the first two are namespace and name of a deployment."""

    def __init__(self, name: str, documentation: str, *labels: str) -> None:
        """Register the gauge.

        Args:
            name: Name of the metric.
            documentation: Help text.
            labels: Names of the labels after namespace and name.
        """
        self.name, self.labels = name, ("namespace", "name", *labels)
        self._documentation = documentation
        self._values: dict[tuple[str, ...], dict[tuple[str, ...], float]] = {}
        """By deployment, then by the values of the other labels."""
        REGISTRY.register(self)

    def set(self, labels: tuple[str, ...], value: float | None) -> None:
        """Set the series with these values of the labels, or remove it if there is no value."""
        series = self._values.setdefault(labels[:2], {})
        if value is None:
            series.pop(labels[2:], None)
        else:
            series[labels[2:]] = value

    def replace(self, key: Key, values: Mapping[str, float | None]) -> None:
        """Set the series of a deployment by their one further label, and remove all others that it has."""
        self._values[key] = {(label,): value for label, value in values.items() if value is not None}

    def forget(self, key: Key) -> None:
        """Remove all series of a deployment."""
        self._values.pop(key, None)

    def clear(self) -> None:
        """Remove all series."""
        self._values.clear()

    def collect(self) -> Iterator[Metric]:
        """Yield the metric with its present series."""
        family = GaugeMetricFamily(self.name, self._documentation, labels=self.labels)
        for key, series in list(self._values.items()):
            for labels, value in list(series.items()):
                family.add_metric((*key, *labels), value)
        yield family


# Metrics of the drift of drafts, by task. `metrics` exports them with the others.

DRIFT_EVIDENCE = DeploymentGauge(
    "specdecode_draft_drift_evidence", "Evidence that a task is slower than its baseline; 1 raises the alarm.", "task"
)
DRIFT_LOSS = DeploymentGauge(
    "specdecode_draft_loss_ratio",
    "Speed that a task lost against its baseline; 0.1 is 10 % slower, below 0 it is faster.",
    "task",
)


def record_drift(key: Key, drift: DriftState) -> None:
    """Set the series of tasks with a baseline, and remove those of tasks without one."""
    DRIFT_EVIDENCE.replace(key, {task.task: task.evidence for task in drift.watched})
    DRIFT_LOSS.replace(key, {task.task: task.loss for task in drift.watched})


# Series of training runs, of the candidates that ended, and of captured requests.

DRAFT_RUNS = DeploymentGauge("specdecode_draft_runs", "Training runs that ended, by outcome.", "outcome")
CANDIDATES = DeploymentGauge("specdecode_draft_candidates", "Candidate drafts that ended, by outcome.", "outcome")
RUNS_NOT_BETTER = DeploymentGauge(
    "specdecode_draft_runs_not_better", "Verdicts of training runs in a row that were not better."
)
CAPTURED = DeploymentGauge("specdecode_captured_conversations", "Captured conversations of all workers.")


def record_runs(deployment: Deployment, observed: Observation) -> None:
    """Set the series of one deployment. Those of runs are absent until one ended."""
    key, record = deployment.key, observed.session.drafts
    CANDIDATES.replace(key, record.candidate_outcomes)
    DRAFT_RUNS.replace(key, record.run_outcomes)
    RUNS_NOT_BETTER.set(key, record.runs_not_better if record.run_outcomes else None)
    trial = record.trial if record.phase is Phase.CANARY else None
    CANARY_PAIRS.set(key, len(trial.pairs) if trial else None)
    gain = gain_of(trial) if trial else None
    CANDIDATE_GAIN.replace(key, {bound: getattr(gain, bound, None) for bound in ("mean", "least", "most")})
    captures = [report.capture for report in observed.last_reports if report.capture is not None]
    is_captured = deployment.spec.distillation.capture is not None and bool(captures)
    CAPTURED.set(key, sum(capture.conversations for capture in captures) if is_captured else None)


# Prometheus metrics of the operator. docs/reference/metrics.md lists them; a test compares.

OF_DEPLOYMENT: Final = ["namespace", "name"]
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

DESIRED_REPLICAS = DeploymentGauge("specdecode_desired_replicas", "Desired number of workers.")
PREFILL_REPLICAS = DeploymentGauge("specdecode_ready_prefill_replicas", "Number of ready prefill workers.")
READY_REPLICAS = DeploymentGauge("specdecode_ready_replicas", "Number of ready workers.")
WANTED_REPLICAS = DeploymentGauge(
    "specdecode_wanted_replicas", "Workers that the demand needs, before the bounds of spec.scaling."
)
CAPACITY = DeploymentGauge(
    "specdecode_capacity_requests_per_second", "Requests per second that one worker serves within the objectives."
)
DEPTH = DeploymentGauge("specdecode_depth", "Draft depth at the current load.")
ACCEPTANCE = DeploymentGauge("specdecode_acceptance_rate", "Accepted over drafted tokens.")
FIRST_ACCEPTANCE = DeploymentGauge(
    "specdecode_first_token_acceptance", "Acceptance rate of the first drafted token. It does not depend on the depth."
)
ACCEPTED_LENGTH = DeploymentGauge("specdecode_accepted_length", "Tokens per step of a sequence with a draft.")
SPEEDUP = DeploymentGauge(
    "specdecode_speedup", "Time that plain decoding would take, divided by the time taken, at equal load."
)
DEVICE_HOURS_SAVED = DeploymentGauge(
    "specdecode_device_hours_saved",
    "Device hours saved against plain decoding since the deployment was created. It falls while speculation is slower.",
)
RUNNING = DeploymentGauge("specdecode_running_requests", "Running requests, mean of the last minute.")
WAITING = DeploymentGauge("specdecode_waiting_requests", "Waiting requests, mean of the last minute.")
TOKENS_PER_SECOND = DeploymentGauge(
    "specdecode_tokens_per_second", "Generated tokens per second, mean of the last minute."
)
CONDITION = DeploymentGauge(
    "specdecode_condition", "Condition of a deployment: 1 True, 0 False, -1 Unknown.", "condition"
)
STALE_REPORTS = DeploymentGauge("specdecode_stale_reports", "Ready workers without a report for 30 s.")
SUSPECTS = DeploymentGauge("specdecode_suspect_workers", "Workers that are worse than their own past and their peers.")
OBJECTIVE = DeploymentGauge(
    "specdecode_objective_seconds", "Latency objective of spec.speculation.objective.", "latency"
)
PLAN_VERSION = DeploymentGauge("specdecode_operator_plan_version", "Version of the current plan.")
PLAN_CHANGES = Counter("specdecode_operator_plan_changes", "Plan changes that follow from measurements.", OF_DEPLOYMENT)
DECISIONS = Counter(
    "specdecode_operator_decisions", "Decisions, by kind and reason.", [*OF_DEPLOYMENT, "kind", "reason"]
)
EXPECTED_GAIN = DeploymentGauge(
    "specdecode_expected_gain_ratio",
    "Expected gain of the last plan change whose gain was measured; 0.1 is 10 % more tokens in the same time.",
)
REALISED_GAIN = DeploymentGauge("specdecode_realised_gain_ratio", "Realised gain of that plan change.")

DRAFT_PHASE = DeploymentGauge("specdecode_draft_phase", "1 for the phase of the rollout of drafts.", "phase")
CANARY_PAIRS = DeploymentGauge(
    "specdecode_draft_canary_pairs", "Pairs of request blocks that a candidate draft's trial has counted."
)
CANDIDATE_GAIN = DeploymentGauge(
    "specdecode_draft_candidate_gain_ratio",
    "Gain in speed of the candidate draft that is tried: mean, least and most; 0.1 is 10 % faster.",
    "bound",
)

TASK_ACCEPTANCE = DeploymentGauge(
    "specdecode_task_acceptance_rate", "Accepted tokens over the depth of the task's row.", "task"
)
TASK_LENGTH = DeploymentGauge(
    "specdecode_task_accepted_length", "Tokens per step of a sequence with a draft, by task.", "task"
)
TASK_SPEEDUP = DeploymentGauge(
    "specdecode_task_speedup",
    "Time that plain decoding would take for the task's tokens, divided by the time taken.",
    "task",
)
TASK_TTFT = DeploymentGauge(
    "specdecode_task_ttft_seconds", "Mean time to the first token of the last minute, by task.", "task"
)
TASK_ITL = DeploymentGauge(
    "specdecode_task_itl_seconds", "Mean inter-token latency of the last minute, by task.", "task"
)

_VALUES = {"True": 1, "False": 0, "Unknown": -1}
_TASK_GAUGES = {
    "acceptance_rate": TASK_ACCEPTANCE,
    "accepted_length": TASK_LENGTH,
    "speedup": TASK_SPEEDUP,
    "ttft_seconds": TASK_TTFT,
    "itl_seconds": TASK_ITL,
}
"""Gauge by field of TaskFigures."""
_GAUGES = [one for one in globals().values() if isinstance(one, DeploymentGauge)]
_COUNTERS = (PLAN_CHANGES, DECISIONS)

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
    objective = deployment.spec.speculation.objective
    OBJECTIVE.replace(key, {"ttft": objective.ttft_seconds, "itl": objective.itl_seconds})
    _record_decisions(key, decision.changes)
    if decision.shown.figures is not None:
        _record_figures(key, decision.shown.figures)
        names = [task.name for task in deployment.spec.speculation.tasks] + [OTHER_TASK]
        tasks = {name: decision.shown.figures.tasks.get(name, TaskFigures()) for name in names[:MAX_TASKS]}
        for field, gauge in _TASK_GAUGES.items():
            # Those that were not measured are removed: an idle task must not raise an alert.
            gauge.replace(key, {name: getattr(task, field) for name, task in tasks.items()})
    _record_gains(key, decision.shown.history)
    phase = status.draft.phase if status.draft is not None else None
    DRAFT_PHASE.replace(key, {phase: 1} if phase else {})
    record_runs(deployment, observed)
    record_drift(key, observed.session.learned.drift)
    _record_conditions(key, status)


def record_failure(key: Key, status: Status) -> None:
    """Set the series of a deployment whose spec was refused; its measurements stay as they are."""
    READY_REPLICAS.set(key, status.ready_replicas)
    _record_conditions(key, status)


def forget(namespace: str, name: str) -> None:
    """Remove the series of a deployment that was deleted."""
    for gauge in _GAUGES:
        gauge.forget((namespace, name))
    for counter in _COUNTERS:
        counter.remove_by_labels({"namespace": namespace, "name": name})


def forget_all() -> None:
    """Remove the series of all deployments. A replica that is no longer the leader must not export old values."""
    for gauge in _GAUGES:
        gauge.clear()
    for counter in _COUNTERS:
        counter.clear()


def _set_known(gauge: DeploymentGauge, labels: tuple[str, ...], value: float | None) -> None:
    """Set ``gauge`` if the value is known. Otherwise it keeps its last value, as status does."""
    if value is not None:
        gauge.set(labels, value)


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


def _record_gains(key: Key, history: Iterable[DecisionRecord]) -> None:
    plans = (change for change in history if change.kind == "Plan")
    measured = next((change for change in plans if change.realised_gain_percent is not None), None)
    if measured is not None and measured.realised_gain_percent is not None:
        REALISED_GAIN.set(key, measured.realised_gain_percent / 100)
        EXPECTED_GAIN.set(key, (measured.expected_gain_percent or 0) / 100)


def _record_conditions(key: Key, status: Status) -> None:
    CONDITION.replace(key, {condition.type: _VALUES[condition.status] for condition in status.conditions})
