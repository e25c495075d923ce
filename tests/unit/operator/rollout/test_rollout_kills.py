"""Rollout of drafts under random reports, losses, commands and kills of the operator at any write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_operator.drafts.job_status import JobState, JobStatus
from specdecode_operator.rollout.runs import assignment_of
from specdecode_operator.state.learned import Session, parse_state, parse_training, render_state, render_training
from specdecode_worker.contract import TrialState
from support.operators.canary import (
    COOLDOWN,
    DISTILLATION,
    NEW,
    OLD,
    TRAINED,
    Canary,
    Pod,
    canary_with,
    capturing,
    distilling,
    verdict,
)

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pairs"), st.integers(1, 12), st.floats(-0.3, 0.3)),
        st.tuples(st.sampled_from(("lose", "restart", "fail", "deaf", "heal", "offer", "withdraw", "wait", "tick"))),
        st.tuples(st.just("command"), st.sampled_from(("promote", "reject", "rollback"))),
        st.tuples(st.just("kill"), st.sampled_from(("before", "one", "two", "drafts", "state", "after"))),
    ),
    max_size=25,
)

JOB_ENDS = {
    "better": verdict(),
    "worse": verdict("worse", gain=-0.1),
    "poisoned": verdict("failed", failure="poisoned"),
    "killed": JobStatus(state=JobState.OUT_OF_MEMORY),
    "suspended": JobStatus(state=JobState.SUSPENDED),
    "running": JobStatus(state=JobState.RUNNING),
}
DELETED = JobStatus(state=JobState.FAILED, completed=True)
"""Status of a Job that completed and writes no verdict, as the one that deletes the folder of a run."""
RUN_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pairs"), st.integers(1, 12), st.floats(-0.3, 0.3)),
        st.tuples(st.sampled_from(("lose", "offer", "wait", "tick", "vanish", "mode"))),
        st.tuples(st.just("capture"), st.integers(1, 80)),
        st.tuples(st.just("job"), st.sampled_from(sorted(JOB_ENDS))),
        st.tuples(st.just("command"), st.sampled_from(("distill", "distill", "reject", "rollback"))),
        st.tuples(st.just("kill"), st.sampled_from(("before", "one", "drafts", "state", "after", "job"))),
    ),
    max_size=25,
)
LIMITS = {"before": 0, "one": 1, "two": 2}
"""Requests about drafts after which the operator is killed."""


class Cluster:
    """The drafts and the ConfigMaps of state and plan, and an operator that is killed between any two writes."""

    def __init__(self, canary: Canary, **spec: Any) -> None:
        self.canary, self.spec = canary, spec
        self.vanished = 0
        self.pods = 2
        self.versions: list[int] = []
        self.write()

    def write(self, killed: str = "") -> None:
        self.canary.write_drafts(LIMITS.get(killed, 100))
        if killed not in (*LIMITS, "drafts"):
            self.training = render_training(self.canary.record)
            self.state = render_state(self.canary.session.learned)
            if killed != "state":
                self.plan = self.canary.session.learned.plan

    def tick(self, killed: str = "") -> None:
        """Decide, write rollout and state, write Jobs, push. A kill loses what comes after it."""
        decision = self.canary.tick(push=False)
        self.write(killed)
        if killed == "job":
            self.canary.write_jobs()
        if killed:
            self.restart()
            return
        self.versions.append(decision.plan.version)
        self.canary.push()

    def restart(self) -> None:
        learned = parse_state(self.state, "u1", self.plan)
        self.canary.session = Session(learned=learned, drafts=parse_training(self.training))

    def carry_out(self, step: tuple[Any, ...]) -> None:
        canary, kind = self.canary, step[0]
        trying = [pod for pod in canary.pods if pod.trial is not None]
        if kind == "pairs" and trying:
            for _ in range(step[1]):
                if canary.phase == "Canary" and canary.record.trial and canary.record.trial.pod and trying[0].trial:
                    canary.finish_pairs(1, step[2])
                    self.write()
        elif kind == "lose":
            self.pods += 1
            canary.pods = [*canary.pods[1:], Pod(f"pod-{self.pods}", str(self.pods))]
        elif kind == "restart":
            canary.pods[0].boot += "x"
        elif kind == "fail" and trying:
            trying[0].trial = TrialState(id=canary.pods[0].trial.id if canary.pods[0].trial else "x", state="Failed")
        elif kind in ("deaf", "heal"):
            canary.pods[-1].obeys = kind == "heal"
        elif kind == "offer":
            canary.offer()
        elif kind == "withdraw":
            canary.withdraw()
        elif kind == "mode":
            canary.change(draft_rollout={"mode": "Direct"}, **self.spec)
        elif kind == "capture":
            canary.pods[0].captured = (canary.pods[0].captured or 0) + step[1]
        elif kind == "job" and canary.jobs:
            canary.job_ends(JOB_ENDS[step[1]])
        elif kind == "vanish" and canary.jobs:
            self.vanished += len(canary.jobs)
            canary.jobs = []
        elif kind == "wait":
            canary.now += 4000
        elif kind == "command":
            canary.command(step[1])
        self.tick(step[1] if kind == "kill" else "")


def check_rest(canary: Canary, *drafts: str) -> None:
    """Check that no rollout goes on, and that both workers run one draft of these, which alone has the role Serving."""
    current = canary.record.current
    expected = current or OLD
    assert expected in drafts
    assert [(pod.draft, pod.trial) for pod in canary.pods] == [(expected, None)] * 2
    assert (canary.phase, canary.session.learned.draft) == ("Serving", expected)
    roles = {one.id: (one.spec.role, one.status.phase) for one in canary.drafts}
    assert current == "" or roles[current] == ("Serving", "Serving")
    assert all(one == ("Retired", "Retired") for draft, one in roles.items() if draft != current)


@pytest.mark.slow
@given(steps=STEPS)
@settings(max_examples=40)
def test_every_history_ends_with_one_draft_on_all_workers(steps: list[tuple[Any, ...]]) -> None:
    cluster = Cluster(canary_with())
    for step in steps:
        cluster.carry_out(step)
        stored = cluster.canary.observed().session.drafts
        running = [pod.plan.assignment for pod in cluster.canary.pods if pod.plan.assignment is not None]
        if step[0] not in ("kill", "lose"):
            assert all(one == assignment_of(stored, cluster.canary.deployment) for one in running)
    assert cluster.versions == sorted(cluster.versions), "a plan never has a lower version than one that was pushed"
    canary = cluster.canary
    for pod in canary.pods:
        pod.obeys = True
    canary.retire_others()
    canary.change(draft_rollout={}, distillation=COOLDOWN)
    for _ in range(60):
        canary.now += 600
        cluster.tick()
    check_rest(canary, OLD, NEW)


@pytest.mark.slow
@given(steps=RUN_STEPS, is_begun=st.booleans())
@settings(max_examples=40)
def test_runs_make_one_job_and_end_with_one_draft_on_all_workers(steps: list[tuple[Any, ...]], is_begun: bool) -> None:
    cluster = Cluster(distilling() if is_begun else capturing(), distillation=DISTILLATION)
    canary = cluster.canary
    for step in steps:
        cluster.carry_out(step)
        trains = [job for job in canary.jobs if "-distill-" in job.name]
        assert len(trains) <= 1 or step[0] == "kill", "a Job is deleted in the step that creates another one"
        assert len(canary.jobs) - len(trains) <= 1 or step[0] == "kill", "and so is one that deletes a run"
        created = [name for name in canary.created_jobs if "-distill-" in name]
        assert len(created) - len(set(created)) <= cluster.vanished
    assert cluster.versions == sorted(cluster.versions)
    canary.retire_others()
    canary.change(draft_rollout={}, distillation=DISTILLATION)
    canary.command("reject")
    for _ in range(60):
        canary.now += 600
        cluster.tick()
        canary.jobs = [replace(job, status=DELETED) if "-delete-" in job.name else job for job in canary.jobs]
    record = canary.record
    assert (canary.jobs, record.run, record.undeleted_run) == ([], None, None)
    check_rest(canary, OLD, NEW, TRAINED)
    plan = canary.session.learned.plan
    assert plan.capture.delete_before == record.captures_deleted_before
