"""Training runs that a drift asks for, and what they are worth. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from specdecode_operator.api.v1alpha1 import Cause, Spec
from specdecode_operator.drafts.drift import FIRST_RECOVERY, TaskLoss, Worth, worth_of_run
from specdecode_operator.rollout.assignment import Facts
from specdecode_operator.state.learned import DriftState

PAYBACK_DAYS = 7.0
"""Days within which a run must save twice the device time that it takes."""
LEAST_DAYS = 0.25
"""Days of measurements below which the decode time a day is that of this time, so that a busy minute is no busy day."""


def worth_of_drift(spec: Spec, drift: DriftState) -> Worth:
    """Return the worth of a run that repairs the present drift. Without drift nothing is lost."""
    return worth_of_run(
        _losses(drift),
        recovery=FIRST_RECOVERY if drift.recovery is None else drift.recovery,
        decode_seconds_per_day=decode_seconds_per_day(spec, drift),
        payback_days=PAYBACK_DAYS,
        run_seconds=drift.run_seconds or first_run_seconds(spec),
    )


def lost_share(drift: DriftState) -> float:
    """Return the share of the decode device time that stale drafts cost."""
    return sum(task.share * task.loss for task in _losses(drift))


def decode_seconds_per_day(spec: Spec, drift: DriftState) -> float:
    """Return the device seconds of decoding a day, all workers and all their devices together."""
    return max(1, spec.worker_devices) * drift.decode_seconds / max(drift.decode_days, LEAST_DAYS)


def first_run_seconds(spec: Spec) -> float:
    """Return the device seconds that a run may take at most: the estimate before the first one."""
    return spec.distillation.time_limit_seconds * max(1, spec.distillation.job_devices)


def _losses(drift: DriftState) -> list[TaskLoss]:
    steps = sum(task.steps for task in drift.own_tasks)
    return [TaskLoss(task.task, task.steps / steps if steps else 0.0, max(0.0, task.loss)) for task in drift.stale]


@dataclass(frozen=True, slots=True)
class TrainingReason:
    """Reason for a training run."""

    cause: Cause
    text: str
    loss: float = 0.0
    """Share of device time that a stale draft costs."""
    stale_since: float = 0.0
    """Time of the first alarm, where drift is the reason; 0 otherwise."""


def reason_to_train(facts: Facts) -> TrainingReason | None:
    """Return the reason for a run that no user requested: a stale draft whose repair is worth its device time."""
    spec, drift = facts.deployment.spec, facts.observed.session.learned.drift
    if spec.distillation.trigger.mode == "Manual" or spec.speculation.mode == "Off" or not drift.stale:
        return None
    worth = worth_of_drift(spec, drift)
    if not worth.is_worth_it:
        return None
    tasks = ", ".join(f"task {task.task} lost {100 * task.loss:.0f} %" for task in drift.stale)
    since = min(task.since for task in drift.stale)
    return TrainingReason("drift", f"{tasks}: {worth.sentence()}", lost_share(drift), since)
