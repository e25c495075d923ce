"""Assignment of drafts to workers, and events of a rollout that are observed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from specdecode_operator.api.draft import UNRESOLVED, SpecDecodeDraft, TrialRecord
from specdecode_operator.api.v1alpha1 import Cause, DraftLineageStatus, seconds_of
from specdecode_operator.drafts.crossover import Verdict
from specdecode_operator.drafts.lifecycle import FAILURE_LIMIT, Event, EventKind, Mode, Phase, advance
from specdecode_operator.rollout.trial_evidence import count_pairs, evidence_text, verdict_of
from specdecode_operator.state.draft_record import DraftRecord
from specdecode_operator.times import iso
from specdecode_operator.types import Deployment, Observation, Worker
from specdecode_worker.contract import OTHER_TASK, Artifact, DraftAssignment, DraftTrial, Report
from specdecode_worker.contract.distillation import DistillationVerdict

# Assignment of drafts in the plan, from the stored rollout, and the choice of the canary pod.


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


# Events of the life cycle, as they follow from spec, pods and reports.
#
# A detector looks at one kind of evidence. It returns the record with what it took note of, and an event if there is
# one. Detectors of training runs are in `runs`.

REFUSAL_SECONDS = 10.0
"""Time after an assignment before a worker's problem counts as a refusal of it: reports may show an older problem."""
PHASE_SECONDS: Mapping[Phase, float] = {Phase.PROMOTING: 1800.0, Phase.ROLLING_BACK: 1800.0}
"""Time limits of phases, long enough for a download by every worker."""
_VERDICTS = {
    Verdict.PROMOTE: (EventKind.CANARY_BETTER, "the candidate is faster"),
    Verdict.ROLL_BACK: (EventKind.CANARY_WORSE, "the candidate is slower, as a whole or in a task"),
    Verdict.UNDECIDED: (EventKind.CANARY_UNDECIDED, "all pairs ran without enough evidence"),
}


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that events are found in."""

    deployment: Deployment
    observed: Observation
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """Result of a detector."""

    record: DraftRecord
    """The record with what the detector took note of."""
    event: Event | None = None
    reason: str = ""
    cause: Cause = "failure"
    loss: float = 0.0
    """Share of device time that a stale draft costs, where this requests a run."""
    stale_since: float = 0.0
    """Time of the first alarm, where drift requests a run; 0 otherwise."""
    verdict: DistillationVerdict | None = None
    """Verdict of a run's Job."""
    previous: str = ""
    """Draft that a promoted one replaces, where a restore brought both; empty for the one in use."""


Detector = Callable[[Facts, DraftRecord], Detection | None]


def find_spec_change(facts: Facts, record: DraftRecord) -> Detection | None:
    """Find a changed draft or target of the spec."""
    spec = facts.deployment.spec
    draft = spec.speculation.draft.uri if spec.speculation.draft else ""
    method = spec.speculation.method
    update = {"spec_draft": draft, "method": method, "target": spec.model.target, "spec_hash": ""}
    noted = record.model_copy(update=update)
    if (draft, method) != (record.spec_draft, record.method):
        reason = f"the draft of the spec is {draft or 'absent'} now, of method {method}"
        return Detection(record=noted, event=Event(kind=EventKind.DRAFT_CHANGED), reason=reason, cause="user")
    if spec.model.target != record.target:
        reason = f"the target of the spec is {spec.model.target} now"
        return Detection(record=noted, event=Event(kind=EventKind.TARGET_CHANGED), reason=reason, cause="user")
    return None


def find_image_change(facts: Facts, record: DraftRecord) -> Detection | None:
    """Find another image of the workers."""
    image = image_of(facts.observed)
    if not image or image == record.image:
        return None
    noted = record.model_copy(update={"image": image})
    if not record.image:
        return Detection(record=noted)
    reason = f"the workers' image changed to {image}"
    return Detection(record=noted, event=Event(kind=EventKind.IMAGE_CHANGED), reason=reason, cause="user")


def find_rejection(facts: Facts, record: DraftRecord) -> Detection | None:
    """Find a draft that is tried or serves although its SpecDecodeDraft was retired or deleted, or a rejected run."""
    named = facts.deployment.spec.distillation.trigger.reject
    if record.run is not None and record.run.id == named:
        event = Event(kind=EventKind.USER_REJECT)
        return Detection(record=record, event=event, reason=f"distillation.trigger.reject names {named}", cause="user")
    in_use = record.candidate or record.current
    draft = draft_with(facts, record, in_use)
    is_tried = record.phase is Phase.CANARY
    if not in_use or (draft is not None and draft.spec.role in ("Serving", "Candidate" if is_tried else "Serving")):
        return None
    event = Event(kind=EventKind.USER_REJECT if is_tried else EventKind.USER_ROLLBACK)
    if advance(record.lifecycle, event).state == record.lifecycle:
        return None
    what = "was deleted" if draft is None else f"{draft.name} has the role {draft.spec.role}"
    return Detection(record=record, event=event, reason=f"the SpecDecodeDraft {what}", cause="user")


def draft_with(facts: Facts, record: DraftRecord, one: str) -> SpecDecodeDraft | None:
    """Return the SpecDecodeDraft of a draft in the record; None if there is none."""
    uri = record.uris.get(one)
    drafts = facts.observed.drafts
    named = (draft for draft in drafts if draft.id == one)
    return next(named, next((draft for draft in drafts if not draft.spec.hash and draft.spec.uri == uri), None))


def find_trial_event(facts: Facts, record: DraftRecord) -> Detection | None:
    """Find the loss of the canary pod, a refusal, new pairs, and a verdict."""
    if record.phase is not Phase.CANARY:
        return None
    draft, trial = draft_with(facts, record, record.candidate), record.trial
    is_approved = draft is not None and draft.spec.role == "Serving"
    if is_approved or (record.is_confirmed and record.mode is not Mode.MANUAL):
        event = Event(kind=EventKind.USER_PROMOTE if is_approved else EventKind.CANARY_BETTER)
        reason = "its role is Serving" if is_approved else f"mode is {record.mode} now"
        return Detection(record=record, event=event, reason=f"{reason}: {evidence_text(trial)}", cause="user")
    if record.is_confirmed:
        return None
    if trial is None or not trial.pod:
        return None
    worker = next((one for one in facts.observed.workers if one.uid == trial.pod_uid and not one.leaving), None)
    lost = _loss_of(worker, trial)
    if lost:
        noted = _with_trial(record, trial.model_copy(update={"pod": "", "pod_uid": "", "boot": ""}))
        reason = f"pod {trial.pod}: {lost} (loss {record.canary_losses + 1} of {FAILURE_LIMIT})"
        return Detection(record=noted, event=Event(kind=EventKind.CANARY_POD_LOST), reason=reason)
    state = worker.report.trial if worker is not None and worker.report is not None else None
    if state is None or state.id != trial.id:
        return None
    if state.state == "Failed":
        reason = f"pod {trial.pod}: {state.problem or 'the draft could not be loaded'}"
        return Detection(record=record, event=Event(kind=EventKind.LOAD_REFUSED), reason=reason)
    if record.candidate.startswith(UNRESOLVED):
        return _resolved(facts, record, trial, state.hash) if state.hash else None
    counted = count_pairs(trial, state.pairs, _tasks(facts.deployment))
    if counted == trial:
        return None
    noted = _with_trial(record, counted)
    verdict = _VERDICTS.get(verdict_of(counted))
    if verdict is None:
        return Detection(record=noted)
    kind, words = verdict
    return Detection(record=noted, event=Event(kind=kind), reason=f"{words}: {evidence_text(counted)}", cause="canary")


def _resolved(facts: Facts, record: DraftRecord, trial: TrialRecord, found: str) -> Detection:
    """Return the record with the hash that a worker reported for the candidate, and start its trial again."""
    uri = record.uris[record.candidate]
    refusal = _refusal(found, record.current or record.spec_hash)
    if refusal:
        return Detection(record=record, event=Event(kind=EventKind.LOAD_REFUSED), reason=f"{uri}: {refusal}")
    uris = {draft: place for draft, place in record.uris.items() if draft != record.candidate}
    begun = trial.model_copy(update={"pod": "", "pod_uid": "", "boot": ""})
    return Detection(
        record=record.model_copy(update={"candidate": found, "uris": {**uris, found: uri}, "trial": begun})
    )


def _refusal(candidate: str, incumbent: str) -> str:
    """Return why a candidate is not tried; empty if it is."""
    return f"the workers run the candidate {candidate[:12]} already" if candidate == incumbent else ""


def find_convergence(facts: Facts, record: DraftRecord) -> Detection | None:
    """Find out whether all workers run the assigned draft, or refuse it. Reports on older plans say nothing."""
    workers = [worker for worker in facts.observed.workers if worker.ready and not worker.leaving]
    plan = facts.observed.session.learned.plan
    if plan is None or plan.assignment != assignment_of(record, facts.deployment):
        return None
    current = record.current or record.spec_hash
    reports = [worker.report for worker in workers if worker.report and worker.report.plan.version >= plan.version]
    is_settled = facts.now - record.since >= REFUSAL_SECONDS
    refusals = list(_refusals(reports, current)) if is_settled else []
    if record.phase in (Phase.PROMOTING, Phase.ROLLING_BACK):
        if refusals:
            return Detection(record=record, event=Event(kind=EventKind.LOAD_REFUSED), reason=refusals[0])
        is_complete = len(reports) == len(workers) and all(_runs(report, current) for report in reports)
        if is_complete and (workers or _wants_none(facts.observed)):
            reason = f"all workers ({len(workers)}) run {current[:12]}"
            return Detection(record=record, event=Event(kind=EventKind.CONVERGED), reason=reason, cause="canary")
        return None
    if record.phase in (Phase.SERVING, Phase.COOLDOWN) and record.current and 2 * len(refusals) >= max(1, len(workers)):
        reason = f"{len(refusals)} of {len(workers)} workers cannot load the promoted draft: {refusals[0]}"
        return Detection(record=record, event=Event(kind=EventKind.ARTEFACT_LOST), reason=reason)
    return None


def find_time_over(facts: Facts, record: DraftRecord) -> Detection | None:
    """Find a phase that lasts longer than its limit."""
    spec = facts.deployment.spec
    limits = {
        **PHASE_SECONDS,
        Phase.CANARY: seconds_of(spec.draft_rollout.max_duration),
        Phase.COOLDOWN: seconds_of(spec.distillation.trigger.cooldown),
    }
    limit = limits.get(record.phase)
    if limit is None or facts.now - record.since < limit:
        return None
    is_trial = record.phase is Phase.CANARY
    reason = f"{record.phase} lasted {limit:.0f} s" + (f": {evidence_text(record.trial)}" if is_trial else "")
    return Detection(record=record, event=Event(kind=EventKind.TIME_OVER), reason=reason)


def find_offer(facts: Facts, record: DraftRecord) -> Detection | None:
    """Find the next draft that is to serve or to be tried, once a worker runs the draft to compare it with."""
    draft, incumbent = next_offer(facts.observed), record.current or spec_hash_of(facts)
    if draft is None or obstacle_of_offer(facts, record):
        return None
    begun = begun_from(facts)
    noted = record.model_copy(
        update={
            **begun,
            "spec_hash": record.spec_hash if record.current else incumbent,
            "uris": {**record.uris, draft.id: draft.spec.uri},
            "refusal": "",
        }
    )
    base = draft.spec.base
    refusal = _refusal(draft.id, incumbent)
    if base is not None and (base.target, base.draft, base.method) != (noted.target, noted.spec_draft, noted.method):
        refusal = f"it is of {base.target} with the draft {base.draft}, and spec.base says so"
    if refusal:
        entry = DraftLineageStatus(
            hash=draft.id, uri=draft.spec.uri, time=iso(facts.now), outcome="Refused", reason=refusal[:1000]
        )
        ended = noted.with_ended(entry)
        return Detection(record=ended.model_copy(update={"refusal": refusal, "uris": record.uris}))
    if draft.spec.role == "Serving":
        event = Event(kind=EventKind.USER_PROMOTE, draft=draft.id)
        replaced = None if record.current else draft_with(facts, record, draft.spec.replaces or "")
        if replaced is not None:
            noted = noted.model_copy(update={"uris": {**noted.uris, replaced.id: replaced.spec.uri}})
        return Detection(
            record=noted,
            event=event,
            reason=f"the role of {draft.name} is Serving",
            cause="user",
            previous=replaced.id if replaced else "",
        )
    event = Event(kind=EventKind.USER_CANDIDATE, draft=draft.id)
    reason = f"{draft.name} offers {draft.spec.uri}; it is compared with {incumbent[:12]}"
    return Detection(record=noted, event=event, reason=reason, cause="user")


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


OFFERS: tuple[Detector, ...] = (find_offer,)
"""Detectors that begin a rollout. They run for deployments without one too."""
DETECTORS: tuple[Detector, ...] = (
    find_spec_change,
    find_image_change,
    find_rejection,
    find_trial_event,
    find_convergence,
    find_time_over,
    find_offer,
)
"""All detectors in their order: what a user did goes before what workers report, and that before time."""


def image_of(observed: Observation) -> str:
    """Return the image of the applied pod template; empty before the first one."""
    template = observed.session.learned.template
    return template.image if template else ""


def _loss_of(worker: Worker | None, trial: TrialRecord) -> str:
    """Return how the worker that ran the trial was lost; empty if it was not."""
    if worker is None:
        return "it is gone"
    return "it restarted" if worker.report is not None and worker.report.boot_id != trial.boot else ""


def _with_trial(record: DraftRecord, trial: TrialRecord) -> DraftRecord:
    return record.model_copy(update={"trial": trial})


def _tasks(deployment: Deployment) -> tuple[str, ...]:
    return (*(task.name for task in deployment.spec.speculation.tasks), OTHER_TASK)


def _runs(report: Report, draft: str) -> bool:
    return report.draft.hash == draft and report.draft.pending is None and report.trial is None


def _refusals(reports: list[Report], draft: str) -> Iterator[str]:
    """Yield the reasons of workers that do not run the assigned draft and load none."""
    for report in reports:
        problem = report.draft.problem or report.draft.swap_problem
        if problem and report.draft.hash != draft and report.draft.pending is None:
            yield f"worker {report.worker}: {problem}"


def _wants_none(observed: Observation) -> bool:
    return observed.workload is not None and observed.workload.wanted == 0


def spec_hash_of(facts: Facts) -> str:
    """Return the hash of the spec's draft that most workers report; empty if none does."""
    draft = facts.deployment.spec.speculation.draft
    hashes = [
        report.draft.hash
        for report in facts.observed.reports
        if report.draft.hash and draft is not None and report.draft.uri in ("", draft.uri)
    ]
    return max(sorted(set(hashes)), key=hashes.count, default="")
