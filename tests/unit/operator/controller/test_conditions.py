"""Ready, Available, Stalled, Reconciling and Progressing: their reasons, and what kstatus makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
from fleet import DEFAULTS, deployment_with, workload_with

from specdecode_operator.api.v1alpha1 import Condition, Status
from specdecode_operator.controller.status import failed_status, status_of
from specdecode_operator.decision.decide import decide
from specdecode_operator.state.session import Session
from specdecode_operator.types import ChildProblem, Deployment, Observation, Outcome, Worker, Workload
from specdecode_worker.contract import CheckVerdict

QUOTA = 'pods "demo-worker-1" is forbidden: exceeded quota: none, requested: pods=1, used: pods=0, limited: pods=0'
CRASH = "pull: CrashLoopBackOff: hf://org/gated needs a token: set model.tokenSecretRef"
UNSCHEDULABLE = "Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
MISFIT = CheckVerdict(serves=False, fits=False, problem="the GPU's memory of 2.00 GiB is 0.26 GiB too small")


def pod(name: str = "p", **fields: Any) -> Worker:
    return Worker(**{"name": name, "uid": name, "address": "10.0.0.1", "ready": False, **fields})


def status_with(
    workload: Workload | None = None,
    *workers: Worker,
    outcome: Outcome | None = None,
    deployment: Deployment | None = None,
    now: float = 1000,
    **spec: Any,
) -> Status:
    deployment = deployment or deployment_with(**spec)
    observed = Observation(workload=workload, workers=workers, session=Session())
    decision, _ = decide(deployment, observed, DEFAULTS, now=now)
    return status_of(deployment, observed, decision, outcome or Outcome(), now=now)


def refused(
    kind: str, name: str, message: str, reason: Literal["NotOwned", "Refused", "Unavailable"] = "Refused"
) -> Outcome:
    return Outcome(problems=(ChildProblem(kind, name, reason, message),))


def conditions(status: Status) -> dict[str, Condition]:
    return {condition.type: condition for condition in status.conditions}


def states(status: Status) -> dict[str, tuple[str, str]]:
    return {condition.type: (condition.status, condition.reason) for condition in status.conditions}


def kstatus(status: Status, generation: int = 1) -> str:
    """Return the result of kstatus for a custom resource: checkGenericProperties and then the Ready condition."""
    if (status.observed_generation or 0) != generation:
        return "InProgress"
    for condition in status.conditions:
        if condition.type == "Reconciling" and condition.status == "True":
            return "InProgress"
        if condition.type == "Stalled" and condition.status == "True":
            return "Failed"
    return "Current" if states(status).get("Ready", ("True", ""))[0] == "True" else "InProgress"


# Ready and Reconciling


def test_ready_is_true_when_all_wanted_workers_are_available() -> None:
    status = status_with(workload_with(3), replicas=3)
    assert states(status)["Ready"] == ("True", "AllWorkersAvailable")
    assert states(status)["Available"] == ("True", "WorkerAvailable")
    assert states(status)["Progressing"] == ("False", "Complete")
    assert not {"Stalled", "Reconciling"} & states(status).keys(), "abnormal-true conditions are absent"
    assert status.reason is None
    assert kstatus(status) == "Current"


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (None, "Creating"),
        (workload_with(3, updated=1), "RollingOut"),
        (replace(workload_with(3), replicas=4), "RollingOut"),
        (workload_with(3, generation=2), "RollingOut"),
        (workload_with(3, ready=1, available=1), "WorkersStarting"),
        (workload_with(1), "Scaling"),
    ],
    ids=("no workload", "old pods", "surge", "not observed", "starting", "scaled"),
)
def test_unfinished_work_is_reconciling_and_not_ready(workload: Workload | None, reason: str) -> None:
    status = status_with(workload, replicas=3)
    assert states(status)["Reconciling"] == ("True", reason)
    assert states(status)["Ready"] == ("False", reason)
    assert states(status)["Progressing"] == ("True", reason)
    assert "Stalled" not in states(status)
    assert states(status)["Available"][0] == ("True" if workload and workload.available else "False")
    assert kstatus(status) == "InProgress"


def test_a_workload_read_before_its_template_was_applied_is_not_ready() -> None:
    """The caches show the old, settled workload for a moment after a change of the spec."""
    outdated = status_with(workload_with(1, spec_hash="hash of another spec"))
    assert states(outdated)["Ready"] == ("False", "RollingOut")


def test_zero_replicas_are_ready_and_not_available() -> None:
    status = status_with(workload_with(0), replicas=0)
    assert states(status)["Ready"] == ("True", "ScaledToZero")
    assert states(status)["Available"] == ("False", "ScaledToZero")
    assert status.reason is None
    assert kstatus(status) == "Current"


def test_every_condition_has_the_observed_generation() -> None:
    deployment = replace(deployment_with(), generation=7)
    status = status_with(workload_with(), deployment=deployment)
    assert status.observed_generation == 7
    assert {condition.observed_generation for condition in status.conditions} == {7}


def test_an_unschedulable_pod_is_in_progress_until_the_deadline() -> None:
    """The scheduler waits for a node that an autoscaler may add."""
    starting = status_with(workload_with(ready=0, available=0), pod(trouble=UNSCHEDULABLE))
    assert states(starting)["Reconciling"] == ("True", "Unschedulable")
    assert "pod p: Unschedulable: 0/1 nodes are available" in conditions(starting)["Progressing"].message
    late = workload_with(ready=0, available=0, stalled='ReplicaSet "demo-1" has timed out progressing.')
    status = status_with(late, pod(trouble=UNSCHEDULABLE))
    assert states(status)["Stalled"] == ("True", "RolloutTimedOut")
    assert "timed out progressing" in conditions(status)["Stalled"].message
    assert "Insufficient nvidia.com/gpu" in conditions(status)["Stalled"].message


# Stalled


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ('worker: ErrImagePull: failed to pull image "x:1": not found', "ImageNotPulled"),
        ('worker: ImagePullBackOff: Back-off pulling image "x:1"', "ImageNotPulled"),
        ('worker: CreateContainerConfigError: secret "hub" not found', "ObjectMissing"),
        ('FailedMount: MountVolume.SetUp failed for volume "tls" : secret "certs" not found', "ObjectMissing"),
        ('Unschedulable: persistentvolumeclaim "models" not found', "ObjectMissing"),
        ('FailedMount: MountVolume.SetUp failed for volume "nfs" : mount failed: exit status 32', "VolumeNotMounted"),
        ('worker: RunContainerError: exec: "nope": executable file not found in $PATH', "ContainerNotCreated"),
    ],
)
def test_a_pod_that_needs_a_person_stalls_the_deployment(trouble: str, reason: str) -> None:
    status = status_with(workload_with(2, updated=1), pod(trouble=trouble), replicas=2)
    assert states(status)["Stalled"] == ("True", reason)
    assert conditions(status)["Stalled"].message == f"pod p: {trouble}"
    assert states(status)["Ready"] == ("False", reason)
    assert states(status)["Progressing"] == ("False", reason)
    assert "Reconciling" not in states(status)
    assert states(status)["Available"][0] == "True", "old pods serve"
    assert status.reason == f"{reason}: pod p: {trouble}"
    assert kstatus(status) == "Failed"


def test_pods_that_cannot_be_created_stall_with_the_servers_message() -> None:
    workload = workload_with(0, wanted=1, replica_failure=QUOTA)
    status = status_with(workload)
    assert states(status)["Stalled"] == ("True", "PodsNotCreated")
    assert conditions(status)["Stalled"].message == f"Deployment demo-worker: {QUOTA}"


@pytest.mark.parametrize(
    ("reason", "expected"), [("Refused", "ChildRefused"), ("NotOwned", "ChildNotOwned")], ids=("refused", "not owned")
)
def test_a_refused_child_is_named_with_the_servers_message(
    reason: Literal["NotOwned", "Refused"], expected: str
) -> None:
    status = status_with(workload_with(), outcome=refused("Service", "demo", "it belongs to Service user", reason))
    assert states(status)["Stalled"] == ("True", expected)
    assert conditions(status)["Stalled"].message == "Service demo: it belongs to Service user"
    assert states(status)["Ready"] == ("False", expected)
    assert states(status)["Available"][0] == "True"
    assert states(status)["Progressing"] == ("False", "Complete"), "the workers themselves are as desired"


def test_a_child_that_is_retried_is_reconciling() -> None:
    """A webhook that does not answer may recover by itself."""
    problem = 'failed calling webhook "check.example.com": connection refused'
    status = status_with(workload_with(), outcome=refused("ConfigMap", "demo-plan", problem, "Unavailable"))
    assert states(status)["Reconciling"] == ("True", "ApplyRetrying")
    assert conditions(status)["Reconciling"].message == f"ConfigMap demo-plan: {problem}"
    assert "Stalled" not in states(status)


def test_all_child_problems_are_named_the_gravest_first() -> None:
    problems = (
        ChildProblem("ConfigMap", "demo-plan", "Unavailable", "no answer"),
        ChildProblem("Deployment", "demo-worker", "Refused", "exceeded quota"),
        ChildProblem("Service", "demo", "NotOwned", "it belongs to someone"),
    )
    status = status_with(workload_with(), outcome=Outcome(problems=problems))
    assert states(status)["Stalled"] == ("True", "ChildNotOwned")
    expected = (
        "Service demo: it belongs to someone; Deployment demo-worker: exceeded quota; ConfigMap demo-plan: no answer"
    )
    assert conditions(status)["Stalled"].message == expected


def test_a_worker_that_does_not_fit_stalls_and_old_workers_stay_available() -> None:
    status = status_with(workload_with(), pod("old", ready=True), pod("new", verdict=MISFIT))
    assert states(status)["Stalled"] == ("True", "DoesNotFit")
    assert conditions(status)["Stalled"].message == f"pod new: {MISFIT.problem}"
    assert states(status)["Available"][0] == "True"


def test_a_required_draft_that_does_not_fit_stalls() -> None:
    verdict = CheckVerdict(serves=False, fits=True, draft_problem="fc.weight is missing")
    status = status_with(workload_with(ready=0, available=0), pod(verdict=verdict))
    assert states(status)["Stalled"] == ("True", "DraftRefused")
    assert conditions(status)["Stalled"].message == "pod p: fc.weight is missing"


def test_troubles_of_terminating_pods_do_not_count() -> None:
    status = status_with(workload_with(), pod(leaving=True, trouble="worker: ErrImagePull: no"))
    assert states(status)["Ready"][0] == "True"


def test_many_blocked_pods_are_counted() -> None:
    pods = [pod(f"p{index}", trouble="worker: ErrImagePull: no") for index in range(6)]
    message = conditions(status_with(workload_with(6, available=0, ready=0), *pods, replicas=6))["Stalled"].message
    assert message.count("ErrImagePull") == 4
    assert message.endswith("; and 2 more")


# States over time


def after(before: Status, workload: Workload, *workers: Worker, now: float, **spec: Any) -> Status:
    return status_with(workload, *workers, deployment=deployment_with(before, **spec), now=now)


def test_a_crash_loop_stalls_only_when_it_lasts() -> None:
    down = workload_with(ready=0, available=0)
    first = status_with(down, pod(trouble=CRASH), now=1000)
    assert states(first)["Reconciling"] == ("True", "WorkerFailing")
    assert "tokenSecretRef" in (first.reason or "")
    early = after(first, down, pod(trouble=CRASH), now=1290)
    assert "Stalled" not in states(early)
    late = after(early, down, pod(trouble=CRASH), now=1310)
    assert states(late)["Stalled"] == ("True", "WorkerFailing")
    between = after(late, down, pod(), now=1320)
    assert states(between)["Stalled"] == ("True", "WorkerFailing"), "between two crashes the pod seems to start"
    served = after(between, workload_with(), pod(ready=True), now=1330)
    assert states(served)["Ready"][0] == "True"
    assert "Stalled" not in states(served)


def test_a_growing_back_off_changes_no_message() -> None:
    down = workload_with(ready=0, available=0)
    texts = [f"worker: CrashLoopBackOff: back-off {pause} restarting failed container" for pause in ("10s", "5m0s")]
    first = status_with(down, pod(trouble=texts[0]))
    assert after(first, down, pod(trouble=texts[1]), now=1020) == first


def test_the_phases_of_an_image_pull_change_no_status() -> None:
    down = workload_with(ready=0, available=0)
    first = status_with(down, pod(trouble='worker: ErrImagePull: "x:1": not found'))
    second = after(first, down, pod(trouble='worker: ImagePullBackOff: Back-off pulling image "x:1"'), now=1020)
    assert conditions(second)["Stalled"].message == conditions(first)["Stalled"].message
    other = after(first, down, pod("q", trouble='worker: ErrImagePull: "x:2": not found'), now=1020)
    assert "x:2" in conditions(other)["Stalled"].message


def test_transition_times_change_only_with_the_status() -> None:
    first = status_with(workload_with(ready=0, available=0), now=1000)
    second = after(first, workload_with(ready=0, available=0), now=2000)
    third = after(second, workload_with(), now=3000)
    times = [conditions(status)["Ready"].last_transition_time for status in (first, second, third)]
    assert times[0] == times[1] != times[2]


# Pause


def paused(before: Status, generation: int, workload: Workload | None) -> Status:
    deployment = replace(deployment_with(before, paused=True), generation=generation)
    return status_with(workload, deployment=deployment)


def test_a_pause_leaves_a_complete_deployment_ready() -> None:
    status = paused(status_with(workload_with()), 1, workload_with())
    assert states(status)["Progressing"] == ("Unknown", "Paused")
    assert states(status)["Ready"][0] == "True"
    assert not {"Stalled", "Reconciling"} & states(status).keys()


def test_a_spec_that_waits_for_the_end_of_a_pause_is_not_observed() -> None:
    status = paused(status_with(workload_with()), 2, workload_with())
    assert status.observed_generation == 1
    assert states(status)["Ready"] == ("False", "Paused")
    assert kstatus(status, generation=2) == "InProgress"


def test_a_deployment_paused_from_the_start_says_so() -> None:
    assert states(paused(Status(), 1, None))["Ready"] == ("False", "Paused")


# Refused specs


def test_a_refused_spec_is_stalled_not_ready_and_observed() -> None:
    before = status_with(workload_with())
    status = failed_status(before, 2, "SpecRefused", "spec.x: no", now=2000)
    assert status.observed_generation == 2
    assert states(status)["Ready"] == ("False", "SpecRefused")
    assert states(status)["Stalled"] == ("True", "SpecRefused")
    assert conditions(status)["Stalled"].message == "spec.x: no"
    assert conditions(status)["Ready"].observed_generation == 2
    assert status.reason == "SpecRefused: spec.x: no"
    assert kstatus(status, generation=2) == "Failed"
    assert conditions(status)["Available"] == conditions(before)["Available"]
    assert conditions(status)["MemoryFits"] == conditions(before)["MemoryFits"]
    assert status.speculation == before.speculation


def test_a_refused_spec_ends_reconciling() -> None:
    before = status_with(workload_with(3, updated=1), replicas=3)
    assert "Reconciling" in states(before)
    status = failed_status(before, 2, "SpecRefused", "spec.x: no", now=2000)
    assert "Reconciling" not in states(status)
    assert len(states(status)) == len(status.conditions), "a type occurs once"


def test_availability_of_a_refused_spec_follows_the_workers() -> None:
    before = status_with(workload_with())
    observed = Observation(workload=workload_with(ready=0, available=0), workers=(), session=Session())
    status = failed_status(before, 2, "SpecRefused", "spec.x: no", now=2000, observed=observed)
    assert states(status)["Available"] == ("False", "WorkersStarting")
    assert (status.ready, status.ready_replicas) == ("0/1", 0)


def test_a_first_spec_that_is_refused_has_no_workers() -> None:
    status = failed_status(Status(), 1, "SpecRefused", "spec.x: no", now=2000)
    assert states(status)["Available"] == ("False", "NoWorkers")


def test_a_repeated_refusal_changes_nothing() -> None:
    first = failed_status(status_with(workload_with()), 2, "SpecRefused", "spec.x: no", now=2000)
    assert failed_status(first, 2, "SpecRefused", "spec.x: no", now=3000) == first


def test_a_spec_that_is_repaired_is_ready_again() -> None:
    broken = failed_status(status_with(workload_with()), 2, "SpecRefused", "spec.x: no", now=2000)
    deployment = replace(deployment_with(broken), generation=3)
    status = status_with(workload_with(), deployment=deployment, now=3000)
    assert states(status)["Ready"][0] == "True"
    assert "Stalled" not in states(status)
