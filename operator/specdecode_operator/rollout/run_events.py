"""Events of a training run: a request, enough captured requests, and the state of the Job. Pure.

A run has an id that is never used twice. The Job of a run is created while ``job_uid`` of the stored run is empty, and
is lost if it was seen and is gone. Both follow from the record and from what is in the cluster, so that an operator
that was killed at any write creates no second Job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from specdecode_operator.api.v1alpha1 import DistillationCaptureSpec, Spec, seconds_of
from specdecode_operator.drafts.lifecycle import Event
from specdecode_operator.drafts.lifecycle_table import EventKind, Phase
from specdecode_operator.drafts.run_obstacle import obstacle_in_phase, obstacle_in_spec
from specdecode_operator.drafts.run_places import deletion_id, problem_of_draft, published_prefix
from specdecode_operator.rollout.observed_events import Detection, Detector, Facts, begun_from, spec_hash_of
from specdecode_operator.state.draft_record import DraftRecord, RunRecord
from specdecode_operator.types import Deployment, Observation, TrainingJob
from specdecode_worker.contract.distillation import DistillationVerdict

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
