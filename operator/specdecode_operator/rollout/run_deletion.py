"""Deletion of what runs and drafts leave on the claim: the folder of a run without a verdict, and old drafts. Pure.

A Job deletes its text before it writes a verdict, and everything of earlier runs before it begins. A Job that was
killed deletes nothing, and the next run may be far away. Therefore another Job deletes the folder of such a run.
"""

from __future__ import annotations

from collections.abc import Iterable

from specdecode_operator.drafts.run_places import deletion_id, published_hash, published_prefix
from specdecode_operator.rollout.assignment import candidate_name
from specdecode_operator.rollout.observed_events import Detection, Facts
from specdecode_operator.rollout.run_events import jobs_with_id
from specdecode_operator.state.draft_record import DraftRecord, RunRecord
from specdecode_operator.times import back_off
from specdecode_operator.types import Deployment, Observation

FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 600.0, 86_400.0
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
    pause = back_off(failures, first=FIRST_RETRY_SECONDS, most=MAX_RETRY_SECONDS)
    noted = {"losses": failures, "reason": job.status.reason, "retry_at": facts.now + pause}
    return Detection(record=record.model_copy(update={"undeleted_run": run.model_copy(update=noted)}))


def run_to_delete(deployment: Deployment, observed: Observation, now: float) -> RunRecord | None:
    """Return the run whose folder a Job is to delete now; None without one, and while a Job of it exists."""
    run = observed.session.drafts.undeleted_run
    if run is None or now < run.retry_at or observed.jobs_problem:
        return None
    mine = (job for one in (run.id, deletion_id(run.id)) for job in jobs_with_id(observed.jobs, deployment, one))
    return run if next(mine, None) is None else None


def needed_drafts(deployment: Deployment, record: DraftRecord, place: str, uris: Iterable[str]) -> tuple[str, ...]:
    """Return the hashes of the published drafts that a Job must not delete.

    Args:
        deployment: The resource.
        record: Its stored rollout.
        place: URI below which the drafts lie.
        uris: URIs of all drafts of the spec.
    """
    candidate = deployment.spec.draft_rollout.candidate
    known = {record.current, record.candidate, record.previous or "", record.spec_hash}
    known |= {entry.hash for entry in record.lineage} | set(record.uris)
    if candidate is not None:
        known.add(candidate_name(candidate))
    prefix = published_prefix(place, deployment.name)
    named = {
        published_hash(uri, prefix) for uri in (*uris, *record.uris.values(), *([candidate.uri] if candidate else []))
    }
    return tuple(sorted((known | named) - {""}))
