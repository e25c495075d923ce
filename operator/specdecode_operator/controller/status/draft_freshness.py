"""Condition DraftFresh: whether a task became slower than its baseline, and by how much."""

from __future__ import annotations

import math

from specdecode_operator.api.v1alpha1 import ConditionType, seconds_of
from specdecode_operator.controller.status.condition_state import ConditionState
from specdecode_operator.drafts.baseline import DAY_SECONDS
from specdecode_operator.drafts.drift import BATCH_REQUESTS
from specdecode_operator.rollout.drift_worth import worth_of_drift
from specdecode_operator.state.drift_state import ALL_TASKS, DriftState, TaskDrift
from specdecode_operator.times import in_words
from specdecode_operator.types import Deployment, Observation

_MINUTE = (60, "minute")
_UNITS = ((DAY_SECONDS, "day"), (3600, "hour"), _MINUTE)


def draft_fresh(deployment: Deployment, observed: Observation, now: float) -> ConditionState | None:
    """Return the condition. None until a worker has reported its draft, and while no draft is used."""
    drift, kind = observed.session.learned.drift, ConditionType.draft_fresh
    if not drift.draft or deployment.spec.speculation.mode == "Off":
        return None
    if drift.stale:
        tasks = "; ".join(_slower(task) for task in drift.stale)
        message = f"{tasks}. {_sentence(worth_of_drift(deployment.spec, drift).sentence())}"
        return ConditionState(kind, "False", "DraftStale", message, True)
    trigger = deployment.spec.distillation.trigger
    if not drift.watched:
        return ConditionState(kind, "Unknown", "LearningBaseline", _learning(drift, trigger.baseline, now))
    if drift.mix is not None:
        message = f"{_slower(drift.mix)}, and no task is: the mix of tasks changed"
        return ConditionState(kind, "True", "MixChanged", message)
    losses = ", ".join(f"{task.task} {round(-100 * task.loss):+d} %" for task in drift.watched)
    return ConditionState(kind, "True", "Fresh", f"speed against the baseline of {trigger.baseline}: {losses}")


def _slower(task: TaskDrift) -> str:
    name = "all tasks together" if task.task == ALL_TASKS else f"task {task.task}"
    return f"{name}: {100 * task.loss:.0f} % slower than the baseline, found {in_words(task.since)}"


def _learning(drift: DriftState, duration: str, now: float) -> str:
    """Return the time that is left, and what began the baseline."""
    renewed = f"; {drift.renewed}" if drift.renewed else ""
    began = [task.began for task in drift.own_tasks if task.began]
    if not began:
        return f"the baseline takes {duration} from the first {BATCH_REQUESTS} requests on{renewed}"
    left = seconds_of(duration) - (now - min(began))
    if left <= 0:
        return f"{duration} had too few requests for a baseline, so it is still learnt{renewed}"
    size, unit = next((one for one in _UNITS if left > one[0]), _MINUTE)
    count = math.ceil(left / size)
    return f"the baseline is learnt, {count} {unit if count == 1 else unit + 's'} left{renewed}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
