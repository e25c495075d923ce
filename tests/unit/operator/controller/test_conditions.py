"""Ready, Available, Stalled, Reconciling and Progressing: their reasons, and what kstatus makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from specdecode_operator.types import ChildProblem, Outcome, Workload
from specdecode_worker.contract import CheckVerdict
from support.operators.fleet import deployment_with, workload_with
from support.operators.statuses import conditions, kstatus, pod, refused, states, status_with

QUOTA = 'pods "demo-worker-1" is forbidden: exceeded quota: none, requested: pods=1, used: pods=0, limited: pods=0'
UNSCHEDULABLE = "Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
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


def test_a_required_draft_that_does_not_fit_stalls() -> None:
    verdict = CheckVerdict(serves=False, fits=True, draft_problem="fc.weight is missing")
    status = status_with(workload_with(ready=0, available=0), pod(verdict=verdict))
    assert states(status)["Stalled"] == ("True", "DraftRefused")
    assert conditions(status)["Stalled"].message == "pod p: fc.weight is missing"


def test_troubles_of_terminating_pods_do_not_count() -> None:
    status = status_with(workload_with(), pod(leaving=True, trouble="worker: ErrImagePull: no"))
    assert states(status)["Ready"][0] == "True"


def test_a_message_names_four_blocked_pods_and_counts_the_rest() -> None:
    pods = [pod(f"p{index}", trouble="worker: ErrImagePull: no") for index in range(6)]
    message = conditions(status_with(workload_with(6, available=0, ready=0), *pods, replicas=6))["Stalled"].message
    assert message.count("ErrImagePull") == 4
    assert message.endswith("; and 2 more")
