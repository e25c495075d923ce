"""Training runs, the assignment of drafts to workers, and the evidence on which a rollout is decided, without I/O.

A run has an id that is never used twice. Its Job is created while ``job_uid`` of the stored run is empty, and is lost
if it was seen and is gone, so that an operator that was killed at any write creates no second Job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specdecode_operator.api.draft import UNRESOLVED, Phase, SpecDecodeDraft
from specdecode_operator.api.status import RunOutcome
from specdecode_operator.api.v1alpha1 import Cause, DraftRunEndStatus, Spec
from specdecode_operator.drafts.drift import COST_FACTOR, FIRST_RECOVERY, Worth
from specdecode_operator.drafts.job_status import (
    deletion_id,
    obstacle_in_phase,
    obstacle_in_spec,
    published_hash,
    published_prefix,
)
from specdecode_operator.state.learned import DraftRecord, DriftState, RunRecord
from specdecode_operator.times import back_off, iso
from specdecode_operator.types import Deployment, Observation, TrainingJob, Worker
from specdecode_worker.contract import Artifact, DraftAssignment, DraftTrial
from specdecode_worker.contract.distillation import DistillationVerdict


@dataclass(frozen=True, slots=True)
class Facts:
    """Inputs of one step of a rollout."""

    deployment: Deployment
    observed: Observation
    now: float


def assignment_of(record: DraftRecord, deployment: Deployment) -> DraftAssignment | None:
    """Return the assignment. None until a candidate was offered: each worker then runs the draft of its config."""
    draft = deployment.spec.speculation.draft
    if not record.is_used or draft is None:
        return None
    return DraftAssignment(
        spec_draft=draft.uri,
        target=deployment.spec.model.target,
        stable=_artifact(record, record.current),
        trial=_trial(record),
    )


def choose_canary(observed: Observation, draft: str) -> Worker | None:
    """Return the worker that tries the candidate: the oldest that is ready, healthy and runs ``draft``, or None."""
    collapsed = {pod.uid for pod in observed.session.learned.pods if pod.collapsed_since is not None}
    able = [worker for worker in observed.workers if worker.uid not in collapsed and _is_able(worker, draft)]
    return min(able, key=lambda worker: (worker.created_at or 0, worker.name), default=None)


def _is_able(worker: Worker, draft: str) -> bool:
    report = worker.report
    if report is None or not worker.ready or worker.leaving or report.draining:
        return False
    return report.draft.hash == draft and report.draft.problem is None


def _artifact(record: DraftRecord, draft: str) -> Artifact | None:
    known = "" if draft.startswith(UNRESOLVED) else draft
    return Artifact(uri=record.uris[draft], hash=known) if draft in record.uris else None


def _trial(record: DraftRecord) -> DraftTrial | None:
    trial, candidate = record.trial, _artifact(record, record.candidate)
    if record.phase is not Phase.CANARY or record.is_confirmed or trial is None or candidate is None or not trial.pod:
        return None
    return DraftTrial(
        id=trial.id,
        candidate=candidate,
        pod=trial.pod,
        block_requests=trial.block_requests,
        first_pair=trial.first_pair,
    )


def next_offer(observed: Observation) -> SpecDecodeDraft | None:
    """Return the draft that is taken up next: one that is to serve, or else the oldest candidate. None without any."""
    offered = [draft for draft in observed.drafts if draft.is_offered]
    replaced = {draft.spec.replaces for draft in offered if draft.spec.role == "Serving"}
    return min(
        offered,
        key=lambda one: (
            one.spec.role != "Serving",
            one.id in replaced,
            str(one.metadata.get("creationTimestamp", "")),
            one.name,
        ),
        default=None,
    )


def obstacle_of_offer(facts: Facts, record: DraftRecord) -> str:
    """Return why no offered draft is taken up now; empty if one is."""
    spec = facts.deployment.spec
    if record.phase not in (Phase.SERVING, Phase.COOLDOWN):
        return f"the phase is {record.phase}"
    if spec.speculation.method != "eagle3":
        return f"speculation.method is {spec.speculation.method}; only eagle3 drafts can be tried"
    if spec.speculation.mode == "Off":
        return "speculation.mode is Off, so no draft is used and none can be compared"
    if not (record.current or spec_hash_of(facts)):
        return "no worker has reported the draft to compare it with"
    return ""


def draft_with(facts: Facts, record: DraftRecord, one: str) -> SpecDecodeDraft | None:
    """Return the SpecDecodeDraft of a draft in the record; None if there is none."""
    uri = record.uris.get(one)
    drafts = facts.observed.drafts
    named = (draft for draft in drafts if draft.id == one)
    return next(named, next((draft for draft in drafts if not draft.spec.hash and draft.spec.uri == uri), None))


def begun_from(facts: Facts) -> dict[str, object]:
    """Return the fields of a record that say what a rollout or a training run begins from: spec and image."""
    spec = facts.deployment.spec
    return {
        "spec_draft": spec.speculation.draft.uri if spec.speculation.draft else "",
        "method": spec.speculation.method,
        "target": spec.model.target,
        "image": image_of(facts.observed),
    }


def image_of(observed: Observation) -> str:
    """Return the image of the applied pod template; empty before the first one."""
    template = observed.session.learned.template
    return template.image if template else ""


def spec_hash_of(facts: Facts) -> str:
    """Return the hash of the spec's draft that most workers report; empty if none does."""
    draft = facts.deployment.spec.speculation.draft
    hashes = [
        report.draft.hash
        for report in facts.observed.reports
        if report.draft.hash and draft is not None and report.draft.uri in ("", draft.uri)
    ]
    return max(sorted(set(hashes)), key=hashes.count, default="")


# Training runs.

RUN_PHASES = (Phase.COLLECTING, Phase.DISTILLING)


def obstacle_of_run(facts: Facts, record: DraftRecord) -> str:
    """Return why no run can begin now; empty if one can."""
    known = obstacle_in_spec(facts.deployment.spec) or facts.observed.jobs_problem or obstacle_in_phase(record.phase)
    if known:
        return known
    if not (record.current or spec_hash_of(facts)):
        return "no worker has reported the draft to go on from"
    return ""


def begun_run(facts: Facts, record: DraftRecord, why: TrainingReason) -> dict[str, Any]:
    """Return the changes of a record with which a run begins."""
    spec = facts.deployment.spec
    uri = spec.speculation.draft.uri if spec.speculation.draft else ""
    run = RunRecord(
        id=f"{int(facts.now):x}",
        started=facts.now,
        reason=why.text[:1000],
        draft_uri=record.uris.get(record.current, uri),
        **storage_of(spec),
        loss=why.loss,
    )
    # Requests before the alarm are of the traffic that the draft was good at: learning from them repairs nothing.
    deleted = max(record.captures_deleted_before, why.stale_since)
    update: dict[str, Any] = {"run": run, "run_refusal": "", "captures_deleted_before": deleted}
    if not record.is_used:
        update |= {**begun_from(facts), "spec_hash": spec_hash_of(facts)}
    elif not record.spec_hash and not record.current:
        update["spec_hash"] = spec_hash_of(facts)
    return update


def storage_of(spec: Spec) -> dict[str, str]:
    """Return the fields of a run that say where its files and its draft lie."""
    storage = spec.distillation.storage
    if storage is None:
        return {"claim": "", "bucket": "", "endpoint": ""}
    return {"claim": storage.claim, "bucket": storage.bucket, "endpoint": storage.endpoint or ""}


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


def verdict_text(verdict: DistillationVerdict) -> str:
    """Return a verdict with its gain and bounds in one line."""
    gain, words = verdict.gain, "; ".join(verdict.reasons)
    text = f"{verdict.verdict}: no gain could be measured"
    if gain is not None:
        bounds = f"{100 * gain.lower:+.1f} to {100 * gain.upper:+.1f} %"
        measured = f"gain {100 * gain.estimate:+.1f} % ({bounds}) over {verdict.conversations} conversations"
        text = f"{verdict.verdict}: {measured}"
    return f"{text}; {words}" if words else text


# Deletion of what runs and drafts leave on the claim: the folder of a run without a verdict, and old drafts. Pure.
#
# A Job deletes its text before it writes a verdict, and everything of earlier runs before it begins. A Job that was
# killed deletes nothing, and the next run may be far away. Therefore another Job deletes the folder of such a run.

FIRST_DELETION_RETRY_SECONDS, MAX_DELETION_RETRY_SECONDS = 600.0, 86_400.0
"""Pause after a Job that could not delete the folder; it doubles from failure to failure."""


def with_run_deleted(facts: Facts, record: DraftRecord) -> DraftRecord:
    """Return the record after the end of the Job that deletes the folder of a run."""
    run = record.undeleted_run
    if run is None:
        return record
    job = next(jobs_with_id(facts.observed.jobs, facts.deployment, deletion_id(run.id)), None)
    if job is None or job.deleting or not job.status.state.is_final or facts.now < run.retry_at:
        return record
    if job.status.completed:
        return record.model_copy(update={"undeleted_run": None})
    failures = run.losses + 1
    pause = back_off(failures, first=FIRST_DELETION_RETRY_SECONDS, most=MAX_DELETION_RETRY_SECONDS)
    noted = {"losses": failures, "reason": job.status.reason, "retry_at": facts.now + pause}
    return record.model_copy(update={"undeleted_run": run.model_copy(update=noted)})


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


# End of a training run in the stored record: its outcome and its numbers.

_WITHOUT_TEXT = ("Better", "NotBetter", "Poisoned")
"""Outcomes of runs whose Job deleted their text before it wrote its verdict."""
POD_END_SECONDS = 180.0
"""Time in which the pods of a deleted Job have ended: their grace period and a minute."""


def with_run_end(
    before: DraftRecord,
    after: DraftRecord,
    outcome: RunOutcome,
    reason: str,
    verdict: DistillationVerdict | None,
    facts: Facts,
) -> DraftRecord:
    """Return the record with the end of the run that was under way."""
    ended, run = _ended(before, outcome, reason, verdict, facts), before.run
    update: dict[str, Any] = {
        "run": None,
        "last_run": ended,
        "last_verdict": f"run {ended.id}: {outcome}: {reason}"[:1000],
        "run_outcomes": {**before.run_outcomes, outcome: before.run_outcomes.get(outcome, 0) + 1},
    }
    if run is not None and run.claim and before.phase is Phase.DISTILLING and outcome not in _WITHOUT_TEXT:
        # Its Job may have left captured text. A Job of its own deletes it, as soon as the pods have ended.
        wait = {"job_uid": "", "losses": 0, "reason": "", "retry_at": facts.now + POD_END_SECONDS}
        update["undeleted_run"] = run.model_copy(update=wait)
    if outcome in ("Better", "NotBetter"):
        update["runs_not_better"] = 0 if outcome == "Better" else before.runs_not_better + 1
        update["run_device_seconds"] = ended.device_seconds
    if outcome == "Better" and verdict is not None and run is not None:
        recovery = recovery_of(verdict, run.loss)
        update["recovery"] = before.recovery if recovery is None else recovery
    return after.model_copy(update=update)


def recovery_of(verdict: DistillationVerdict, loss: float) -> float | None:
    """Return the share of a loss that a new draft recovers: the device time that it saves, over the time lost.

    None if the loss is unknown or the verdict has no gain.
    """
    if verdict.gain is None or loss <= 0:
        return None
    gain = max(verdict.gain.estimate, 0.0)
    return min(1.0, gain / (1 + gain) / loss)


def _ended(
    before: DraftRecord, outcome: RunOutcome, reason: str, verdict: DistillationVerdict | None, facts: Facts
) -> DraftRunEndStatus:
    run = before.run.id if before.run else "-"
    ended = DraftRunEndStatus(id=run, time=iso(facts.now), outcome=outcome, reason=reason[:1000])
    if verdict is None:
        return ended
    gain, devices = verdict.gain, max(1, facts.deployment.spec.distillation.job_devices)
    return ended.model_copy(
        update={
            "hash": verdict.draft.hash if verdict.draft else None,
            "gain_percent": _percent(gain.estimate) if gain else None,
            "least_gain_percent": _percent(gain.lower) if gain else None,
            "most_gain_percent": _percent(gain.upper) if gain else None,
            "conversations": verdict.conversations,
            "device_seconds": round(verdict.seconds * devices, 1),
        }
    )


def _percent(share: float) -> float:
    return round(100 * share, 1)


# Training runs that a drift asks for, and what they are worth.

PAYBACK_DAYS = 7.0
"""Days within which a run must save twice the device time that it takes."""
LEAST_DAYS = 0.25
"""Days of measurements below which the decode time a day is that of this time, so that a busy minute is no busy day."""


def worth_of_drift(spec: Spec, record: DraftRecord, drift: DriftState) -> Worth:
    """Return the worth of a run that repairs the present drift. Without drift nothing is lost."""
    lost = lost_share(drift) * decode_seconds_per_day(spec, drift) * PAYBACK_DAYS
    recovery = FIRST_RECOVERY if record.recovery is None else record.recovery
    return Worth(lost, recovery * lost, COST_FACTOR * (record.run_device_seconds or first_run_seconds(spec)))


def lost_share(drift: DriftState) -> float:
    """Return the share of the decode device time that stale drafts cost."""
    steps = sum(task.steps for task in drift.own_tasks)
    return sum(task.steps * max(0.0, task.loss) for task in drift.stale) / steps if steps else 0.0


def decode_seconds_per_day(spec: Spec, drift: DriftState) -> float:
    """Return the device seconds of decoding a day, all workers and all their devices together."""
    return max(1, spec.worker_devices) * drift.decode_seconds / max(drift.decode_days, LEAST_DAYS)


def first_run_seconds(spec: Spec) -> float:
    """Return the device seconds that a run may take at most: the estimate before the first one."""
    return spec.distillation.time_limit_seconds * max(1, spec.distillation.job_devices)


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
    spec, session = facts.deployment.spec, facts.observed.session
    drift = session.learned.drift
    if spec.distillation.trigger.mode == "Manual" or spec.speculation.mode == "Off" or not drift.stale:
        return None
    worth = worth_of_drift(spec, session.drafts, drift)
    if not worth.is_worth_it:
        return None
    tasks = ", ".join(f"task {task.task} lost {100 * task.loss:.0f} %" for task in drift.stale)
    since = min(task.since for task in drift.stale)
    return TrainingReason("drift", f"{tasks}: {worth.sentence()}", lost_share(drift), since)
