"""Metrics of the drift of drafts, by task. `metrics` exports them with the others."""

from __future__ import annotations

from specdecode_operator.gauges import DeploymentGauge
from specdecode_operator.state.drift_state import ALL_TASKS, DriftState
from specdecode_operator.types import Key

DRIFT_EVIDENCE = DeploymentGauge(
    "specdecode_draft_drift_evidence",
    "Evidence that a task is slower than its baseline; 1 raises the alarm.",
    ["namespace", "name", "task"],
)
DRIFT_LOSS = DeploymentGauge(
    "specdecode_draft_loss_ratio",
    "Speed that a task lost against its baseline; 0.1 is 10 % slower, below 0 it is faster.",
    ["namespace", "name", "task"],
)

_tasks_by_key: dict[Key, frozenset[str]] = {}
"""Tasks that have series now."""


def record_drift(key: Key, drift: DriftState) -> None:
    """Set the series of tasks with a baseline, and remove those of tasks without one."""
    known = [task for task in drift.tasks if not task.is_learning and task.task != ALL_TASKS]
    for task in known:
        DRIFT_EVIDENCE.set((*key, task.task), task.evidence)
        DRIFT_LOSS.set((*key, task.task), task.loss)
    names = frozenset(task.task for task in known)
    for name in _tasks_by_key.pop(key, frozenset()) - names:
        DRIFT_EVIDENCE.remove(*key, name)
        DRIFT_LOSS.remove(*key, name)
    if names:
        _tasks_by_key[key] = names


def forget_drift(key: Key | None = None) -> None:
    """Drop what is known of one deployment, or of all. The gauges remove their series themselves."""
    if key is None:
        _tasks_by_key.clear()
    else:
        _tasks_by_key.pop(key, None)
