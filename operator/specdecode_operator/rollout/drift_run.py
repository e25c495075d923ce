"""Requests of training runs: a stale draft whose repair is worth its device time, and times of the schedule."""

from __future__ import annotations

from specdecode_operator.api.v1alpha1 import Cause, Spec
from specdecode_operator.drafts.lifecycle import Event
from specdecode_operator.drafts.lifecycle_table import EventKind, Phase
from specdecode_operator.drafts.schedule import next_time
from specdecode_operator.errors import SpecError
from specdecode_operator.rollout.drift_worth import lost_share, worth_of_drift
from specdecode_operator.rollout.observed_events import Detection, Facts
from specdecode_operator.state.draft_record import DraftRecord
from specdecode_operator.state.drift_state import DriftState
from specdecode_operator.times import in_words


def find_drift_run(facts: Facts, record: DraftRecord) -> Detection | None:
    """Find a reason for a training run, from the drift that was stored with the decision before.

    Raises:
        SpecError: The schedule is not valid.
    """
    spec, drift = facts.deployment.spec, facts.observed.session.learned.drift
    trigger = spec.distillation.trigger
    planned = _next_planned(spec, drift, facts.now)
    if trigger.mode == "Manual" or record.phase is not Phase.SERVING or spec.speculation.mode == "Off":
        return None
    if not drift.draft:
        return None
    reason = _reason(spec, drift, planned, facts.now)
    if reason is None:
        return None
    cause, text = reason
    event = Event(kind=EventKind.RUN_REQUESTED)
    since = min((task.since for task in drift.stale), default=0.0) if cause == "drift" else 0.0
    return Detection(record=record, event=event, reason=text, cause=cause, loss=lost_share(drift), stale_since=since)


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
