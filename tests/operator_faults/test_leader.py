"""Row 4: of two operators one leads; a change of the leader is quick and changes no plan."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest

from support.kube import wait_for
from support.operator_faults.figures import Figures
from support.operator_faults.installation import Installation, kill_operator, stopped_operator
from support.operator_faults.tenant import ServedDeployment, Tenant

HAND_OVER_SECONDS = 20
WATCH_SECONDS = 60
BUSY = {"running": 1, "drafts_per_second": 50, "acceptance": 0.7}


@pytest.fixture
def two_operators(installation: Installation) -> Iterator[Installation]:
    """Yield the release with two replicas; the default number comes back afterwards."""
    before = int(installation.deployment["spec"]["replicas"])
    if before != 2:
        installation.scale(2)
    yield installation
    installation.scale(before)


@pytest.fixture
def served(two_operators: Installation, tenant: Tenant) -> Iterator[ServedDeployment]:
    """Yield a deployment of two workers with a settled plan."""
    with tenant.deployment("led", replicas=2, behaviour=BUSY) as served:
        served.settled_plan_version()
        time.sleep(10)
        yield served


def plan_sources(served: ServedDeployment) -> list[str]:
    """Return the address of the operator of every plan that the workers took since they started."""
    return [address for pod in served.pods() for address, *_ in served.worker_state(pod)["plans"]]


def test_the_chart_runs_two_replicas(installation: Installation, figures: Figures) -> None:
    replicas = int(installation.deployment["spec"]["replicas"])
    figures.record(4, "operator replicas by default", replicas)
    assert replicas == 2


@pytest.mark.timeout(300)
def test_two_operators_do_not_fight(served: ServedDeployment, figures: Figures) -> None:
    """Live changes of the spec raise the version once each, and one operator alone pushes plans."""
    served.patch({"speculation": {"depth": {"initial": 2, "max": 4}}})
    time.sleep(5)
    before, known = max(served.plan_versions()), Counter(plan_sources(served))
    for depth in (5, 4, 5):
        served.patch({"speculation": {"depth": {"max": depth}}})
        time.sleep(5)
    time.sleep(WATCH_SECONDS)
    rise, sources = max(served.plan_versions()) - before, Counter(plan_sources(served)) - known
    figures.record(4, "rise of the plan version under two operators, after 3 changes", rise)
    figures.record(4, "operators that pushed plans, of two", len(sources))
    figures.record(4, "plans pushed to 2 workers by two operators, after 3 changes", sources.total())
    assert rise <= 3
    assert len(sources) == 1, sources


def measure_hand_over(served: ServedDeployment, figures: Figures, label: str) -> None:
    """Assert that a spec change is applied in time by the next leader."""
    try:
        seconds = served.seconds_to_mark(label, timeout_s=HAND_OVER_SECONDS)
    except AssertionError:
        figures.record(4, f"seconds to apply a change, {label}", f"not within {HAND_OVER_SECONDS}")
        raise
    figures.record(4, f"seconds to apply a change, {label}", seconds)


def assert_same_version(served: ServedDeployment, version: int, figures: Figures, label: str) -> None:
    """Assert that the plan version stays for some time after a hand-over."""
    time.sleep(15)
    versions = served.plan_versions()
    figures.record(4, f"rise of the plan version, {label}", max(versions) - version)
    assert set(versions) == {version}


@pytest.mark.timeout(300)
def test_deleted_leader_hands_over(served: ServedDeployment, two_operators: Installation, figures: Figures) -> None:
    version = served.settled_plan_version()
    leader = two_operators.leader()["metadata"]["name"]
    two_operators.api.delete("pod", two_operators.home, leader)
    measure_hand_over(served, figures, "leader deleted")
    served.wait_running(2)
    assert_same_version(served, version, figures, "leader deleted")


@pytest.mark.timeout(300)
def test_killed_leader_hands_over(served: ServedDeployment, two_operators: Installation, figures: Figures) -> None:
    version = served.settled_plan_version()
    kill_operator(two_operators.leader())
    measure_hand_over(served, figures, "leader killed")
    served.wait_running(2)
    assert_same_version(served, version, figures, "leader killed")


@pytest.mark.timeout(300)
def test_frozen_leader_hands_over_and_writes_nothing_more(
    installation: Installation, tenant: Tenant, figures: Figures
) -> None:
    """Freeze the leader of a default installation for half a minute; afterwards it must not repeat its old decision."""
    with tenant.deployment("frozen", replicas=1, behaviour=BUSY) as served:
        version = served.settled_plan_version()
        leader = installation.leader()
        with stopped_operator(leader):
            measure_hand_over(served, figures, "leader frozen")
            served.mark("by the next leader")
            wait_for("applied", lambda: served.marked() == "by the next leader", timeout_s=20)
            served.wait_running(1)
            generation, known = served.workload()["metadata"]["generation"], Counter(plan_sources(served))
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            workload = served.workload()
            assert workload["metadata"]["generation"] == generation, "the deposed leader wrote the workload"
            assert served.marked() == "by the next leader"
            time.sleep(0.2)
        sources = Counter(plan_sources(served)) - known
        figures.record(4, "plans of a deposed leader in 20 s", sources[leader["status"]["podIP"]])
        assert not sources[leader["status"]["podIP"]], sources
        assert max(served.plan_versions()) - version <= 1, "a new worker may need one more version"
    wait_for("the operator runs", installation.is_running, timeout_s=120)
