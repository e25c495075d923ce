"""End of a training run in the stored record: its outcome, its numbers, and the lineage of a draft without a trial."""

from __future__ import annotations

from specdecode_operator.api.draft_status import RunOutcome
from specdecode_operator.api.v1alpha1 import DraftLineageStatus, DraftRunEndStatus, Spec
from specdecode_operator.drafts.lifecycle_table import EventKind, Phase
from specdecode_operator.rollout.observed_events import Detection
from specdecode_operator.rollout.run_events import RUN_PHASES
from specdecode_operator.state.draft_record import DraftRecord
from specdecode_operator.times import iso
from specdecode_worker.contract.distillation import DistillationVerdict

_OUTCOMES: dict[EventKind, RunOutcome] = {
    EventKind.JOB_BETTER: "Better",
    EventKind.JOB_NOT_BETTER: "NotBetter",
    EventKind.JOB_FAILED: "Failed",
    EventKind.CAPTURES_POISONED: "Poisoned",
    EventKind.TIME_OVER: "Expired",
    EventKind.USER_REJECT: "Rejected",
    EventKind.USER_ROLLBACK: "Rejected",
    EventKind.DRAFT_CHANGED: "Superseded",
    EventKind.TARGET_CHANGED: "Superseded",
}
"""Outcome of a run by the event that ended it."""
_WITHOUT_TEXT = ("Better", "NotBetter", "Poisoned")
"""Outcomes of runs whose Job deleted their text before it wrote its verdict."""
POD_END_SECONDS = 180.0
"""Time in which the pods of a deleted Job have ended: their grace period and a minute."""


def with_run_end(detection: Detection, after: DraftRecord, spec: Spec, now: float) -> DraftRecord:
    """Return the record after an event with the end of its run, if the event ended one.

    Args:
        detection: The event, with the record before it.
        after: Record after it.
        spec: Spec of the deployment.
        now: Operator's clock, in seconds.
    """
    before, event, verdict = detection.record, detection.event, detection.verdict
    if event is None or before.phase not in RUN_PHASES or after.phase in RUN_PHASES:
        return after
    outcome = _OUTCOMES.get(event.kind, "Failed")
    ended = _ended(before, outcome, detection, spec, now)
    update: dict[str, object] = {
        "run": None,
        "last_run": ended,
        "last_verdict": f"run {ended.id}: {outcome}: {detection.reason}"[:1000],
        "run_outcomes": {**before.run_outcomes, outcome: before.run_outcomes.get(outcome, 0) + 1},
    }
    if (
        before.run is not None
        and before.run.claim
        and before.phase is Phase.DISTILLING
        and outcome not in _WITHOUT_TEXT
    ):
        # Its Job may have left captured text. A Job of its own deletes it, as soon as the pods have ended.
        wait = {"job_uid": "", "losses": 0, "reason": "", "retry_at": now + POD_END_SECONDS}
        update["undeleted_run"] = before.run.model_copy(update=wait)
    if outcome in ("Better", "NotBetter"):
        update["runs_not_better"] = 0 if outcome == "Better" else before.runs_not_better + 1
        update["run_device_seconds"] = ended.device_seconds
    if outcome == "Better" and verdict is not None and before.run is not None:
        recovery = recovery_of(verdict, before.run.loss)
        update["recovery"] = before.recovery if recovery is None else recovery
    if after.phase is Phase.PROMOTING:
        entry = DraftLineageStatus(
            hash=after.current,
            uri=after.uris.get(after.current),
            time=iso(now),
            outcome="Promoted",
            gain_percent=ended.gain_percent,
            reason=f"mode Direct: {detection.reason}"[:1000],
        )
        after = after.with_ended(entry)
    return after.model_copy(update=update)


def recovery_of(verdict: DistillationVerdict, loss: float) -> float | None:
    """Return the share of a loss that a new draft recovers: the device time that it saves, over the time lost.

    None if the loss is unknown or the verdict has no gain.
    """
    if verdict.gain is None or loss <= 0:
        return None
    gain = max(verdict.gain.estimate, 0.0)
    return min(1.0, gain / (1 + gain) / loss)


def _ended(before: DraftRecord, outcome: RunOutcome, detection: Detection, spec: Spec, now: float) -> DraftRunEndStatus:
    verdict = detection.verdict
    ended = DraftRunEndStatus(
        id=before.run.id if before.run else "-", time=iso(now), outcome=outcome, reason=detection.reason[:1000]
    )
    if verdict is None:
        return ended
    gain = verdict.gain
    return ended.model_copy(
        update={
            "hash": verdict.draft.hash if verdict.draft else None,
            "gain_percent": _percent(gain.estimate) if gain else None,
            "least_gain_percent": _percent(gain.lower) if gain else None,
            "most_gain_percent": _percent(gain.upper) if gain else None,
            "conversations": verdict.conversations,
            "device_seconds": round(verdict.seconds * max(1, spec.distillation.job_devices), 1),
        }
    )


def _percent(share: float) -> float:
    return round(100 * share, 1)
