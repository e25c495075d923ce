"""Conditions over time: crash loops, retries, pauses, and specs that are refused and repaired."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdecode_operator.api.v1alpha1 import Status
from specdecode_operator.controller.status import failed_status
from specdecode_operator.manifests import rolling_hash
from specdecode_operator.state.learned import Session
from specdecode_operator.types import Observation, Workload
from support.operators.fleet import SimulatedWorker, Truth, deployment_with, workload_with
from support.operators.statuses import conditions, kstatus, next_status, pod, states, status_with

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


def test_a_restart_of_the_operator_changes_no_condition_before_the_first_reports() -> None:
    report = SimulatedWorker(Truth()).report()
    served = status_with(workload_with(), pod(ready=True, report=report), now=1000)
    assert states(served)["DraftCompatible"] == ("True", "DraftLoaded")

    def observed_in(round: int) -> Status:
        return next_status(deployment_with(served), workers=(pod(ready=True),), round=round, now=1060)

    restarted = observed_in(round=0)
    assert conditions(restarted)["DraftCompatible"] == conditions(served)["DraftCompatible"]
    assert states(observed_in(round=1))["DraftCompatible"] == ("Unknown", "NotLoadedYet"), "no worker answered"
