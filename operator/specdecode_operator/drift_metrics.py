"""Metrics of the drift of drafts, by task. `metrics` exports them with the others."""

from __future__ import annotations

from specdecode_operator.gauges import TaskGauge
from specdecode_operator.state.drift_state import DriftState
from specdecode_operator.types import Key

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
