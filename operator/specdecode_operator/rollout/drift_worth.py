"""Worth of a training run, from the stored drift of a deployment's draft. Pure."""

from __future__ import annotations

from specdecode_operator.api.v1alpha1 import Spec
from specdecode_operator.drafts.worth import FIRST_RECOVERY, TaskLoss, Worth, worth_of_run
from specdecode_operator.state.drift_state import DriftState

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
