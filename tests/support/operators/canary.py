"""A deployment of two workers whose reports a test writes, for the rollout of drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specdecode_operator import metrics
from specdecode_operator.api.draft import DraftResourceSpec, DraftResourceStatus, Role, SpecDecodeDraft
from specdecode_operator.api.v1alpha1 import NameRef, Status
from specdecode_operator.controller.status import status_of
from specdecode_operator.decision.decide import decide
from specdecode_operator.drafts.job_status import JobState, JobStatus
from specdecode_operator.errors import PluginError
from specdecode_operator.plugin.drafts import change_for, drafts
from specdecode_operator.state.learned import DraftRecord, Session, parse_training, render_training
from specdecode_operator.state.store import draft_writes, manifest_of, record_of
from specdecode_operator.types import Decision, Deployment, Observation, Outcome, TrainingJob, Worker
from specdecode_worker.contract import (
    Artifact,
    CaptureReport,
    DraftState,
    Plan,
    PlanState,
    Report,
    TrialCost,
    TrialPair,
    TrialState,
)
from specdecode_worker.contract.distillation import DistillationVerdict, GainBounds
from support.operators.fleet import DEFAULTS, deployment_with, restarted, workload_with
from support.operators.reports import main_cell
from support.operators.statuses import resource_of

OLD, NEW = "0ld0ld0ld0ld", "new000new000"
CANDIDATE = {"uri": "file:///new", "hash": NEW}
TRAINED = "7ra1ned7ra1n"
"""Hash of the draft of a training run."""
COOLDOWN = {"trigger": {"cooldown": "1h"}}
DISTILLATION = {
    "capture": {},
    "storage": {"uri": "pvc://drafts"},
    "trigger": {"minConversations": 100, "cooldown": "1h"},
}


def pair(index: int, gain: float, task: str = "other") -> TrialPair:
    """Return a pair in which the candidate is this share faster."""

    def costs(seconds: float) -> tuple[TrialCost, ...]:
        return (TrialCost(task=task, concurrency=0, context=0, sequence_seconds=seconds, tokens=1000),)

    return TrialPair(index=index, incumbent=costs(10 * (1 + gain)), candidate=costs(10))


@dataclass
class Pod:
    """A worker that follows its plan at once, unless a test says otherwise."""

    name: str
    uid: str
    boot: str = "boot-1"
    draft: str = OLD
    plan: Plan = field(default_factory=Plan)
    trial: TrialState | None = None
    ready: bool = True
    swap_problem: str | None = None
    obeys: bool = True
    clock: float = 0
    captured: int | None = None
    """Captured conversations; None while the plan switches no capture on."""
    oldest: float | None = None
    deleted_before: float = 0
    drafted: int = 0
    """First tokens that were drafted, all of them missed."""

    def follow(self, plan: Plan, spec_draft: str) -> None:
        """Take the plan: load the assigned draft, and begin or end the trial."""
        self.plan = plan
        rules = plan.capture
        is_deleted = rules is not None and rules.delete_before > self.deleted_before
        self.captured = None if rules is None else 0 if self.captured is None or is_deleted else self.captured
        self.deleted_before = max(self.deleted_before, rules.delete_before if rules else 0)
        assignment = plan.assignment
        if assignment is None or not self.obeys:
            return
        self.draft = assignment.stable.hash if assignment.stable else spec_draft
        mine = assignment.trial if assignment.trial and assignment.trial.pod == self.name else None
        if mine is None:
            self.trial = None
        elif self.trial is None or self.trial.id != mine.id:
            self.trial = TrialState(id=mine.id, state="Running", pair=mine.first_pair)

    def worker(self) -> Worker:
        report = Report(
            boot_id=self.boot,
            worker=self.name,
            clock_seconds=self.clock,
            draft=DraftState(method="eagle3", hash=self.draft, swap_problem=self.swap_problem),
            plan=PlanState(uid=self.plan.uid, version=self.plan.version, draft=self.plan.draft),
            trial=self.trial,
            capture=None if self.captured is None else CaptureReport(conversations=self.captured, oldest=self.oldest),
            drafts=self.drafted,
            acceptance=(main_cell(self.draft, "other", 1, (*[0] * 8, self.drafted)),),
        )
        return Worker(name=self.name, uid=self.uid, address=f"10.0.0.{self.uid}", ready=self.ready, report=report)


@dataclass
class Canary:
    """The decision closed over pods: decide, store, push, and a round of reports."""

    deployment: Deployment
    pods: list[Pod] = field(default_factory=lambda: [Pod("pod-a", "1"), Pod("pod-b", "2")])
    now: float = 1_000_000.0
    session: Session = field(default_factory=Session)
    decision: Decision | None = None
    spec_draft: str = OLD
    jobs: list[TrainingJob] = field(default_factory=list)
    created_jobs: list[str] = field(default_factory=list)
    """Names of all Jobs that were created."""
    drafts: list[SpecDecodeDraft] = field(default_factory=list)
    """The SpecDecodeDrafts of the deployment."""

    @property
    def record(self) -> DraftRecord:
        return self.session.drafts

    @property
    def phase(self) -> str:
        return str(self.record.phase)

    @property
    def tries(self) -> Pod:
        """The pod that tries the candidate."""
        trial = self.record.trial
        return next(one for one in self.pods if trial is not None and one.uid == trial.pod_uid)

    def tick(self, seconds: float = 5.0, *, push: bool = True) -> Decision:
        self.now += seconds
        for pod in self.pods:
            pod.clock += seconds
        self.decision, self.session = decide(self.deployment, self.observed(), DEFAULTS, now=self.now)
        if push:
            self.push()
        return self.decision

    def observed(self) -> Observation:
        """Return what a step observes."""
        workers, drafts = tuple(pod.worker() for pod in self.pods), tuple(sorted(self.drafts, key=lambda one: one.name))
        return Observation(
            workload=workload_with(len(workers)),
            workers=workers,
            session=replace(self.session, drafts=record_of(drafts, self.record)),
            drafts=drafts,
            jobs=tuple(self.jobs),
        )

    def write_drafts(self, limit: int = 100) -> None:
        """Write the drafts as the store does; no more than ``limit`` requests, each of a spec or a status."""
        for write in draft_writes(self.deployment, self.record, self.observed().drafts, now=self.now):
            before, after = write.before, SpecDecodeDraft.model_validate(manifest_of(write.after))
            for part in ("spec", "status"):
                if limit <= 0:
                    return
                if before is None and part == "spec":
                    self.drafts.append(after.model_copy(update={"status": DraftResourceStatus()}))
                elif before is not None and getattr(before, part) == getattr(after, part):
                    continue
                index = next(index for index, one in enumerate(self.drafts) if one.name == after.name)
                self.drafts[index] = self.drafts[index].model_copy(update={part: getattr(after, part)})
                limit -= 1

    def write_jobs(self) -> None:
        """Create and delete Jobs as the reconciler does."""
        ended = {job.uid for job in self.decision.ended_jobs}
        self.jobs = [job for job in self.jobs if job.uid not in ended]
        wanted = self.decision.job
        if wanted is not None and wanted["metadata"]["name"] not in {job.name for job in self.jobs}:
            self.created_jobs.append(wanted["metadata"]["name"])
            self.jobs.append(
                TrainingJob(
                    name=wanted["metadata"]["name"],
                    uid=f"job-{len(self.created_jobs)}",
                    run=wanted["metadata"]["labels"]["specdecode.io/run"],
                    owner_uid=wanted["metadata"]["ownerReferences"][0]["uid"],
                    deleting=False,
                    status=JobStatus(state=JobState.PENDING),
                )
            )

    def job_ends(self, status: JobStatus) -> None:
        self.jobs[-1] = replace(self.jobs[-1], status=status)

    def end_job(self, status: JobStatus) -> Decision:
        """Give the Job another status, and let the operator see it."""
        self.job_ends(status)
        return self.tick()

    def push(self) -> None:
        self.write_drafts()
        self.write_jobs()
        for pod in self.pods:
            pod.follow(self.decision.plan, self.spec_draft)

    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.tick()

    def until(self, phase: str, ticks: int = 20) -> None:
        for _ in range(ticks):
            if self.phase == phase:
                return
            self.tick()
        raise AssertionError(f"{self.phase} instead of {phase}")

    def finish_pairs(self, count: int, gain: float) -> None:
        """Let the canary finish pairs, one in each tick."""
        for _ in range(count):
            pod = self.tries
            index = pod.trial.pair
            pairs = (*pod.trial.pairs, pair(index, gain))[-16:]
            pod.trial = pod.trial.model_copy(update={"pairs": pairs, "pair": index + 1})
            self.tick()
            if self.phase != "Canary" or self.record.is_confirmed:
                return

    def change(self, **spec: Any) -> None:
        """Change the spec, as a user does."""
        self.deployment = replace(self.deployment, spec=deployment_with(replicas=2, **spec).spec)

    def offer(self, candidate: Mapping[str, str] = CANDIDATE, role: Role = "Candidate") -> None:
        """Offer a draft as a user does, by a new SpecDecodeDraft or by the role of the one that there is."""
        known = [one for one in self.drafts if one.spec.uri == candidate["uri"]]
        if known:
            self.set_role(known[0].id, role)
            return
        spec = DraftResourceSpec(deployment_ref=NameRef(name="demo"), role=role, **candidate)
        metadata = {"name": f"draft-{len(self.drafts)}", "namespace": "ns", "uid": f"draft-{len(self.drafts)}"}
        self.drafts.append(SpecDecodeDraft(metadata=metadata, spec=spec))

    def withdraw(self) -> None:
        """Delete all drafts that a user offered."""
        self.drafts = []

    def set_role(self, draft: str, role: Role) -> None:
        for index, one in enumerate(self.drafts):
            if one.id == draft:
                self.drafts[index] = one.model_copy(update={"spec": one.spec.model_copy(update={"role": role})})

    def retire_others(self) -> None:
        for one in self.drafts:
            if one.id != self.record.current:
                self.set_role(one.id, "Retired")

    def command(self, verb: str) -> None:
        """Promote, reject, roll back or distill, as the plugin does."""
        record, spec = self.record, self.deployment.spec
        if (verb in ("promote", "rollback") or record.run is None) and verb != "distill":
            named = record.current or record.candidate if verb == "rollback" else record.candidate or record.current
            self.set_role(named, "Serving" if verb == "promote" else "Retired")
            return
        asked = {"request": f"at {self.now}"} if verb == "distill" else {"reject": record.run.id if record.run else ""}
        trigger = spec.distillation.trigger.model_copy(update=asked)
        distillation = spec.distillation.model_copy(update={"trigger": trigger})
        self.deployment = replace(self.deployment, spec=spec.model_copy(update={"distillation": distillation}))

    def carry_out(self, verb: str) -> Decision:
        """Give a command, and let the operator see it."""
        self.command(verb)
        return self.tick()

    def restart_operator(self) -> None:
        """Drop everything but what the ConfigMap and the SpecDecodeDrafts have."""
        before, training = self.record, parse_training(render_training(self.record))
        self.session = replace(restarted(self.session), drafts=training)
        self.session = self.observed().session
        assert self.record == before.model_copy(update={"lineage": self.record.lineage})


def canary_with(candidate: Mapping[str, str] = CANDIDATE, **rollout: Any) -> Canary:
    """Return a deployment that offers a candidate, whose workers have reported."""
    canary = Canary(deployment_with(replicas=2))
    canary.tick()
    canary.change(draft_rollout=rollout)
    canary.offer(candidate)
    return canary


def trying(**rollout: Any) -> Canary:
    """Return a deployment with a canary that runs."""
    canary = canary_with(**rollout)
    canary.ticks(2)
    assert canary.phase == "Canary"
    return canary


def offer_another(canary: Canary) -> None:
    """Offer a third draft, and let the operator see it."""
    canary.offer({"uri": "file:///third", "hash": "third0third0"})
    canary.ticks(2)


def promoting() -> Canary:
    """Return a deployment whose candidate was better, before all workers run it."""
    canary = trying()
    canary.finish_pairs(60, 0.10)
    assert canary.phase == "Promoting"
    return canary


def promoted() -> Canary:
    """Return a deployment whose candidate serves everywhere."""
    canary = promoting()
    canary.until("Cooldown")
    return canary


def capturing(**spec: Any) -> Canary:
    """Return a deployment whose workers capture, and have reported."""
    canary = Canary(deployment_with(replicas=2, distillation={**DISTILLATION, **spec.pop("distillation", {})}, **spec))
    canary.ticks(2)
    return canary


def collecting(**spec: Any) -> Canary:
    """Return a deployment whose run collects conversations, of which there are none yet."""
    canary = capturing(**spec)
    canary.carry_out("distill")
    assert canary.phase == "Collecting"
    return canary


def distilling(**spec: Any) -> Canary:
    """Return a deployment whose run has collected enough, before its Job is created."""
    canary = collecting(**spec)
    for pod in canary.pods:
        pod.captured = 50
    canary.tick(push=False)
    assert canary.phase == "Distilling"
    return canary


def training(**spec: Any) -> Canary:
    """Return a deployment with a run whose Job exists and was seen."""
    canary = distilling(**spec)
    canary.ticks(2)
    assert len(canary.jobs) == 1
    return canary


def verdict(kind: str = "better", gain: float = 0.2, draft: Artifact | None = None, **fields: Any) -> JobStatus:
    place = Artifact(uri=f"pvc://drafts/drafts/demo/{TRAINED}", hash=TRAINED)
    document = DistillationVerdict(
        verdict=kind,  # type: ignore[arg-type]
        reasons=fields.pop("reasons", ("measured",)),
        gain=None if kind == "failed" else GainBounds(estimate=gain, lower=gain - 0.05, upper=gain + 0.05),
        draft=None if kind == "failed" else draft or place,
        conversations=90,
        seconds=600,
        **fields,
    )
    return JobStatus(state=JobState.FINISHED, verdict=document)


def refusal_of(verb: str, canary: Canary) -> str:
    """Return why the plugin refuses a command; empty if it does not."""
    try:
        change_for(verb, resource_of(canary.deployment), map(manifest_of, canary.drafts), "now")
    except PluginError as error:
        return str(error)
    return ""


def shown(canary: Canary, job_problem: str = "") -> Status:
    """Return the status after the last decision, and keep it in the deployment."""
    observed = replace(canary.observed(), session=canary.session)
    status = status_of(canary.deployment, observed, canary.decision, Outcome(job_problem=job_problem), now=canary.now)
    metrics.record(canary.deployment, observed, canary.decision, status)
    canary.deployment = replace(canary.deployment, status=status)
    return status


def listed(canary: Canary) -> str:
    """Return the text of `kubectl specdecode drafts` in one line."""
    text = drafts(resource_of(canary.deployment), map(manifest_of, canary.drafts), canary.now)
    return " ".join(" ".join(text).split())
