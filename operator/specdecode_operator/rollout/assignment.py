"""Assignment of drafts to workers, from the stored rollout, and what a rollout is decided from. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from specdecode_operator.api.draft import UNRESOLVED, Phase, SpecDecodeDraft
from specdecode_operator.state.draft_record import DraftRecord
from specdecode_operator.types import Deployment, Observation, Worker
from specdecode_worker.contract import Artifact, DraftAssignment, DraftTrial


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
    """Return the fields of a record that say what a rollout or a training run begins from: spec, image and request."""
    spec = facts.deployment.spec
    return {
        "request": facts.deployment.spec.distillation.trigger.request or "",
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
