"""Training run in status: its phase, its captured conversations, and its Job in the words of the cluster."""

from __future__ import annotations

from specdecode_operator import manifests
from specdecode_operator.api.schema import MAX_TEXT
from specdecode_operator.api.v1alpha1 import DraftRunEndStatus, DraftRunStatus
from specdecode_operator.drafts.lifecycle_table import Phase
from specdecode_operator.rollout.run_events import captured_conversations, job_of_run
from specdecode_operator.state.draft_record import RunRecord
from specdecode_operator.times import iso
from specdecode_operator.types import Deployment, Observation

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
