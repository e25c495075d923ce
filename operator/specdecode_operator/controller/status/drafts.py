"""Drafts in status: their rollout, training runs and freshness."""

from __future__ import annotations

import math
from collections.abc import Iterator

from specdecode_operator import manifests
from specdecode_operator.api.draft import UNRESOLVED, Phase
from specdecode_operator.api.schema import MAX_TEXT
from specdecode_operator.api.v1alpha1 import (
    ConditionType,
    DraftRunEndStatus,
    DraftRunStatus,
    DraftStatus,
    DraftVersionStatus,
    seconds_of,
)
from specdecode_operator.controller.status.condition_state import ConditionState
from specdecode_operator.drafts.drift import BATCH_REQUESTS, DAY_SECONDS
from specdecode_operator.rollout.assignment import Facts, next_offer, obstacle_of_offer
from specdecode_operator.rollout.runs import RUN_PHASES, captured_conversations, job_of_run, worth_of_drift
from specdecode_operator.rollout.trial_evidence import evidence_text
from specdecode_operator.state.draft_record import DraftRecord, RunRecord
from specdecode_operator.state.learned import ALL_TASKS, DriftState, TaskDrift
from specdecode_operator.times import in_words, iso
from specdecode_operator.types import Deployment, Observation

# Condition DraftFresh: whether a task became slower than its baseline, and by how much.

_MINUTE = (60, "minute")
_UNITS = ((DAY_SECONDS, "day"), (3600, "hour"), _MINUTE)


def draft_fresh(deployment: Deployment, observed: Observation, now: float) -> ConditionState | None:
    """Return the condition. None until a worker has reported its draft, and while no draft is used."""
    drift, kind = observed.session.learned.drift, ConditionType.draft_fresh
    if not drift.draft or deployment.spec.speculation.mode == "Off":
        return None
    if drift.stale:
        tasks = "; ".join(_slower(task) for task in drift.stale)
        message = f"{tasks}. {_sentence(worth_of_drift(deployment.spec, drift).sentence())}"
        return ConditionState(kind, "False", "DraftStale", message, True)
    trigger = deployment.spec.distillation.trigger
    if not drift.watched:
        return ConditionState(kind, "Unknown", "LearningBaseline", _learning(drift, trigger.baseline, now))
    if drift.mix is not None:
        message = f"{_slower(drift.mix)}, and no task is: the mix of tasks changed"
        return ConditionState(kind, "True", "MixChanged", message)
    losses = ", ".join(f"{task.task} {round(-100 * task.loss):+d} %" for task in drift.watched)
    return ConditionState(kind, "True", "Fresh", f"speed against the baseline of {trigger.baseline}: {losses}")


def _slower(task: TaskDrift) -> str:
    name = "all tasks together" if task.task == ALL_TASKS else f"task {task.task}"
    return f"{name}: {100 * task.loss:.0f} % slower than the baseline, found {in_words(task.since)}"


def _learning(drift: DriftState, duration: str, now: float) -> str:
    """Return the time that is left, and what began the baseline."""
    renewed = f"; {drift.renewed}" if drift.renewed else ""
    began = [task.learning.began for task in drift.own_tasks if task.learning and task.learning.began]
    if not began:
        return f"the baseline takes {duration} from the first {BATCH_REQUESTS} requests on{renewed}"
    left = seconds_of(duration) - (now - min(began))
    if left <= 0:
        return f"{duration} had too few requests for a baseline, so it is still learnt{renewed}"
    size, unit = next((one for one in _UNITS if left > one[0]), _MINUTE)
    count = math.ceil(left / size)
    return f"the baseline is learnt, {count} {unit if count == 1 else unit + 's'} left{renewed}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


# Training run in status: its phase, its captured conversations, and its Job in the words of the cluster.

STEPS = 100
"""Steps in which the number of captured conversations is shown, so that status is not written with every report."""
ABSENT, REFUSED = "Absent", "Refused"


def run_section(deployment: Deployment, observed: Observation, job_problem: str) -> DraftRunStatus | None:
    """Return the training run that is under way; None without one.

    Args:
        deployment: The resource.
        observed: Workers, Jobs and the stored rollout of drafts.
        job_problem: Reason why the Job could not be created; empty if there is none.
    """
    record = observed.session.drafts
    run = record.run
    if run is None:
        return None
    shown = DraftRunStatus(id=run.id, started=iso(run.started), reason=run.reason, losses=run.losses)
    if record.phase is Phase.COLLECTING:
        needed = deployment.spec.distillation.trigger.min_conversations
        count = _stepped(captured_conversations(observed, record), needed)
        problem = observed.jobs_problem or capture_problem(observed) or None
        return shown.model_copy(update={"conversations": count, "needed": needed, "capture_problem": problem})
    state, reason = job_state(deployment, observed, run, job_problem)
    update = {"job": manifests.job_name(deployment.name, run.id), "job_state": state, "job_reason": reason or None}
    return shown.model_copy(update=update)


def last_run_section(deployment: Deployment, observed: Observation, job_problem: str) -> DraftRunEndStatus | None:
    """Return the latest run that ended, and whether its folder is still to be deleted."""
    record = observed.session.drafts
    last, run = record.last_run, record.undeleted_run
    if last is None or run is None:
        return last
    note = f"its folder on claim {run.claim} is deleted after {iso(run.retry_at)} by Job "
    note += manifests.deletion_job_name(deployment.name, run.id)
    problem = observed.jobs_problem or (job_problem if record.run is None else "")
    if problem or run.losses:
        note += f", which failed: {problem or run.reason}"
    return last.model_copy(update={"reason": f"{last.reason[: MAX_TEXT - len(note) - 2]}; {note}"[:MAX_TEXT]})


def run_progress(deployment: Deployment, observed: Observation, job_problem: str) -> str:
    """Return a sentence on the run that is under way, without numbers that change with every report."""
    record = observed.session.drafts
    run = record.run
    if run is None:
        return "the stored run could not be read"
    if record.phase is Phase.COLLECTING:
        needed = deployment.spec.distillation.trigger.min_conversations
        problem = observed.jobs_problem or capture_problem(observed)
        wanted = f"requests are captured until the workers hold {needed} conversations"
        return f"{wanted}; {problem}" if problem else wanted
    state, reason = job_state(deployment, observed, run, job_problem)
    name = manifests.job_name(deployment.name, run.id)
    return f"Job {name}: {state}" + (f": {reason}" if reason else "")


def job_state(deployment: Deployment, observed: Observation, run: RunRecord, problem: str) -> tuple[str, str]:
    """Return the state of a run's Job and the reason for it."""
    if observed.jobs_problem:
        return REFUSED, observed.jobs_problem
    job = job_of_run(observed.jobs, deployment, run)
    if job is not None:
        return str(job.status.state), job.status.reason
    if problem:
        return REFUSED, problem
    return ABSENT, f"it was lost and is created again after {iso(run.retry_at)}" if run.losses else ""


def capture_problem(observed: Observation) -> str:
    """Return why a worker captures no requests; empty if all do."""
    for report in sorted(observed.reports, key=lambda one: one.worker):
        if report.capture is None:
            return f"worker {report.worker} has no folder for captured requests: its pod is of an older template"
        if report.capture.problem:
            return f"worker {report.worker}: {report.capture.problem}"
    return ""


def _stepped(count: int, needed: int) -> int:
    """Return the count, rounded down to a hundredth of what is needed, and at most that."""
    step = max(1, needed // STEPS)
    return min(needed, count // step * step)


# Drafts in status: the section ``draft`` and the condition DraftRollout.

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
    status = DraftStatus(hash=known, uri=draft.uri)
    if not record.is_used:
        return status
    return status.model_copy(
        update={
            "current": _version(record, record.current),
            "candidate": _version(record, record.candidate) if record.candidate else None,
            "previous": None if record.previous is None else _version(record, record.previous),
            "phase": str(record.phase),
            "run": run_section(deployment, observed, job_problem),
            "last_run": last_run_section(deployment, observed, job_problem),
            "last_verdict": record.last_verdict or None,
        }
    )


def draft_rollout(
    deployment: Deployment, observed: Observation, job_problem: str = "", *, now: float
) -> ConditionState | None:
    """Return whether a draft is trained, tried, promoted or rolled back. None until one was offered or asked for."""
    kind, record = ConditionType.draft_rollout, observed.session.drafts
    waiting = _waiting(deployment, observed, now)
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
    """Return which draft serves in place of the one of the spec."""
    uri = record.uris.get(record.current, "")
    return f"the workers run {uri} ({record.current[:12]}), whose SpecDecodeDraft has the role Serving"


def _waiting(deployment: Deployment, observed: Observation, now: float) -> ConditionState | None:
    """Return the condition of an offered draft that was not taken up yet, unless another one is in hand."""
    record, draft = observed.session.drafts, next_offer(observed)
    obstacle = obstacle_of_offer(Facts(deployment, observed, now), record)
    if draft is None or record.phase in _UNDER_WAY or not obstacle:
        return None
    return ConditionState(ConditionType.draft_rollout, "False", "CandidateWaits", f"{draft.name}: {obstacle}")


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
        decides = "its role Serving or Retired decides (kubectl specdecode promote or reject)"
        return f"{draft} is better: {evidence_text(record.trial)}; {decides}"
    pod = record.trial.pod if record.trial else ""
    return f"pod {pod}: it tries {draft}" if pod else f"no worker is ready to try {draft}"


def _version(record: DraftRecord, draft: str) -> DraftVersionStatus:
    """Return hash and URI of a draft; an empty hash is the draft of the spec."""
    if not draft:
        return DraftVersionStatus(hash=record.spec_hash or None, uri=record.spec_draft)
    known = None if draft.startswith(UNRESOLVED) else draft
    return DraftVersionStatus(hash=known, uri=record.uris.get(draft))


def _hashes(observed: Observation) -> Iterator[str]:
    return (report.draft.hash for report in observed.last_reports if report.draft.hash)
