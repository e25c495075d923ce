"""Assignment of drafts in the plan, from the stored rollout, and the choice of the canary pod."""

from __future__ import annotations

import hashlib

from specdecode_operator.api.v1alpha1 import DraftCandidateSpec
from specdecode_operator.drafts.lifecycle_table import Phase
from specdecode_operator.state.draft_record import DraftRecord
from specdecode_operator.types import Deployment, Observation, Worker
from specdecode_worker.contract import Artifact, DraftAssignment, DraftTrial

UNRESOLVED = "by-uri-"
"""Beginning of the name of a candidate whose hash nobody knows yet."""


def candidate_name(candidate: DraftCandidateSpec) -> str:
    """Return the hash of a candidate, or a name of its URI until a worker reports the hash."""
    return candidate.hash or UNRESOLVED + hashlib.sha256(candidate.uri.encode()).hexdigest()[:12]


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
