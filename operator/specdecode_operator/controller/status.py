"""Status of a deployment: its conditions, each from the state of one thing, and its sections. Pure.

Equal inputs give an equal status, so that nothing is written at rest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Literal, NamedTuple

from specdecode_operator import manifests
from specdecode_operator.api.draft import UNRESOLVED, Phase
from specdecode_operator.api.schema import MAX_TEXT
from specdecode_operator.api.speculation import Pin, read_pin
from specdecode_operator.api.v1alpha1 import (
    CapacityStatus,
    Condition,
    ConditionType,
    DraftRunEndStatus,
    DraftRunStatus,
    DraftStatus,
    DraftVersionStatus,
    MemoryStatus,
    ModelStatus,
    PrefillStatus,
    RouterStatus,
    SpeculationSpec,
    SpeculationStatus,
    Status,
    TaskStatus,
    TrafficStatus,
)
from specdecode_operator.drafts.drift import BATCH_REQUESTS, DAY_SECONDS
from specdecode_operator.manifests import rolling_hash
from specdecode_operator.rollout.phases import evidence_text
from specdecode_operator.rollout.runs import (
    RUN_PHASES,
    Facts,
    captured_conversations,
    job_of_run,
    next_offer,
    obstacle_of_offer,
    worth_of_drift,
)
from specdecode_operator.state.learned import ALL_TASKS, DraftRecord, DriftState, RunRecord, TaskDrift
from specdecode_operator.times import in_words, iso, seconds_of, seconds_of_timestamp
from specdecode_operator.types import (
    ChildProblem,
    Decision,
    Deployment,
    Figures,
    Manifest,
    Observation,
    Outcome,
    Worker,
    Workload,
)

# Numbers, times and lists as status shows them. Rounded, because each change of status is a write.

ROUNDING = 0.05
"""Step of rates, lengths and speed-ups. Finer steps would change with every publication and mean nothing."""
NAMED_ITEMS = 4
"""Pods that a message names, so that it stays one line."""


def rounded(value: float | None) -> float | None:
    """Return ``value`` rounded to ROUNDING."""
    return None if value is None else round(round(value / ROUNDING) * ROUNDING, 2)


def two_digits(value: float | None) -> float | None:
    """Return ``value`` rounded to two significant digits."""
    return None if value is None else float(f"{value:.2g}")


def milliseconds(seconds: float | None) -> float | None:
    """Return ``seconds`` as milliseconds with two significant digits."""
    return None if seconds is None else two_digits(1000 * seconds)


def gib(size: int) -> str:
    """Return bytes as a Kubernetes quantity, rounded to 0.01 Gi."""
    return f"{size / 2**30:.2f}Gi"


def enumerated(items: Sequence[str]) -> str:
    """Return the first NAMED_ITEMS items in one line, and the number of the others."""
    others = len(items) - NAMED_ITEMS
    return "; ".join([*items[:NAMED_ITEMS], *([f"and {others} more"] if others > 0 else [])])


# State of one condition, before the time of its transition is added.


class ConditionState(NamedTuple):
    """State of one condition, without the time of its transition."""

    type: ConditionType
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    bad: bool = False
    """True if the REASON column shows it."""


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
        message = f"{tasks}. {_sentence(worth_of_drift(deployment.spec, observed.session.drafts, drift).sentence())}"
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
        problem = (observed.jobs_problem or capture_problem(observed))[:MAX_TEXT] or None
        return shown.model_copy(update={"conversations": count, "needed": needed, "capture_problem": problem})
    state, reason = job_state(deployment, observed, run, job_problem)
    name, reason = manifests.job_name(deployment.name, run.id), reason[:MAX_TEXT]
    return shown.model_copy(update={"job": name, "job_state": state, "job_reason": reason or None})


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


# Progress of a deployment towards its spec: complete, moving, or blocked until a person acts.
#
# Both functions return the reason and the message that the conditions Ready, Stalled, Reconciling and Progressing show.
# The terms are those of kstatus: https://github.com/kubernetes-sigs/cli-utils/tree/master/pkg/kstatus

CRASH_SECONDS = 300.0
"""Time without readiness after which a crash loop counts as blocked. A worker recovers by itself from shorter ones, for
example when the model hub does not answer."""

DEAR_DRAFTING = 0.3
"""Share of a step above which drafting is dear: a cheaper draft of equal acceptance gains more than 10 %."""
_BLOCKING = (
    ("ImageNotPulled", r"\b(ErrImagePull|ImagePullBackOff|InvalidImageName|ErrImageNeverPull|ImageInspectError)\b"),
    (
        "ObjectMissing",
        r"\bCreateContainerConfigError\b|\b(secrets?|configmaps?|persistentvolumeclaims?) \"[^\"]+\" not found",
    ),
    ("VolumeNotMounted", r"\b(FailedMount|FailedAttachVolume|FailedMapVolume|MountVolume|AttachVolume)\b"),
    ("ContainerNotCreated", r"\b(CreateContainerError|RunContainerError)\b"),
)
"""Reasons for which Kubernetes retries in vain until a person acts, and how a pod's trouble shows them. The first match
counts: a volume whose Secret is missing is a missing object."""
_CHILD_REASONS = {"NotOwned": "ChildNotOwned", "Refused": "ChildRefused", "Unavailable": "ApplyRetrying"}
_BACK_OFF = re.compile(r"(?i)\bback-off \w+ restarting")


class Finding(NamedTuple):
    """Reason in one word, and the message."""

    reason: str
    message: str


class Past(NamedTuple):
    """Facts of the previous status, for states that can be recognised only over time."""

    unready_seconds: float = 0.0
    """Time since the deployment was Ready last; 0 while it is."""
    crashed_pods: frozenset[str] = frozenset()
    """Pods that Stalled named because they crash again and again."""


def find_worker_blocker(observed: Observation, decision: Decision, *, past: Past) -> Finding | None:
    """Return what keeps workers from being created or from starting until a person acts, or None."""
    return (
        _refusal(observed)
        or _not_created(observed.workload, decision)
        or next(_blocked_pods(observed), None)
        or _crash_loop(observed, past)
        or _late_rollout(observed)
    )


def find_rollout(observed: Observation, decision: Decision, *, paused: bool) -> Finding | None:
    """Return the rollout or the scaling that is under way, or None if all wanted workers are available.

    A paused operator applies nothing, so only the workload itself is considered then.
    """
    workload = observed.workload
    if workload is None:
        return Finding("Creating", "the Deployment of the workers does not exist yet")
    if not paused and _is_outdated(workload, decision):
        return Finding("RollingOut", "a new pod template was applied; its rollout has not started")
    if not paused and workload.wanted != decision.scale.replicas:
        return Finding("Scaling", f"{workload.available} of {decision.scale.replicas} workers are available")
    if workload.settled:
        return None
    trouble = next(troubles(observed), None)
    counts = f"{workload.updated} of {workload.wanted} workers run the current pod template"
    message = f"{counts}, {workload.available} are available" + (f"; {trouble}" if trouble else "")
    return Finding(_motion_reason(workload, trouble), message)


def troubles(observed: Observation) -> Iterator[str]:
    """Yield what the kubelet or the scheduler says of each pod that does not start."""
    return (f"pod {worker.name}: {trouble_of(worker)}" for worker in _starting(observed) if worker.trouble)


def trouble_of(worker: Worker) -> str:
    """Return a pod's trouble without the length of the back-off, which grows while nothing else changes."""
    return _BACK_OFF.sub("back-off restarting", worker.trouble or "")


def _starting(observed: Observation) -> list[Worker]:
    waiting = (worker for worker in observed.workers if not worker.leaving and not worker.ready)
    return sorted(waiting, key=lambda worker: worker.name)


def _motion_reason(workload: Workload, trouble: str | None) -> str:
    if trouble and "Unschedulable" in trouble:
        return "Unschedulable"
    if trouble:
        return "WorkerFailing"
    rolling = workload.observed_generation < workload.generation or workload.updated < workload.replicas
    return "RollingOut" if rolling or workload.updated < workload.wanted else "WorkersStarting"


def _is_outdated(workload: Workload, decision: Decision) -> bool:
    """Return whether the workload was read before the desired pod template was applied."""
    desired = next(_workloads(decision), None)
    annotations = (desired or {}).get("metadata", {}).get("annotations") or {}
    spec_hash = annotations.get(manifests.SPEC_HASH_ANNOTATION)
    return bool(workload.spec_hash and spec_hash and workload.spec_hash != spec_hash)


def _workloads(decision: Decision) -> Iterator[Manifest]:
    """Yield the Deployments of the decision, that of the workers first."""
    return (child for child in decision.children if child["kind"] == "Deployment")


def _children(problems: Iterable[ChildProblem]) -> Finding | None:
    """Return all problems in one finding; the reason is that of the gravest."""
    ranked = sorted(problems, key=lambda problem: (list(_CHILD_REASONS).index(problem.reason), str(problem)))
    return (
        Finding(_CHILD_REASONS[ranked[0].reason], enumerated([str(problem) for problem in ranked])) if ranked else None
    )


def _refusal(observed: Observation) -> Finding | None:
    """Return why a worker ended before it loaded its model."""
    for worker in _starting(observed):
        verdict = worker.verdict
        if verdict is None or verdict.serves:
            continue
        if not verdict.fits:
            return Finding("DoesNotFit", f"pod {worker.name}: {verdict.problem}")
        if verdict.draft_problem:
            return Finding("DraftRefused", f"pod {worker.name}: {verdict.draft_problem}")
        return Finding("WorkerRefused", f"pod {worker.name}: {verdict.problem}")
    return None


def _not_created(workload: Workload | None, decision: Decision) -> Finding | None:
    if workload is None or not workload.replica_failure:
        return None
    names = (child["metadata"]["name"] for child in _workloads(decision))
    return Finding("PodsNotCreated", f"Deployment {next(names, 'of the workers')}: {workload.replica_failure}")


def _blocked_pods(observed: Observation) -> Iterator[Finding]:
    for reason, pattern in _BLOCKING:
        pods = [f"pod {worker.name}: {trouble_of(worker)}" for worker in _starting(observed)]
        blocked = [text for text in pods if re.search(pattern, text)]
        if blocked:
            yield Finding(reason, enumerated(blocked))


def _crash_loop(observed: Observation, past: Past) -> Finding | None:
    """Return the workers that crash again and again. Between two crashes such a worker looks like one that starts."""
    if past.unready_seconds < CRASH_SECONDS:
        return None
    crashing = []
    for worker in _starting(observed):
        if "CrashLoopBackOff" in trouble_of(worker):
            crashing.append(f"pod {worker.name}: {trouble_of(worker)}")
        elif worker.name in past.crashed_pods:
            crashing.append(f"pod {worker.name}: started again after a crash; it is not ready yet")
    return Finding("WorkerFailing", enumerated(crashing)) if crashing else None


def _late_rollout(observed: Observation) -> Finding | None:
    workload = observed.workload
    if workload is None or workload.stalled is None or workload.settled:
        return None
    return Finding("RolloutTimedOut", "; ".join([workload.stalled, *list(troubles(observed))[:1]]))


# Progress of the routers towards the spec.


def find_router_motion(deployment: Deployment, observed: Observation) -> Finding | None:
    """Return what is still under way at the routers, or None if all of them serve."""
    wanted, routers = deployment.spec.router.replicas, observed.routers
    if not wanted:
        return None
    if routers is None:
        return Finding("RoutersStarting", "the Deployment of the routers does not exist yet")
    if not deployment.spec.router.autoscaled and routers.wanted != wanted:
        return Finding("RoutersStarting", f"{routers.available} of {wanted} routers are available")
    if routers.settled:
        return None
    counts = f"{routers.updated} of {routers.wanted} routers run the current pod template"
    where = "" if routers.ready else "; until one is ready, the Service selects the workers"
    return Finding("RoutersStarting", f"{counts}, {routers.available} are available{where}")


def find_router_blocker(deployment: Deployment, observed: Observation) -> Finding | None:
    """Return what keeps routers from starting until a person acts, or None."""
    routers = observed.routers
    if routers is None or not deployment.spec.router.replicas or routers.settled:
        return None
    problem = routers.replica_failure or routers.stalled
    return Finding("RoutersFailing", f"Deployment {deployment.name}-router: {problem}") if problem else None


# Conditions of a deployment, each computed by one function.
#
# Ready, Stalled and Reconciling follow kstatus, so that `kubectl wait`, Argo CD and Flux read them without further
# configuration. Stalled and Reconciling exist only while True, and never both. Reasons are one word.

PAUSED = "spec.paused is true; the operator writes only status"


def conditions(
    deployment: Deployment, observed: Observation, decision: Decision, outcome: Outcome, *, past: Past, now: float
) -> tuple[ConditionState, ...]:
    """Return all conditions whose feature is in use, the gravest first.

    Args:
        deployment: Spec and previous status.
        observed: Children, pods and reports.
        decision: The desired state.
        outcome: Result of applying it.
        past: What the previous status says about readiness.
        now: Time in seconds since the epoch.
    """
    states = [
        *_summary(deployment, observed, decision, outcome, past),
        available(
            observed.workload, decision.scale.replicas, next(troubles(observed), None), at_zero=at_zero(deployment)
        ),
        progressing(deployment, observed, decision, past),
        memory_fits(observed),
    ]
    speculation = deployment.spec.speculation
    if speculation.method != "none":
        states += [draft_compatible(observed), workers_healthy(decision)]
        rollout = draft_rollout(deployment, observed, outcome.job_problem, now=now)
        states += [state for state in (rollout, draft_fresh(deployment, observed, now)) if state]
    if speculation.method != "none" and speculation.mode != "Off":
        states.append(speculation_effective(deployment, observed, decision))
    if deployment.spec.scaling is not None and deployment.spec.scaling.owner == "Operator":
        states.append(scaling_limited(decision))
    if deployment.spec.router.replicas:
        states.append(routers_ready(deployment, observed))
    if decision.shown.pinned or decision.shown.pin_problem:
        states.append(pinned(decision))
    states.append(reports_fresh(observed, decision))
    return tuple(states)


def stalled(blocker: Finding) -> ConditionState:
    return ConditionState(ConditionType.stalled, "True", *blocker, bad=True)


def not_ready(finding: Finding) -> ConditionState:
    return ConditionState(ConditionType.ready, "False", *finding, bad=True)


def at_zero(deployment: Deployment) -> str:
    """Return what to tell while no worker is wanted."""
    scaling = deployment.spec.scaling
    if scaling is None or scaling.owner == "External" or scaling.min_replicas:
        return "spec.replicas is 0"
    idle = f"no request came for {scaling.idle_seconds} s"
    if deployment.spec.paused or deployment.spec.speculation.mode == "Advisory":
        return f"{idle}; no worker is started {'while paused' if deployment.spec.paused else 'in mode Advisory'}"
    return f"{idle}; routers hold the next one while a worker starts"


def available(workload: Workload | None, wanted: int, trouble: str | None, *, at_zero: str) -> ConditionState:
    """Return whether at least one worker serves requests. It says nothing about the spec or about speed.

    Args:
        workload: Deployment of the workers.
        wanted: Workers that are wanted.
        trouble: What keeps workers from starting.
        at_zero: Message while no worker is wanted.
    """
    kind = ConditionType.available
    if workload and workload.available > 0:
        return ConditionState(kind, "True", "WorkerAvailable", "at least one worker serves requests")
    if wanted == 0:
        return ConditionState(kind, "False", "ScaledToZero", at_zero)
    if trouble:
        return ConditionState(kind, "False", "WorkerFailing", trouble, True)
    return ConditionState(kind, "False", "WorkersStarting", "no worker serves requests yet", True)


def progressing(deployment: Deployment, observed: Observation, decision: Decision, past: Past) -> ConditionState:
    """Return whether workers are being started, replaced or removed. A blocked rollout makes it False."""
    kind = ConditionType.progressing
    if deployment.spec.paused:
        return ConditionState(kind, "Unknown", "Paused", PAUSED)
    motion = find_rollout(observed, decision, paused=False)
    blocker = find_worker_blocker(observed, decision, past=past)
    if blocker:
        return ConditionState(kind, "False", *blocker)
    if motion:
        return ConditionState(kind, "True", *motion)
    return ConditionState(kind, "False", "Complete", "all workers run the current pod template")


def memory_fits(observed: Observation) -> ConditionState:
    """Return whether the model fits in a worker's memory, as a worker computed before it loaded the model."""
    kind = ConditionType.memory_fits
    refusal = next((verdict for verdict in observed.refusals if not verdict.fits), None)
    if refusal:
        return ConditionState(kind, "False", "DoesNotFit", "\n".join((refusal.problem, *refusal.arithmetic)), True)
    report = next((report for report in observed.last_reports if report.memory), None)
    if report:
        message = f"after the weights there is room for {report.kv_tokens_total} tokens of keys and values"
        return ConditionState(kind, "True", "Fits", message)
    return ConditionState(kind, "Unknown", "NotCheckedYet", "no worker has reported its memory yet")


def draft_compatible(observed: Observation) -> ConditionState:
    """Return whether the draft fits the target. Unless it is required, workers serve without it if it does not."""
    kind = ConditionType.draft_compatible
    refused = next((verdict.draft_problem for verdict in observed.refusals if verdict.draft_problem), None)
    if refused:
        return ConditionState(kind, "False", "DraftRefused", f"{refused}; new workers do not start", True)
    reports = observed.last_reports
    problem = next((report.draft.problem for report in reports if report.draft.problem), None)
    if problem:
        return ConditionState(kind, "False", "DraftRefused", f"{problem}; the target serves without a draft", True)
    if any(report.draft.hash for report in reports):
        return ConditionState(kind, "True", "DraftLoaded", "the draft fits the target")
    return ConditionState(
        kind, "Unknown", "NotLoadedYet", next(_report_problems(observed), "no worker has reported yet")
    )


def speculation_effective(deployment: Deployment, observed: Observation, decision: Decision) -> ConditionState:
    """Return whether speculation is faster than plain decoding, by the latest measurement."""
    kind = ConditionType.speculation_effective
    known = deployment.status.speculation
    now = decision.shown.figures.speedup if decision.shown.figures else None
    speedup = rounded(now if now is not None else (known.speedup if known else None))
    if decision.shown.depth == 0:
        return ConditionState(kind, "False", *_why_plain(observed, decision))
    if decision.shown.measuring and speedup is None:
        return ConditionState(kind, "Unknown", "Measuring", f"{decision.shown.measuring}; the depth stays until then")
    if speedup is None:
        message = "fewer than 500 tokens in the last minute, or no plain steps to compare with"
        return ConditionState(kind, "Unknown", "NotMeasured", message)
    if speedup > 1:
        message = f"{speedup:.2f} times as fast as plain decoding"
        share = decision.shown.drafting_share
        if share is not None and share > DEAR_DRAFTING:
            message += f"; drafting takes over {100 * DEAR_DRAFTING:.0f} % of a step"
            return ConditionState(kind, "True", "DraftingIsDear", message)
        return ConditionState(kind, "True", "Faster", message)
    if speedup == 1:
        message = "as fast as plain decoding; the workers' guards may be running plain decoding"
        return ConditionState(kind, "False", "NoGain", message)
    return ConditionState(kind, "False", "Slower", f"{speedup:.2f} times as fast as plain decoding")


def _why_plain(observed: Observation, decision: Decision) -> Finding:
    """Return why the workers decode plainly at the current load."""
    if decision.shown.suspended:
        shape = f"the workers suspend {decision.shown.suspended} of the plan at the current load"
        return Finding("SuspendedByGuards", f"{shape}: by their guards' latest measurement plain decoding is faster")
    problems = [report.draft.problem for report in observed.last_reports]
    if problems and all(problems):
        return Finding("NoDraft", "no worker can use the draft; DraftCompatible says why")
    return Finding("PlainIsFaster", "plain decoding is faster at the current load, so no draft is used")


def scaling_limited(decision: Decision) -> ConditionState:
    """Return whether something keeps the number of workers below what the demand needs."""
    kind = ConditionType.scaling_limited
    if decision.scale.limited is not None:
        return ConditionState(kind, "True", decision.scale.limited.reason, decision.scale.limited.message, True)
    message = "the number of workers follows the demand within spec.scaling"
    return ConditionState(kind, "False", "WithinBounds", message)


def workers_healthy(decision: Decision) -> ConditionState:
    """Return whether some worker differs from its own past and from its peers."""
    kind = ConditionType.workers_healthy
    if not decision.health.unhealthy:
        return ConditionState(kind, "True", "Healthy", "no worker differs from its own past and its peers")
    message = enumerated([f"pod {suspect.pod}: {suspect.message}" for suspect in decision.health.unhealthy])
    return ConditionState(kind, "False", decision.health.unhealthy[0].reason, message, True)


def routers_ready(deployment: Deployment, observed: Observation) -> ConditionState:
    """Return whether all routers serve. While none is ready, the Service selects the workers."""
    kind = ConditionType.routers_ready
    finding = find_router_blocker(deployment, observed) or find_router_motion(deployment, observed)
    if finding is None:
        return ConditionState(kind, "True", "AllRoutersReady", "all routers serve requests")
    serving = observed.routers is not None and observed.routers.ready > 0
    return ConditionState(kind, "False", *finding, bad=not serving)


def pinned(decision: Decision) -> ConditionState:
    """Return whether the pins of the spec are in force. It exists while there are any."""
    kind = ConditionType.pinned
    if decision.shown.pin_problem:
        still = f"; {decision.shown.pinned} stays pinned" if decision.shown.pinned else "; nothing is pinned"
        return ConditionState(kind, "False", "BadPin", decision.shown.pin_problem + still, True)
    message = f"{decision.shown.pinned} runs at every load; the guard stays active"
    return ConditionState(kind, "True", "PinnedBySpec", message)


def reports_fresh(observed: Observation, decision: Decision) -> ConditionState:
    """Return whether every ready worker sends reports. A worker without them keeps serving with its last plan."""
    kind = ConditionType.reports_fresh
    if decision.shown.silent:
        pods = [f"pod {name}: {decision.shown.silent[name]}" for name in sorted(decision.shown.silent)]
        return ConditionState(kind, "False", "ReportsStale", f"no report for some time: {enumerated(pods)}", True)
    if not any(worker.ready and not worker.leaving for worker in observed.workers):
        return ConditionState(kind, "Unknown", "NoWorkers", "no worker is ready")
    return ConditionState(kind, "True", "Reporting", "every ready worker sends reports")


def _summary(
    deployment: Deployment, observed: Observation, decision: Decision, outcome: Outcome, past: Past
) -> list[ConditionState]:
    """Return Ready, and Stalled or Reconciling if one of them is True."""
    is_refused = any(problem.reason != "Unavailable" for problem in outcome.problems)
    refused = _children(outcome.problems) if is_refused else None
    blocked = find_worker_blocker(observed, decision, past=past) or find_router_blocker(deployment, observed)
    if blocker := refused or blocked:
        return [stalled(blocker), not_ready(blocker)]
    waiting = _paused(deployment, observed) if deployment.spec.paused else None
    if waiting:
        return [not_ready(waiting)]
    motion = (
        _children(outcome.problems)
        or find_rollout(observed, decision, paused=deployment.spec.paused)
        or find_router_motion(deployment, observed)
    )
    if motion is None:
        return [_ready(deployment, observed, decision)]
    if deployment.spec.paused:
        return [not_ready(motion)]
    return [ConditionState(ConditionType.reconciling, "True", *motion), not_ready(motion)]


def _paused(deployment: Deployment, observed: Observation) -> Finding | None:
    """Return why a paused deployment is not as its spec wants it, if it is known not to be."""
    if observed.workload is None:
        return Finding("Paused", f"{PAUSED}; nothing was created yet")
    if observed.workload.spec_hash != rolling_hash(deployment.spec):
        return Finding("Paused", f"{PAUSED}; the workers are of an earlier spec")
    return None


def _ready(deployment: Deployment, observed: Observation, decision: Decision) -> ConditionState:
    """Return Ready. A deployment without workers is as its spec wants it, as a Deployment of Kubernetes would be."""
    kind = ConditionType.ready
    if decision.scale.replicas == 0:
        return ConditionState(kind, "True", "ScaledToZero", at_zero(deployment))
    count = observed.workload.available if observed.workload else 0
    message = "the worker is available" if count == 1 else f"all {count} workers are available"
    return ConditionState(kind, "True", "AllWorkersAvailable", message)


def _report_problems(observed: Observation) -> Iterator[str]:
    return (f"pod {worker.name}: {worker.report_problem}" for worker in observed.workers if worker.report_problem)


# Sections of status apart from its conditions: model, speculation, tasks, traffic, capacity and memory.
#
# Measurements stay, with the time of the measurement, until there are new ones.

SECONDS_PER_HOUR = 3600


def model_section(deployment: Deployment, revision: str | None) -> ModelStatus:
    """Return URI and revision of the model.

    An unpinned URI keeps its known revision until ``revision`` names another.
    """
    uri = deployment.spec.model.uri
    before = deployment.status.model
    known = before.revision if before is not None and before.uri == uri else None
    written = uri.rpartition("@")[2] if uri.startswith("hf://") and "@" in uri else None
    return ModelStatus(uri=uri, revision=revision or written or known)


def speculation_section(deployment: Deployment, decision: Decision, now: float) -> SpeculationStatus | None:
    if deployment.spec.speculation.method == "none":
        return None
    before = deployment.status.speculation or SpeculationStatus()
    history = decision.shown.history or before.history
    return before.model_copy(
        update={
            "depth": decision.shown.depth if decision.shown.depth is not None else before.depth,
            "nodes": decision.shown.nodes if decision.shown.nodes is not None else before.nodes,
            "plan_version": decision.plan.version,
            "pinned": decision.shown.pinned[:MAX_TEXT] or None,
            "recommended": decision.shown.recommended,
            "device_hours_saved": _device_hours(before, decision.shown.figures),
            "history": history,
            "acceptance_by_context": _by_context(decision) if decision.shown.figures else before.acceptance_by_context,
            **_measured(before, decision.shown.figures, now),
        }
    )


def _by_context(decision: Decision) -> str | None:
    """Return the acceptance by context in a sentence. It changes with the figures, so that status is written seldom."""
    parts = (
        f"{task}: {', '.join(f'{rate:.2f} at {context}' for context, rate in rates.items())}"
        for task, rates in decision.shown.context_rates.items()
    )
    return "; ".join(parts)[:4096] or None


def task_sections(deployment: Deployment, decision: Decision) -> tuple[TaskStatus, ...]:
    known = {task.name: task for task in deployment.status.tasks}
    speculation = deployment.spec.speculation
    pin = read_pin(decision.shown.pinned, speculation) if decision.shown.pinned else None
    return tuple(
        _task(known.get(task.name, TaskStatus(name=task.name)), decision, _mode(task.name, speculation, pin))
        for task in speculation.tasks
    )


def router_section(deployment: Deployment, observed: Observation) -> RouterStatus | None:
    """Return the counts of the routers, or None for a deployment without routers."""
    wanted, routers = deployment.spec.router.replicas, observed.routers
    if not wanted:
        return None
    if routers is None:
        return RouterStatus(ready=f"0/{wanted}")
    if deployment.spec.router.autoscaled:
        wanted = routers.wanted
    return RouterStatus(replicas=routers.replicas, ready_replicas=routers.ready, ready=f"{routers.ready}/{wanted}")


def prefill_section(deployment: Deployment, observed: Observation) -> PrefillStatus | None:
    """Return the counts of the prefill workers, or None for a deployment without them."""
    workload = observed.prefill_workload
    if not deployment.spec.prefill.is_used or workload is None:
        return None
    return PrefillStatus(
        replicas=workload.replicas, ready_replicas=workload.ready, ready=f"{workload.ready}/{workload.wanted}"
    )


def memory_section(before: MemoryStatus | None, observed: Observation) -> MemoryStatus | None:
    """Return the memory of a serving worker; while none serves, that of a worker that did not fit."""
    served = ((report.memory, report.kv_tokens_total) for report in observed.last_reports if report.memory)
    refused = ((verdict.memory, verdict.kv_tokens) for verdict in observed.refusals)
    memory, tokens = next(chain(served, refused), (None, 0))
    if memory is None:
        return before
    return MemoryStatus(
        limit=gib(memory.limit),
        weights=gib(memory.weights),
        drafts=gib(memory.drafts),
        kv_cache=gib(memory.kv_cache),
        reserve=gib(memory.reserve),
        kv_tokens=tokens,
    )


def start_section(before: str | None, observed: Observation) -> str | None:
    """Return the seconds of each stage of the start of the newest ready worker: ``pull 41.0, read 3.2, ...``."""
    started = [worker for worker in observed.workers if worker.ready and worker.report and worker.report.start]
    newest = max(started, key=lambda worker: worker.created_at or 0, default=None)
    if newest is None or newest.report is None or newest.report.start is None:
        return before
    stages = newest.report.start.model_dump()
    stages["pull"] += newest.pull_seconds or 0
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in stages.items())


def traffic_section(before: TrafficStatus | None, figures: Figures | None) -> TrafficStatus | None:
    if figures is None:
        return before
    return TrafficStatus(
        running=round(figures.running, 1),
        waiting=round(figures.waiting, 1),
        tokens_per_second=two_digits(figures.tokens_per_second),
        synthetic=figures.synthetic,
    )


def capacity_section(before: CapacityStatus | None, decision: Decision) -> CapacityStatus | None:
    """Return demand and capacity, changed only with new figures. None without spec.scaling."""
    if decision.scale.wanted is None:
        return None
    if before is not None and decision.shown.figures is None:
        return before
    capacity = decision.scale.capacity
    arrivals = two_digits(decision.scale.arrivals)
    known = before.arrivals_per_second if before else None
    return CapacityStatus(
        wanted_replicas=decision.scale.wanted,
        requests_per_second=two_digits(capacity.rate) if capacity else None,
        arrivals_per_second=known if arrivals is None else arrivals,
        limited_by=capacity.limited_by if capacity else None,
    )


def _measured(before: SpeculationStatus, figures: Figures | None, now: float) -> dict[str, float | str | None]:
    """Return new measurements with their time if they differ from the known ones."""
    values: dict[str, float | None] = {}
    if figures is not None and figures.speed is not None:
        values["acceptance_rate"] = rounded(figures.speed.acceptance_rate)
        values["accepted_length"] = rounded(figures.speed.accepted_length)
    if figures is not None and figures.speedup is not None:
        values["speedup"] = rounded(figures.speedup)
    if all(getattr(before, name) == value for name, value in values.items()):
        return {}
    return {**values, "measured_at": iso(now)}


def _device_hours(before: SpeculationStatus, figures: Figures | None) -> float | None:
    """Return the hours saved with three significant digits, at most two of them after the point."""
    if figures is None or figures.saved_device_seconds is None:
        return before.device_hours_saved
    hours = figures.saved_device_seconds / SECONDS_PER_HOUR
    return round(float(f"{hours:.3g}"), 2) + 0.0


def _mode(task: str, speculation: SpeculationSpec, pin: Pin | None) -> str:
    """Return the mode that decides for a task: a pin first, then Off of the deployment, then the task's own mode."""
    if pin and pin.shape_of(task) is not None:
        return "Pinned"
    own = next((spec.mode for spec in speculation.tasks if spec.name == task), None)
    return speculation.mode if speculation.mode == "Off" or own is None else own


def _task(before: TaskStatus, decision: Decision, mode: str) -> TaskStatus:
    measured = decision.shown.figures.tasks.get(before.name) if decision.shown.figures else None
    values: dict[str, float | None] = {}
    if measured is not None:
        values = {
            "acceptance_rate": rounded(measured.acceptance_rate),
            "accepted_length": rounded(measured.accepted_length),
            "ttft_milliseconds": milliseconds(measured.ttft_seconds),
            "itl_milliseconds": milliseconds(measured.itl_seconds),
            "speedup": rounded(measured.speedup),
        }
    known = {name: value for name, value in values.items() if value is not None}
    depth = decision.shown.task_depths.get(before.name, before.depth)
    merge = before.merge if decision.shown.merges is None else decision.shown.merges.get(before.name)
    return before.model_copy(update={**known, "depth": depth, "mode": mode, "merge": merge})


# The whole status of a deployment, from observation, decision and outcome.

WITH_MEASUREMENTS = (ConditionType.scaling_limited, ConditionType.workers_healthy, ConditionType.draft_fresh)
"""Conditions whose messages contain measurements. These change with every poll."""
WITHOUT_REPORT_REASONS = ("NotLoadedYet", "NotCheckedYet")
"""Reasons of conditions that wait for the first report. An operator that has just started has read none, though workers
serve; the conditions then stay as they are until the first round of reports."""
ALTERNATING_REASONS = ("ImageNotPulled",)
"""Reasons whose message alternates: the kubelet reports the error of a pull, then its back-off, and so on."""
MAX_REASON, MAX_MESSAGE = 1024, 4096
"""Characters of the REASON column and of a condition's message, as the CRD limits them."""


def status_of(
    deployment: Deployment,
    observed: Observation,
    decision: Decision,
    outcome: Outcome,
    *,
    now: float,
) -> Status:
    """Return the status of a deployment whose spec could be carried out.

    Args:
        deployment: The resource, with its previous status. Values that were not measured again stay as they are.
        observed: Children, pods and reports.
        decision: The desired state.
        outcome: Result of applying it.
        now: Time in seconds since the epoch; used only as the time of transitions and of measurements.
    """
    before, workload = deployment.status, observed.workload
    past = _past(before, now)
    states = [
        _steady(before, state, published=decision.shown.figures is not None, asked=observed.round > 0)
        for state in conditions(deployment, observed, decision, outcome, past=past, now=now)
    ]
    generation = deployment.generation
    ready = workload.ready if workload else 0
    return Status(
        observed_generation=generation,
        url=decision.shown.url,
        replicas=workload.replicas if workload else 0,
        ready_replicas=ready,
        selector=decision.shown.selector,
        ready=f"{ready}/{decision.scale.replicas}",
        reason=_reason(states),
        conditions=tuple(_condition(before, state, generation, now) for state in states),
        resolved_image=decision.shown.image or None,
        model=model_section(deployment, decision.shown.model_revision),
        speculation=speculation_section(deployment, decision, now),
        tasks=task_sections(deployment, decision),
        draft=draft_section(deployment, observed, outcome.job_problem),
        traffic=traffic_section(before.traffic, decision.shown.figures),
        capacity=capacity_section(before.capacity, decision),
        router=router_section(deployment, observed),
        prefill=prefill_section(deployment, observed),
        memory=memory_section(before.memory, observed),
        start=start_section(before.start, observed),
    )


def failed_status(
    before: Status,
    generation: int,
    reason: str,
    message: str,
    *,
    now: float,
    observed: Observation | None = None,
) -> Status:
    """Return the status of a deployment whose spec cannot be carried out: Stalled, not Ready, the rest as before.

    Args:
        before: The previous status.
        generation: Generation of the spec that was refused.
        reason: Reason in one word, for example SpecRefused.
        message: What is wrong with the spec and where.
        now: Time in seconds since the epoch.
        observed: Children and pods, if they are known. Available and the counts of workers follow from them; without
            them they stay as they were.
    """
    blocker = Finding(reason, message)
    states = [stalled(blocker), not_ready(blocker), *_availability(before, observed)]
    states.append(ConditionState(ConditionType.progressing, "False", reason, message))
    replaced = {ConditionType.reconciling, *(state.type for state in states)}
    others = (condition for condition in before.conditions if condition.type not in replaced)
    update = {
        "conditions": (*(_condition(before, state, generation, now) for state in states), *others),
        "reason": _reason(states),
        "observed_generation": generation,
    }
    workload = observed.workload if observed else None
    if workload is not None:
        counts = {"replicas": workload.replicas, "ready_replicas": workload.ready}
        update |= {**counts, "ready": f"{workload.ready}/{workload.wanted}"}
    return before.model_copy(update=update)


def _availability(before: Status, observed: Observation | None) -> list[ConditionState]:
    """Return Available of workers that an earlier spec started. Without an observation it stays as it was."""
    if observed is not None and observed.workload is not None:
        trouble = next(troubles(observed), None)
        return [available(observed.workload, observed.workload.wanted, trouble, at_zero="no worker is wanted")]
    if any(condition.type == ConditionType.available for condition in before.conditions):
        return []
    return [ConditionState(ConditionType.available, "False", "NoWorkers", "no worker was started")]


def _past(before: Status, now: float) -> Past:
    ready, blocked = _known(before, ConditionType.ready), _known(before, ConditionType.stalled)
    crashed = blocked is not None and blocked.reason == "WorkerFailing"
    if ready is None or ready.status == "True":
        return Past()
    since = seconds_of_timestamp(ready.last_transition_time)
    return Past(max(0.0, now - since), frozenset(named_pods(blocked.message) if blocked and crashed else ()))


def _steady(before: Status, state: ConditionState, *, published: bool, asked: bool) -> ConditionState:
    """Return ``state`` with its previous message where only a measurement or the phase of a retry changed in it.

    A condition that waits for reports is returned as it was until workers were asked for them.

    Args:
        before: The previous status.
        state: The new state.
        published: Whether new measurements are published now.
        asked: Whether this process has asked the workers for reports.
    """
    known = _known(before, state.type)
    if known is not None and state.reason in WITHOUT_REPORT_REASONS and not asked:
        return ConditionState(state.type, known.status, known.reason, known.message, known.status == "False")
    if known is None or (known.status, known.reason) != (state.status, state.reason):
        return state
    measured = state.type in WITH_MEASUREMENTS and state.status != "Unknown" and not published
    alternates = state.reason in ALTERNATING_REASONS and named_pods(known.message) == named_pods(state.message)
    return state._replace(message=known.message) if measured or alternates else state


def named_pods(message: str) -> set[str]:
    """Return the names of the pods that a condition's message is about."""
    return set(re.findall(r"\bpod (\S+):", message))


def _condition(before: Status, state: ConditionState, generation: int, now: float) -> Condition:
    known = _known(before, state.type)
    since = known.last_transition_time if known and known.status == state.status else iso(now)
    return Condition(
        type=state.type,
        status=state.status,
        reason=state.reason,
        message=state.message[:MAX_MESSAGE],
        last_transition_time=since,
        observed_generation=generation,
    )


def _known(before: Status, kind: ConditionType) -> Condition | None:
    return next((condition for condition in before.conditions if condition.type == kind), None)


def _reason(states: Iterable[ConditionState]) -> str | None:
    """Return what a user should look at first, for the REASON column, or None."""
    worst = next((state for state in states if state.bad), None)
    return f"{worst.reason}: {worst.message}"[:MAX_REASON] if worst else None
