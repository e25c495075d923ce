"""Training runs: when one begins, what ends it, and what is deleted after it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from specdecode_operator.api.draft import SpecDecodeDraft
from specdecode_operator.api.status import RunOutcome
from specdecode_operator.api.v1alpha1 import (
    DistillationCaptureSpec,
    DraftLineageStatus,
    DraftRunEndStatus,
    Spec,
    seconds_of,
)
from specdecode_operator.drafts.job_status import (
    deletion_id,
    obstacle_in_phase,
    obstacle_in_spec,
    problem_of_draft,
    published_hash,
    published_prefix,
)
from specdecode_operator.drafts.lifecycle import Event, EventKind, Phase
from specdecode_operator.rollout.observed_events import (
    Detection,
    Detector,
    Facts,
    begun_from,
    spec_hash_of,
)
from specdecode_operator.state.draft_record import DraftRecord, RunRecord
from specdecode_operator.times import back_off, iso
from specdecode_operator.types import Deployment, Observation, TrainingJob
from specdecode_worker.contract.distillation import DistillationVerdict

# Events of a training run: a request, enough captured requests, and the state of the Job. Pure.
#
# A run has an id that is never used twice. The Job of a run is created while ``job_uid`` of the stored run is empty,
# and is lost if it was seen and is gone. Both follow from the record and from what is in the cluster, so that an
# operator that was killed at any write creates no second Job.

LOSS_LIMIT = 3
"""Losses of a run's Job after which the run fails."""
FIRST_RETRY_SECONDS = 60.0
"""Time from the loss of a Job to the next one; it doubles from loss to loss."""
RUN_PHASES = (Phase.COLLECTING, Phase.DISTILLING)


def obstacle_of_run(facts: Facts, record: DraftRecord) -> str:
    """Return why no run can begin now; empty if one can."""
    known = obstacle_in_spec(facts.deployment.spec) or facts.observed.jobs_problem or obstacle_in_phase(record.phase)
    if known:
        return known
    if not (record.current or spec_hash_of(facts)):
        return "no worker has reported the draft to go on from"
    return ""


def find_run_request(facts: Facts, record: DraftRecord) -> Detection | None:
    """Find a request to train that was not carried out yet."""
    request = facts.deployment.spec.distillation.trigger.request
    if request is None or request == record.request:
        return None
    refusal = obstacle_of_run(facts, record)
    noted = record.model_copy(update={"request": request, "run_refusal": refusal})
    if refusal:
        return Detection(record=noted)
    reason = f"a user requested {request!r}"
    return Detection(record=noted, event=Event(kind=EventKind.RUN_REQUESTED), reason=reason, cause="user")


def with_run(detection: Detection, facts: Facts) -> Detection:
    """Return the detection of a requested run with the run in its record; without the event if none can begin."""
    event, record = detection.event, detection.record
    if event is None or event.kind is not EventKind.RUN_REQUESTED or record.phase in RUN_PHASES:
        return detection
    if obstacle_of_run(facts, record):
        return Detection(record=record)
    spec = facts.deployment.spec
    uri = spec.speculation.draft.uri if spec.speculation.draft else ""
    run = RunRecord(
        id=f"{int(facts.now):x}",
        started=facts.now,
        reason=detection.reason[:1000],
        draft_uri=record.uris.get(record.current, uri),
        **_storage_of(spec),
        loss=detection.loss,
    )
    # Requests before the alarm are of the traffic that the draft was good at: learning from them repairs nothing.
    deleted = max(record.captures_deleted_before, detection.stale_since)
    update: dict[str, object] = {"run": run, "run_refusal": "", "captures_deleted_before": deleted}
    if not record.is_used:
        update |= {**begun_from(facts), "spec_hash": spec_hash_of(facts)}
    elif not record.spec_hash and not record.current:
        update["spec_hash"] = spec_hash_of(facts)
    return replace(detection, record=record.model_copy(update=update))


def _storage_of(spec: Spec) -> dict[str, str]:
    """Return the fields of a run that say where its files and its draft lie."""
    storage = spec.distillation.storage
    if storage is None:
        return {"claim": "", "bucket": "", "endpoint": ""}
    return {"claim": storage.claim, "bucket": storage.bucket, "endpoint": storage.endpoint or ""}


def find_run_event(facts: Facts, record: DraftRecord) -> Detection | None:
    """Find the next event of the run that is under way."""
    if record.phase not in RUN_PHASES:
        return None
    run, distillation = record.run, facts.deployment.spec.distillation
    if run is None:
        event = Event(kind=EventKind.USER_REJECT)
        return Detection(record=record, event=event, reason="the stored run could not be read")
    storage = _storage_of(facts.deployment.spec)
    if storage != {"claim": run.claim, "bucket": run.bucket, "endpoint": run.endpoint}:
        reason = f"distillation.storage is {' '.join(filter(None, storage.values())) or 'absent'} now"
        return Detection(record=record, event=Event(kind=EventKind.USER_REJECT), reason=reason, cause="user")
    if record.phase is Phase.DISTILLING:
        # Jobs that cannot be listed are not lost.
        return None if facts.observed.jobs_problem else _find_job_event(facts, record, run)
    if distillation.capture is None:
        reason = "distillation.capture is absent now"
        return Detection(record=record, event=Event(kind=EventKind.USER_REJECT), reason=reason, cause="user")
    needed = distillation.trigger.min_conversations
    count = captured_conversations(facts.observed, record, since_plan=True)
    if count < needed or facts.observed.jobs_problem:
        return None
    reason = f"the workers hold {count} captured conversations, of {needed} that a run needs"
    return Detection(record=record, event=Event(kind=EventKind.CAPTURES_READY), reason=reason, cause="run")


def captured_conversations(observed: Observation, record: DraftRecord, *, since_plan: bool = False) -> int:
    """Return the captured conversations of all workers.

    Args:
        observed: Workers with their reports.
        record: Rollout, which has the time before which captures are deleted. A worker that holds older ones has not
            deleted them yet, and does not count.
        since_plan: Count workers only that follow the latest plan.
    """
    plan, deleted = observed.session.learned.plan, record.captures_deleted_before
    least = plan.version if since_plan and plan is not None else 0
    captures = [report.capture for report in observed.reports if report.plan.version >= least and report.capture]
    return sum(one.conversations for one in captures if one.oldest is None or one.oldest >= deleted)


def job_of_run(jobs: tuple[TrainingJob, ...], deployment: Deployment, run: RunRecord) -> TrainingJob | None:
    """Return the Job of a run. One that is being deleted, or that the deployment does not own, is none."""
    return next((job for job in jobs_with_id(jobs, deployment, run.id) if not job.deleting), None)


def jobs_with_id(jobs: Iterable[TrainingJob], deployment: Deployment, run: str) -> Iterator[TrainingJob]:
    """Yield the deployment's Jobs with this id in their label, also those that are being deleted."""
    return (job for job in jobs if job.run == run and job.owner_uid == deployment.uid)


def jobs_to_delete(
    jobs: tuple[TrainingJob, ...], deployment: Deployment, record: DraftRecord
) -> tuple[TrainingJob, ...]:
    """Return the Jobs of the deployment that no run needs. One that deleted a folder, or failed to, has ended."""
    wanted = record.run.id if record.run is not None and record.phase is Phase.DISTILLING else None
    deletes = deletion_id(record.undeleted_run.id) if record.undeleted_run is not None else None
    mine = [job for job in jobs if job.owner_uid == deployment.uid and not job.deleting]
    return tuple(job for job in mine if job.run != wanted and (job.run != deletes or job.status.state.is_final))


def is_job_due(record: DraftRecord, observed: Observation, now: float) -> bool:
    """Return whether the Job of the run is to be created. Creating one that exists changes nothing."""
    run = record.run
    is_missing = run is not None and not run.job_uid and now >= run.retry_at
    return record.phase is Phase.DISTILLING and is_missing and not observed.jobs_problem


def _find_job_event(facts: Facts, record: DraftRecord, run: RunRecord) -> Detection | None:
    job = job_of_run(facts.observed.jobs, facts.deployment, run)
    if job is None:
        return _lost(facts, record, run) if run.job_uid else None
    if job.uid != run.job_uid:
        record = record.model_copy(update={"run": run.model_copy(update={"job_uid": job.uid})})
        if not job.status.state.is_final:
            return Detection(record=record)
    status = job.status
    if status.verdict is not None:
        return _judged(facts, record, run, status.verdict)
    if not status.state.is_final:
        return None
    reason = f"Job {job.name}: {status.state}" + (f": {status.reason}" if status.reason else "")
    return Detection(record=record, event=Event(kind=EventKind.JOB_FAILED), reason=reason)


def _lost(facts: Facts, record: DraftRecord, run: RunRecord) -> Detection:
    """Return the loss of a Job that was seen. It is created again after a while, or the run fails."""
    losses = run.losses + 1
    pause = FIRST_RETRY_SECONDS * 2.0 ** (losses - 1)
    noted = run.model_copy(update={"job_uid": "", "losses": losses, "retry_at": facts.now + pause})
    record = record.model_copy(update={"run": noted})
    reason = f"the Job of run {run.id} is gone (loss {losses} of {LOSS_LIMIT})"
    if losses >= LOSS_LIMIT:
        return Detection(record=record, event=Event(kind=EventKind.JOB_FAILED), reason=reason)
    reason = f"{reason}; it is created again in {pause:.0f} s"
    return Detection(record=record, event=Event(kind=EventKind.JOB_LOST), reason=reason)


def _judged(facts: Facts, record: DraftRecord, run: RunRecord, verdict: DistillationVerdict) -> Detection:
    """Return the event of a verdict. Its draft is taken only from the place that the Job was given."""
    words = "; ".join(verdict.reasons)
    if verdict.verdict == "failed":
        kind = EventKind.CAPTURES_POISONED if verdict.failure == "poisoned" else EventKind.JOB_FAILED
        reason = f"the run failed ({verdict.failure}): {words}"
        return Detection(record=record, event=Event(kind=kind), reason=reason, verdict=verdict)
    reason = f"{verdict.verdict}: {gain_text(verdict)}" + (f"; {words}" if words else "")
    if verdict.verdict != "better":
        event = Event(kind=EventKind.JOB_NOT_BETTER)
        return Detection(record=record, event=event, reason=reason, cause="run", verdict=verdict)
    draft = verdict.draft
    problem = problem_of_draft(draft, published_prefix(run.place, facts.deployment.name))
    if draft is not None and not problem and draft.hash == (record.current or record.spec_hash):
        problem = f"the new draft {draft.hash[:12]} is the one in use"
    if draft is None or problem:
        return Detection(record=record, event=Event(kind=EventKind.JOB_FAILED), reason=problem, verdict=verdict)
    noted = record.model_copy(update={"uris": {**record.uris, draft.hash: draft.uri}})
    event = Event(kind=EventKind.JOB_BETTER, draft=draft.hash)
    return Detection(record=noted, event=event, reason=f"{draft.uri} is {reason}", cause="run", verdict=verdict)


def gain_text(verdict: DistillationVerdict) -> str:
    """Return the gain of a verdict with its bounds."""
    gain = verdict.gain
    if gain is None:
        return "no gain could be measured"
    bounds = f"{100 * gain.lower:+.1f} to {100 * gain.upper:+.1f} %"
    return f"gain {100 * gain.estimate:+.1f} % ({bounds}) over {verdict.conversations} conversations"


def find_run_time_over(facts: Facts, record: DraftRecord) -> Detection | None:
    """Find a phase of a run that lasts longer than its limit.

    Captured requests that are older than maxAge are deleted, so collecting for longer collects no more. A Job may wait
    in a queue, but not until the requests that it was created for are gone.
    """
    distillation = facts.deployment.spec.distillation
    limit = seconds_of((distillation.capture or DistillationCaptureSpec()).max_age)
    if record.phase is Phase.DISTILLING:
        limit += distillation.time_limit_seconds
    if record.phase not in RUN_PHASES or facts.now - record.since < limit:
        return None
    count = captured_conversations(facts.observed, record)
    what = f" with {count} of {distillation.trigger.min_conversations} captured conversations"
    reason = f"{record.phase} lasted {limit:.0f} s{what if record.phase is Phase.COLLECTING else ''}"
    return Detection(record=record, event=Event(kind=EventKind.TIME_OVER), reason=reason)


RUN_DETECTORS: tuple[Detector, ...] = (find_run_request, find_run_event, find_run_time_over)
"""Detectors of training runs, in their order. They run for deployments without a rollout too."""


# Deletion of what runs and drafts leave on the claim: the folder of a run without a verdict, and old drafts. Pure.
#
# A Job deletes its text before it writes a verdict, and everything of earlier runs before it begins. A Job that was
# killed deletes nothing, and the next run may be far away. Therefore another Job deletes the folder of such a run.

FIRST_DELETION_RETRY_SECONDS, MAX_DELETION_RETRY_SECONDS = 600.0, 86_400.0
"""Pause after a Job that could not delete the folder; it doubles from failure to failure."""


def find_run_deletion(facts: Facts, record: DraftRecord) -> Detection | None:
    """Take note of the end of the Job that deletes the folder of a run."""
    run = record.undeleted_run
    if run is None:
        return None
    job = next(jobs_with_id(facts.observed.jobs, facts.deployment, deletion_id(run.id)), None)
    if job is None or job.deleting or not job.status.state.is_final or facts.now < run.retry_at:
        return None
    if job.status.completed:
        return Detection(record=record.model_copy(update={"undeleted_run": None}))
    failures = run.losses + 1
    pause = back_off(failures, first=FIRST_DELETION_RETRY_SECONDS, most=MAX_DELETION_RETRY_SECONDS)
    noted = {"losses": failures, "reason": job.status.reason, "retry_at": facts.now + pause}
    return Detection(record=record.model_copy(update={"undeleted_run": run.model_copy(update=noted)}))


def run_to_delete(deployment: Deployment, observed: Observation, now: float) -> RunRecord | None:
    """Return the run whose folder a Job is to delete now; None without one, and while a Job of it exists."""
    run = observed.session.drafts.undeleted_run
    if run is None or now < run.retry_at or observed.jobs_problem:
        return None
    mine = (job for one in (run.id, deletion_id(run.id)) for job in jobs_with_id(observed.jobs, deployment, one))
    return run if next(mine, None) is None else None


def needed_drafts(
    deployment: Deployment, record: DraftRecord, drafts: Sequence[SpecDecodeDraft], place: str, uris: Iterable[str]
) -> tuple[str, ...]:
    """Return the hashes of the published drafts that a Job must not delete.

    Args:
        deployment: The resource.
        record: Its stored rollout.
        drafts: Its SpecDecodeDrafts.
        place: URI below which the drafts lie.
        uris: URIs of all drafts of the spec.
    """
    known = {record.current, record.candidate, record.previous or "", record.spec_hash}
    known |= {entry.hash for entry in record.lineage} | set(record.uris) | {draft.id for draft in drafts}
    prefix = published_prefix(place, deployment.name)
    named = {published_hash(uri, prefix) for uri in (*uris, *record.uris.values(), *(one.spec.uri for one in drafts))}
    return tuple(sorted((known | named) - {""}))


# End of a training run in the stored record: its outcome, its numbers, and the lineage of a draft without a trial.

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
