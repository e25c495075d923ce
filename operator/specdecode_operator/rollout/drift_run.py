"""Training runs that a drift or a schedule asks for. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from specdecode_operator.api.v1alpha1 import Cause, Spec
from specdecode_operator.drafts.drift import FIRST_RECOVERY, TaskLoss, Worth, next_time, worth_of_run
from specdecode_operator.errors import SpecError
from specdecode_operator.rollout.assignment import Facts
from specdecode_operator.state.learned import DriftState
from specdecode_operator.times import in_words

# Worth of a training run, from the stored drift of a deployment's draft. Pure.

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


# Requests of training runs: a stale draft whose repair is worth its device time, and times of the schedule.


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
    """Return the reason for a training run that no user requested, from the drift stored by the previous decision.

    Raises:
        SpecError: The schedule is not valid.
    """
    spec, drift = facts.deployment.spec, facts.observed.session.learned.drift
    planned = _next_planned(spec, drift, facts.now)
    if spec.distillation.trigger.mode == "Manual" or spec.speculation.mode == "Off" or not drift.draft:
        return None
    reason = _reason(spec, drift, planned, facts.now)
    if reason is None:
        return None
    cause, text = reason
    since = min((task.since for task in drift.stale), default=0.0) if cause == "drift" else 0.0
    return TrainingReason(cause, text, lost_share(drift), since)


def _reason(spec: Spec, drift: DriftState, planned: float | None, now: float) -> tuple[Cause, str] | None:
    """Return the cause and the words of a reason to train now."""
    if drift.stale:
        worth = worth_of_drift(spec, drift)
        if worth.is_worth_it:
            tasks = ", ".join(f"task {task.task} lost {100 * task.loss:.0f} %" for task in drift.stale)
            return "drift", f"{tasks}: {worth.sentence()}"
    if planned is not None and planned <= now:
        return "schedule", f"the schedule {drift.schedule!r} has the time {in_words(planned)}"
    return None


def _next_planned(spec: Spec, drift: DriftState, now: float) -> float | None:
    """Return the first time of the schedule that no run has served. None without a schedule.

    A time that was missed, because the operator was gone or a run was under way, is served once, as soon as possible.
    """
    schedule = spec.distillation.trigger.schedule
    if not schedule:
        return None
    try:
        return next_time(schedule, drift.scheduled_from if drift.schedule == schedule else now)
    except ValueError as error:
        raise SpecError(f"distillation.trigger.schedule: {error}") from error
