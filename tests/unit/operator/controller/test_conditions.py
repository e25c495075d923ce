"""Conditions: their reasons, how they change over time, and what kstatus makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import Status
from specdecode_operator.controller.children import worker_of
from specdecode_operator.controller.status import failed_status
from specdecode_operator.manifests import rolling_hash
from specdecode_operator.state.learned import LearnedState, ScalingState, Session
from specdecode_operator.types import ChildProblem, Observation, Outcome, Worker, Workload
from specdecode_worker.contract import CheckVerdict, DraftState, MemoryState, Report
from support.operators.fleet import SimulatedWorker, Truth, deployment_with, workload_with
from support.operators.statuses import conditions, kstatus, next_status, pod, refused, states, status_with

UNSCHEDULABLE = "Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
# Ready and Reconciling


def test_ready_is_true_when_all_wanted_workers_are_available() -> None:
    status = status_with(workload_with(3), deployment=replace(deployment_with(replicas=3), generation=7))
    assert states(status)["Ready"] == ("True", "AllWorkersAvailable")
    assert states(status)["Available"] == ("True", "WorkerAvailable")
    assert states(status)["Progressing"] == ("False", "Complete")
    assert not {"Stalled", "Reconciling"} & states(status).keys(), "abnormal-true conditions are absent"
    assert (status.router, "RoutersReady" in states(status)) == (None, False)
    assert status.reason is None
    assert status.ready == "3/3"
    assert status.observed_generation == 7
    assert {condition.observed_generation for condition in status.conditions} == {7}
    assert kstatus(status, generation=7) == "Current"


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (None, "Creating"),
        (workload_with(3, updated=1), "RollingOut"),
        (replace(workload_with(3), replicas=4), "RollingOut"),
        (workload_with(3, generation=2), "RollingOut"),
        (workload_with(3, spec_hash="hash of another spec"), "RollingOut"),
        (workload_with(3, ready=1, available=1), "WorkersStarting"),
        (workload_with(1), "Scaling"),
    ],
    ids=("no workload", "old pods", "surge", "not observed", "outdated", "starting", "scaled"),
)
def test_unfinished_work_is_reconciling_and_not_ready(workload: Workload | None, reason: str) -> None:
    """After a change of the spec, the caches show the old, settled workload for a moment."""
    status = status_with(workload, replicas=3)
    assert states(status)["Reconciling"] == ("True", reason)
    assert states(status)["Ready"] == ("False", reason)
    assert states(status)["Progressing"] == ("True", reason)
    assert "Stalled" not in states(status)
    assert states(status)["Available"][0] == ("True" if workload and workload.available else "False")
    assert kstatus(status) == "InProgress"


def test_zero_replicas_are_ready_and_not_available() -> None:
    status = status_with(workload_with(0), replicas=0)
    assert states(status)["Ready"] == ("True", "ScaledToZero")
    assert states(status)["Available"] == ("False", "ScaledToZero")
    assert conditions(status)["Available"].message == "spec.replicas is 0"
    assert status.reason is None
    assert kstatus(status) == "Current"


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
    assert states(status)["Available"][0] == "True"
    assert states(status)["Progressing"] == ("False", "Complete"), "the workers themselves are as desired"


def test_troubles_of_terminating_pods_do_not_count() -> None:
    status = status_with(workload_with(), pod(leaving=True, trouble="worker: ErrImagePull: no"))
    assert states(status)["Ready"][0] == "True"


def test_a_message_names_four_blocked_pods_and_counts_the_rest() -> None:
    pods = [pod(f"p{index}", trouble="worker: ErrImagePull: no") for index in range(6)]
    message = conditions(status_with(workload_with(6, available=0, ready=0), *pods, replicas=6))["Stalled"].message
    assert message.count("ErrImagePull") == 4
    assert message.endswith("; and 2 more")


# Over time

CRASH = "pull: CrashLoopBackOff: hf://org/gated needs a token: set model.tokenSecretRef"


def test_a_crash_loop_stalls_only_when_it_lasts() -> None:
    down = workload_with(ready=0, available=0)
    first = status_with(down, pod(trouble=CRASH), now=1000)
    assert states(first)["Reconciling"] == ("True", "WorkerFailing")
    assert "tokenSecretRef" in (first.reason or "")
    early = status_with(down, pod(trouble=CRASH), before=first, now=1290)
    assert "Stalled" not in states(early)
    late = status_with(down, pod(trouble=CRASH), before=early, now=1310)
    assert states(late)["Stalled"] == ("True", "WorkerFailing")
    between = status_with(down, pod(), before=late, now=1320)
    assert states(between)["Stalled"] == ("True", "WorkerFailing"), "between two crashes the pod seems to start"
    served = status_with(workload_with(), pod(ready=True), before=between, now=1330)
    assert states(served)["Ready"][0] == "True"
    assert "Stalled" not in states(served)


def test_a_growing_back_off_changes_no_message() -> None:
    down = workload_with(ready=0, available=0)
    texts = [f"worker: CrashLoopBackOff: back-off {pause} restarting failed container" for pause in ("10s", "5m0s")]
    first = status_with(down, pod(trouble=texts[0]))
    assert status_with(down, pod(trouble=texts[1]), before=first, now=1020) == first


def test_the_phases_of_an_image_pull_change_no_status() -> None:
    down = workload_with(ready=0, available=0)
    first = status_with(down, pod(trouble='worker: ErrImagePull: "x:1": not found'))
    backing_off = pod(trouble='worker: ImagePullBackOff: Back-off pulling image "x:1"')
    second = status_with(down, backing_off, before=first, now=1020)
    assert conditions(second)["Stalled"].message == conditions(first)["Stalled"].message
    other = status_with(down, pod("q", trouble='worker: ErrImagePull: "x:2": not found'), before=first, now=1020)
    assert "x:2" in conditions(other)["Stalled"].message


def test_transition_times_change_only_with_the_status() -> None:
    first = status_with(workload_with(ready=0, available=0), now=1000)
    second = status_with(workload_with(ready=0, available=0), before=first, now=2000)
    third = status_with(workload_with(), before=second, now=3000)
    times = [conditions(status)["Ready"].last_transition_time for status in (first, second, third)]
    assert times[0] == times[1] != times[2]


# Pause


def paused(before: Status, workload: Workload | None, **spec: Any) -> Status:
    deployment = replace(deployment_with(before, paused=True, **spec), generation=2)
    return status_with(workload, deployment=deployment)


def applied() -> Workload:
    """Return the workload of the spec before the pause."""
    return workload_with(spec_hash=rolling_hash(deployment_with().spec))


def test_a_pause_leaves_a_complete_deployment_ready() -> None:
    status = paused(status_with(workload_with()), applied(), speculation={"pin": "none"})
    assert states(status)["Progressing"] == ("Unknown", "Paused")
    assert states(status)["Ready"][0] == "True"
    assert not {"Stalled", "Reconciling"} & states(status).keys()
    assert status.observed_generation == 2, "the pause itself is a change of the spec"


def test_workers_of_an_earlier_spec_wait_for_the_end_of_a_pause() -> None:
    status = paused(status_with(workload_with()), applied(), engine={"maxNumSeqs": 3})
    assert states(status)["Ready"] == ("False", "Paused")
    assert "of an earlier spec" in conditions(status)["Ready"].message


def test_a_deployment_paused_from_the_start_says_so() -> None:
    assert states(paused(Status(), None))["Ready"] == ("False", "Paused")


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
    assert failed_status(status, 2, "SpecRefused", "spec.x: no", now=3000) == status, "a repeated refusal is no news"


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


def test_a_restart_of_the_operator_changes_no_condition_before_the_first_reports() -> None:
    report = SimulatedWorker(Truth()).report()
    served = status_with(workload_with(), pod(ready=True, report=report), now=1000)
    assert states(served)["DraftCompatible"] == ("True", "DraftLoaded")

    def observed_in(round: int) -> Status:
        return next_status(deployment_with(served), workers=(pod(ready=True),), round=round, now=1060)

    restarted = observed_in(round=0)
    assert conditions(restarted)["DraftCompatible"] == conditions(served)["DraftCompatible"]
    assert states(observed_in(round=1))["DraftCompatible"] == ("Unknown", "NotLoadedYet"), "no worker answered"


# Routers, and a deployment without workers whose routers hold requests

TWO = {"router": {"replicas": 2}}


def routed(routers: Workload | None, workers: Workload | None = None, *, resting: bool = False, **spec: Any) -> Status:
    scaling = ScalingState(replicas=0, spec_replicas=1, owned=True) if resting else ScalingState()
    session = Session(learned=LearnedState(uid="u1", scaling=scaling))
    return next_status(deployment_with(**spec), session, workload=workers or workload_with(), routers=routers)


def test_ready_waits_for_routers() -> None:
    status = routed(workload_with(2), **TWO)
    assert states(status)["Ready"] == ("True", "AllWorkersAvailable")
    assert states(status)["RoutersReady"] == ("True", "AllRoutersReady")
    assert kstatus(status) == "Current"
    assert (status.router.ready, status.router.replicas, status.router.ready_replicas) == ("2/2", 2, 2)


@pytest.mark.parametrize(
    ("routers", "ready", "message"),
    [
        (None, "0/2", "does not exist yet"),
        (workload_with(2, ready=0, available=0), "0/2", "the Service selects the workers"),
        (workload_with(2, ready=1, available=1), "1/2", "1 are available"),
        (workload_with(1), "1/2", "1 of 2 routers are available"),
    ],
    ids=["none", "starting", "one ready", "too few"],
)
def test_routers_that_start_are_in_motion(routers: Workload | None, ready: str, message: str) -> None:
    status = routed(routers, **TWO)
    assert states(status)["Ready"] == ("False", "RoutersStarting")
    assert states(status)["Available"] == ("True", "WorkerAvailable")
    assert kstatus(status) == "InProgress"
    assert message in conditions(status)["RoutersReady"].message
    assert status.router.ready == ready


def test_routers_that_cannot_start_stall_the_deployment() -> None:
    late = workload_with(2, ready=0, available=0, stalled='ReplicaSet "demo-router-x" has timed out progressing.')
    status = routed(late, **TWO)
    assert states(status)["Stalled"] == ("True", "RoutersFailing")
    assert "demo-router-x" in conditions(status)["RoutersReady"].message
    assert kstatus(status) == "Failed"


def test_an_autoscaler_decides_how_many_routers_are_enough() -> None:
    autoscaled = {"router": {"replicas": 1, "autoscaled": True}}
    status = routed(workload_with(5), **autoscaled)
    assert states(status)["RoutersReady"] == ("True", "AllRoutersReady")
    assert status.router.ready == "5/5"


def test_no_workers_of_an_idle_deployment_is_what_the_spec_wants() -> None:
    spec = {**TWO, "scaling": {"minReplicas": 0, "idleAfter": "60s"}}
    status = routed(workload_with(2), workload_with(0), resting=True, **spec)
    assert states(status)["Ready"] == ("True", "ScaledToZero")
    assert states(status)["Available"] == ("False", "ScaledToZero")
    assert "60 s" in conditions(status)["Ready"].message
    assert "routers hold the next one" in conditions(status)["Available"].message
    assert kstatus(status) == "Current"
    assert status.reason is None, "nothing to examine"
    assert status.ready == "0/0"


@pytest.mark.parametrize(
    ("spec", "words"),
    [({"paused": True}, "while paused"), ({"speculation": {"mode": "Advisory"}}, "in mode Advisory")],
)
def test_no_start_is_promised_that_does_not_come(spec: dict[str, Any], words: str) -> None:
    status = routed(workload_with(2), workload_with(0), resting=True, **TWO, scaling={"minReplicas": 0}, **spec)
    assert conditions(status)["Available"].message.endswith(f"no worker is started {words}")


# A worker's termination message becomes MemoryFits, DraftCompatible and status.memory

GIB = 2**30
PROBLEM = "the container's memory limit of 2.00 GiB leaves no room for keys and values: 0.26 GiB short; lower it"
TOO_LARGE = CheckVerdict(
    serves=False,
    fits=False,
    problem=PROBLEM,
    arithmetic=("container's memory limit  2.00 GiB", "- reserve of 20%  -0.40 GiB"),
    memory=MemoryState(limit=2 * GIB, weights=3 * GIB // 2, reserve=2 * GIB // 5),
    kv_tokens=0,
)
MISFIT = CheckVerdict(serves=False, fits=True, draft_problem="fc.weight is missing")


def ended(message: str, *, when: str = "lastState", ready: bool = False) -> Worker:
    """Return a pod as the kubelet reports a worker that ended and is started again."""
    container: dict[str, Any] = {"name": "worker", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    container[when] = {"terminated": {"exitCode": 1, "message": message}}
    conditions = [{"type": "Ready", "status": str(ready)}]
    status = {"podIP": "10.0.0.2", "containerStatuses": [container], "conditions": conditions}
    return worker_of({"metadata": {"name": "new", "uid": "new"}, "status": status})


def serving() -> Worker:
    memory = MemoryState(limit=4 * GIB, weights=GIB, drafts=GIB // 10, kv_cache=GIB // 2, reserve=GIB)
    draft = DraftState(method="eagle3", hash="d")
    report = Report(boot_id="b", worker="w", clock_seconds=1, draft=draft, memory=memory, kv_tokens_total=5000)
    return Worker(name="old", uid="old", address="10.0.0.1", ready=True, report=report)


@pytest.mark.parametrize("when", ["state", "lastState"])
def test_a_verdict_is_read_from_the_termination_message(when: str) -> None:
    assert ended(TOO_LARGE.model_dump_json(), when=when).verdict == TOO_LARGE
    assert ended(TOO_LARGE.model_dump_json(), ready=True).verdict is None, "the worker serves now"


LONG = TOO_LARGE.model_copy(update={"problem": "x" * 3000}).model_dump_json()


@pytest.mark.parametrize(
    "message", ["", "Killed", "{", "{}", '{"kind": "other", "serves": false, "fits": true}', "[1]", LONG]
)
def test_other_termination_messages_are_no_verdict(message: str) -> None:
    assert ended(message).verdict is None


def test_memory_that_does_not_fit_is_shown_with_its_arithmetic() -> None:
    status = status_with(workload_with(available=0), ended(TOO_LARGE.model_dump_json()))
    assert states(status)["MemoryFits"] == ("False", "DoesNotFit")
    assert PROBLEM in conditions(status)["MemoryFits"].message
    assert "- reserve of 20%" in conditions(status)["MemoryFits"].message
    assert (status.memory.limit, status.memory.weights, status.memory.kv_tokens) == ("2.00Gi", "1.50Gi", 0)
    assert conditions(status)["Ready"].message == f"pod new: {PROBLEM}"
    assert conditions(status)["Stalled"].reason == "DoesNotFit"


def test_memory_that_fits_is_read_from_the_report() -> None:
    status = status_with(workload_with(), serving())
    shown = conditions(status)["MemoryFits"]
    assert shown.status == "True"
    assert shown.message == "after the weights there is room for 5000 tokens of keys and values"
    assert status.memory.model_dump(exclude_none=True) == {
        "limit": "4.00Gi",
        "weights": "1.00Gi",
        "drafts": "0.10Gi",
        "kv_cache": "0.50Gi",
        "reserve": "1.00Gi",
        "kv_tokens": 5000,
    }


def test_a_new_worker_that_does_not_fit_leaves_the_old_one_serving() -> None:
    status = status_with(workload_with(), serving(), ended(TOO_LARGE.model_dump_json()))
    assert (states(status)["MemoryFits"][0], states(status)["Available"][0]) == ("False", "True")
    assert conditions(status)["Ready"].reason == "DoesNotFit"
    assert status.memory.limit == "4.00Gi", "memory of the worker that serves"


def test_a_required_draft_that_does_not_match_the_target_is_refused() -> None:
    status = status_with(workload_with(), serving(), ended(MISFIT.model_dump_json()))
    assert states(status)["DraftCompatible"] == ("False", "DraftRefused")
    assert conditions(status)["DraftCompatible"].message == "fc.weight is missing; new workers do not start"
    assert states(status)["MemoryFits"][0] == "True"


def test_memory_is_unknown_without_a_report_and_then_stays() -> None:
    unknown, known = status_with(workload_with()), status_with(workload_with(), serving())
    assert states(unknown)["MemoryFits"][0] == "Unknown"
    assert unknown.memory is None
    assert status_with(workload_with(), before=known).memory == known.memory
