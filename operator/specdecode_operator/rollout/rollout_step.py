"""One step of the rollout of drafts: events of an observation move the stored record. Pure.

The record is stored before anything that follows from it. Everything that follows is a function of the record alone
(`assignment`, `DraftRecord.planned_draft`), so that an operator that was killed goes on from the stored record.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdecode_operator.api.draft import TrialRecord
from specdecode_operator.api.status import Outcome
from specdecode_operator.api.v1alpha1 import Decision as DecisionRecord
from specdecode_operator.api.v1alpha1 import DraftLineageStatus
from specdecode_operator.drafts.lifecycle import Event, EventKind, Mode, Phase, advance
from specdecode_operator.rollout.drift_run import find_drift_run
from specdecode_operator.rollout.observed_events import (
    DETECTORS,
    OFFERS,
    Detection,
    Facts,
    choose_canary,
)
from specdecode_operator.rollout.runs import RUN_DETECTORS, find_run_deletion, with_run, with_run_end
from specdecode_operator.rollout.trial_evidence import evidence_text, gain_of
from specdecode_operator.state.draft_record import DraftRecord
from specdecode_operator.times import iso
from specdecode_operator.types import Deployment, Observation

_OUTCOMES: dict[EventKind, Outcome] = {
    EventKind.CANARY_BETTER: "Promoted",
    EventKind.USER_PROMOTE: "Promoted",
    EventKind.CANARY_WORSE: "RolledBack",
    EventKind.CANARY_UNDECIDED: "Undecided",
    EventKind.CANARY_POD_LOST: "Failed",
    EventKind.LOAD_REFUSED: "Refused",
    EventKind.ARTEFACT_LOST: "Refused",
    EventKind.TIME_OVER: "Expired",
    EventKind.USER_REJECT: "Rejected",
    EventKind.USER_ROLLBACK: "RolledBack",
    EventKind.DRAFT_CHANGED: "Superseded",
    EventKind.TARGET_CHANGED: "Superseded",
    EventKind.IMAGE_CHANGED: "Superseded",
}
"""Outcome of a candidate by the event that ended its trial or its promotion."""


MAX_PAIRS = 120
"""Pairs after which a trial without a verdict ends as undecided."""


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """Result of one step."""

    record: DraftRecord
    changes: tuple[DecisionRecord, ...] = ()
    """Transitions of this step for Events and history, oldest first."""


def step_rollout(deployment: Deployment, observed: Observation, *, now: float) -> RolloutStep:
    """Return the record after what was observed. A paused deployment keeps its record."""
    record, facts = observed.session.drafts, Facts(deployment, observed, now)
    if deployment.spec.paused:
        return RolloutStep(record)
    changes: list[DecisionRecord] = []
    if record.is_used:
        record = record.model_copy(update={"mode": Mode(deployment.spec.draft_rollout.mode)})
    for detect in (*(DETECTORS if record.is_used else OFFERS), find_drift_run, *RUN_DETECTORS, find_run_deletion):
        detection = detect(facts, record)
        if detection is not None:
            record, change = _advanced(with_run(detection, facts), facts)
            changes += [change] if change else []
    return RolloutStep(_carried_out(record, facts), tuple(changes))


def _advanced(detection: Detection, facts: Facts) -> tuple[DraftRecord, DecisionRecord | None]:
    """Return the record after an event, and its entry in the history."""
    before, event, now = detection.record, detection.event, facts.now
    if event is None:
        return before, None
    state, deletes_captures = advance(before.lifecycle, event)
    after = before.moved(state)
    if detection.previous:
        after = after.model_copy(update={"previous": detection.previous})
    if deletes_captures:
        after = after.model_copy(update={"captures_deleted_before": now})
    is_new = after.phase is not before.phase or after.is_confirmed != before.is_confirmed
    if is_new:
        after = after.model_copy(update={"since": now})
    if after.lifecycle == before.lifecycle and event.kind is not EventKind.JOB_LOST:
        return after, None
    after = with_run_end(detection, _concluded(detection, event, after, now), facts.deployment.spec, now)
    keep = {after.current, after.candidate, after.previous}
    after = after.model_copy(update={"uris": {draft: uri for draft, uri in after.uris.items() if draft in keep}})
    return after, _change(detection, after, now, detection.reason)


def _concluded(detection: Detection, event: Event, after: DraftRecord, now: float) -> DraftRecord:
    """Return the record with the end of a trial or a promotion in its lineage, and with the verdict in words."""
    before = detection.record
    ended = before.candidate or (after.current if event.kind is EventKind.USER_PROMOTE else before.current)
    outcome = _OUTCOMES.get(event.kind)
    if event.kind is EventKind.USER_ROLLBACK and before.phase is Phase.CANARY:
        outcome = "Rejected"
    is_promoted = outcome == "Promoted" and after.current == ended and before.current != ended
    is_dropped = outcome != "Promoted" and ended and ended not in (after.candidate, after.current)
    if outcome is None or not (is_promoted or is_dropped):
        is_confirmed = after.is_confirmed and not before.is_confirmed
        verdict = f"{ended[:12]} waits for its role Serving (kubectl specdecode promote): {detection.reason}"
        return after.model_copy(update={"last_verdict": verdict[:1000]}) if is_confirmed else after
    gain = gain_of(before.trial) if before.trial else None
    entry = DraftLineageStatus(
        hash=ended,
        uri=before.uris.get(ended),
        time=iso(now),
        outcome=outcome,
        pairs=len(before.trial.pairs) if before.trial else 0,
        gain_percent=round(100 * gain.mean, 1) if gain else None,
        reason=detection.reason[:1000],
    )
    return after.with_ended(entry).model_copy(
        update={
            "last_verdict": f"{outcome} {ended[:12]}: {detection.reason}"[:1000],
            "refusal": detection.reason[:1000] if outcome == "Refused" else "",
        }
    )


def _change(detection: Detection, after: DraftRecord, now: float, reason: str) -> DecisionRecord:
    before = detection.record
    gain = gain_of(before.trial) if before.trial else None
    is_promoted = after.current != before.current and after.current == before.candidate
    verdict = detection.verdict.gain if detection.verdict else None
    return DecisionRecord(
        time=iso(now),
        kind="Draft",
        load="drafts",
        before=_state_text(before),
        after=_state_text(after),
        measured=evidence_text(before.trial) if before.trial else None,
        expected_gain_percent=round(100 * verdict.estimate, 1) if verdict else None,
        realised_gain_percent=round(100 * gain.mean, 1) if gain and is_promoted else None,
        cause=detection.cause,
        reason=reason[:4000],
    )


def _state_text(record: DraftRecord) -> str:
    draft = record.candidate or record.current
    return f"{record.phase} {draft[:12]}" if draft else f"{record.phase} with the draft of the spec"


def _carried_out(record: DraftRecord, facts: Facts) -> DraftRecord:
    """Return the record with a trial in phase Canary, and without one in others."""
    if record.phase is Phase.CANARY:
        return _run_canary(record, facts)
    return record if record.trial is None else record.model_copy(update={"trial": None})


def _run_canary(record: DraftRecord, facts: Facts) -> DraftRecord:
    """Return the record with a trial, and with a pod that runs it if one is able to."""
    if record.is_confirmed:
        return record
    trial = record.trial
    if trial is None:
        spec = facts.deployment.spec.draft_rollout
        trial = TrialRecord(
            block_requests=spec.block_requests,
            max_pairs=MAX_PAIRS,
            min_gain=spec.min_gain_percent / 100,
        )
        record = record.model_copy(update={"trial": trial})
    worker = None if trial.pod else choose_canary(facts.observed, record.current or record.spec_hash)
    if worker is None or worker.report is None:
        return record
    # Another id for every pod: a worker that restarted may run pairs again that were counted, by the plan it mounts.
    chosen = {
        "id": f"{record.candidate[:40]}-{int(facts.now):x}",
        "pod": worker.name,
        "pod_uid": worker.uid,
        "boot": worker.report.boot_id,
        "first_pair": trial.next_pair,
    }
    return record.model_copy(update={"trial": trial.model_copy(update=chosen)})
