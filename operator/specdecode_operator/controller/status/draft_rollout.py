"""Drafts in status: the section ``draft`` and the condition DraftRollout."""

from __future__ import annotations

from collections.abc import Iterator

from specdecode_operator.api.v1alpha1 import ConditionType, DraftStatus, DraftTrialStatus, DraftVersionStatus
from specdecode_operator.controller.status.condition_state import ConditionState
from specdecode_operator.controller.status.training_run import last_run_section, run_progress, run_section
from specdecode_operator.drafts.lifecycle_table import Phase
from specdecode_operator.rollout.assignment import UNRESOLVED
from specdecode_operator.rollout.observed_events import offer_of
from specdecode_operator.rollout.run_events import RUN_PHASES
from specdecode_operator.rollout.trial_evidence import evidence_text, gain_of
from specdecode_operator.state.draft_record import DraftRecord, TrialRecord
from specdecode_operator.types import Deployment, Observation

_UNDER_WAY = {
    Phase.COLLECTING: "Collecting",
    Phase.DISTILLING: "Distilling",
    Phase.CANARY: "Canary",
    Phase.PROMOTING: "Promoting",
    Phase.ROLLING_BACK: "RollingBack",
}


def draft_section(deployment: Deployment, observed: Observation, job_problem: str = "") -> DraftStatus | None:
    """Return the draft that the workers run, its rollout and the training of another one. None without a draft."""
    draft = deployment.spec.speculation.draft
    if draft is None:
        return None
    before, record = deployment.status.draft, observed.session.drafts
    known = next(_hashes(observed), before.hash if before else None)
    status = DraftStatus(hash=known, uri=draft.uri, lineage=record.lineage)
    if not record.is_used:
        return status
    return status.model_copy(
        update={
            "current": _version(record, record.current),
            "candidate": _version(record, record.candidate) if record.candidate else None,
            "previous": None if record.previous is None else _version(record, record.previous),
            "phase": str(record.phase),
            "trial": _trial(record.trial) if record.trial and record.phase is Phase.CANARY else None,
            "run": run_section(deployment, observed, job_problem),
            "last_run": last_run_section(deployment, observed, job_problem),
            "last_verdict": record.last_verdict or None,
        }
    )


def draft_rollout(deployment: Deployment, observed: Observation, job_problem: str = "") -> ConditionState | None:
    """Return whether a draft is trained, tried, promoted or rolled back. None until one was offered or asked for."""
    kind, record = ConditionType.draft_rollout, observed.session.drafts
    if record.problem:
        entry = f"the entry drafts of ConfigMap {deployment.name}-state"
        message = f"{entry} was not read, so the draft of the spec serves: {record.problem}"
        return ConditionState(kind, "False", "StateUnreadable", message, True)
    waiting = _waiting(deployment, record)
    if waiting is not None:
        return waiting
    if record.phase in RUN_PHASES:
        progress = run_progress(deployment, observed, job_problem)
        return ConditionState(kind, "True", _UNDER_WAY[record.phase], progress)
    if record.phase in _UNDER_WAY:
        return ConditionState(kind, "True", _under_way(record), _progress(record))
    if record.run_refusal:
        return ConditionState(kind, "False", "RunRefused", f"no run was begun: {record.run_refusal}", True)
    if observed.jobs_problem and deployment.spec.distillation.capture is not None:
        return ConditionState(kind, "False", "RunRefused", f"no run can begin: {observed.jobs_problem}", True)
    if not record.is_used:
        return None
    if record.refusal:
        return ConditionState(kind, "False", "CandidateRefused", record.refusal, True)
    if record.current:
        return ConditionState(kind, "False", "PromotedDraftServes", _promoted(record))
    return ConditionState(kind, "False", "NoRollout", record.last_verdict or "no candidate is tried")


def _promoted(record: DraftRecord) -> str:
    """Return that the spec does not name the draft that serves, and what makes it true for a restore from git."""
    uri = record.uris.get(record.current, "")
    return (
        f"the workers run {uri} ({record.current[:12]}), which was promoted; speculation.draft.uri names "
        f"{record.spec_draft}, to which a restore from git returns: set it to {uri}, which replaces the pods once"
    )


def _waiting(deployment: Deployment, record: DraftRecord) -> ConditionState | None:
    """Return the condition of a candidate that was not taken up yet."""
    offer, kind = offer_of(deployment), ConditionType.draft_rollout
    if not offer or offer == record.offered or record.phase in _UNDER_WAY:
        return None
    if deployment.spec.speculation.mode == "Off":
        message = "speculation.mode is Off, so no draft is used and none can be compared"
    else:
        message = "no worker has reported the draft to compare the candidate with"
    return ConditionState(kind, "False", "CandidateWaits", message)


def _under_way(record: DraftRecord) -> str:
    return "WaitsForUser" if record.is_confirmed and record.phase is Phase.CANARY else _UNDER_WAY[record.phase]


def _progress(record: DraftRecord) -> str:
    """Return a sentence on the rollout. It has no measurements, so that it changes with the phase alone."""
    draft = (record.candidate or record.current)[:12] or "the draft of the spec"
    if record.phase is Phase.PROMOTING:
        return f"the workers load {draft}"
    if record.phase is Phase.ROLLING_BACK:
        return f"the workers return to {record.current[:12] or 'the draft of the spec'}"
    if record.is_confirmed:
        decides = "draftRollout.approve or reject decides (kubectl specdecode promote or reject)"
        return f"{draft} is better: {evidence_text(record.trial)}; {decides}"
    pod = record.trial.pod if record.trial else ""
    return f"pod {pod}: it tries {draft}" if pod else f"no worker is ready to try {draft}"


def _trial(trial: TrialRecord) -> DraftTrialStatus:
    gain = gain_of(trial)
    shown = DraftTrialStatus(pod=trial.pod or None, pairs=len(trial.pairs))
    if gain is None:
        return shown
    return shown.model_copy(
        update={
            "gain_percent": _percent(gain.mean),
            "least_gain_percent": _percent(gain.least),
            "most_gain_percent": _percent(gain.most),
        }
    )


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 1)


def _version(record: DraftRecord, draft: str) -> DraftVersionStatus:
    """Return hash and URI of a draft; an empty hash is the draft of the spec."""
    if not draft:
        return DraftVersionStatus(hash=record.spec_hash or None, uri=record.spec_draft)
    known = None if draft.startswith(UNRESOLVED) else draft
    return DraftVersionStatus(hash=known, uri=record.uris.get(draft))


def _hashes(observed: Observation) -> Iterator[str]:
    return (report.draft.hash for report in observed.last_reports if report.draft.hash)
