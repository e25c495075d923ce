"""Row 4: of two operators one leads, also after the other one was frozen."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support import processes
from support.e2e.release import Release
from support.kube import Manifest, wait_for
from support.operator_faults.figures import Figures
from support.operator_faults.tenant import ServedDeployment, Tenant

HAND_OVER_SECONDS = 20
BUSY = {"running": 1, "drafts_per_second": 50, "acceptance": 0.7}


def plan_sources(served: ServedDeployment) -> list[str]:
    """Return the address of the operator of every plan that the workers took since they started."""
    return [address for pod in served.pods() for address, *_ in served.worker_state(pod)["plans"]]


@contextmanager
def stopped_operator(pod: Manifest) -> Iterator[None]:
    """Stop the operator's process in a pod (SIGSTOP) while the block runs, as a frozen node would."""
    pids = processes.of_pod(pod["metadata"]["uid"], "specdecode-operator")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGCONT)


@pytest.mark.timeout(300)
def test_frozen_leader_hands_over_and_writes_nothing_more(
    installation: Release, tenant: Tenant, figures: Figures
) -> None:
    """Freeze the leader of a default installation for half a minute; afterwards it must not repeat its old decision."""
    with tenant.deployment("frozen", replicas=1, behaviour=BUSY) as served:
        version = served.settled_plan_version()
        leader = installation.leader()
        with stopped_operator(leader):
            seconds = served.seconds_to_mark("leader frozen", timeout_s=HAND_OVER_SECONDS)
            figures.record(4, "seconds to apply a change, leader frozen", seconds)
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
