"""The operator: `helm test`, serving while it is down, its own resource use, and clean-up after deletion."""

from __future__ import annotations

import re
import time

import pytest

from specdecode_worker.contract import StepTime, SyntheticKnobs
from support.e2e.endpoint import Endpoint
from support.e2e.release import Release
from support.kube import Manifest, wait_for

GONE_SECONDS = 60
SPECULATION_IS_DEAR = SyntheticKnobs(step_time=(StepTime(max_nodes=0, seconds=0.2), StepTime(seconds=1.0)))
IDLE_MIB = 120


def since(endpoint: Endpoint) -> dict[tuple[str, int, int, int, tuple[int, ...]], float]:
    """Return the time at which each row of the plan came to its shape, from which its dwell is counted."""

    def shape_at_load(row: Manifest) -> tuple[str, int, int, int, tuple[int, ...]]:
        return row["task"], row["concurrency"], row["context"], row["depth"], tuple(row["parents"])

    return {shape_at_load(row): row["since"] for row in endpoint.state()["rows"]}


def test_helm_test_sees_a_bad_resource_refused(release: Release) -> None:
    said = release.test()
    assert "min 4, initial 3, max 2: 422" in said
    assert "min 0, initial 3, max 5: 201" in said


@pytest.mark.timeout(400)
def test_serving_survives_a_minute_without_the_operator(endpoint: Endpoint, release: Release) -> None:
    endpoint.patch({"speculation": {"mode": "Auto"}})
    endpoint.set_knobs(SPECULATION_IS_DEAR)
    with endpoint.traffic(2, timeout_s=120):
        wait_for("a row has a dwell", lambda: any(since(endpoint).values()), timeout_s=120)
    endpoint.set_knobs(None)
    with endpoint.traffic(1, max_tokens=16) as traffic:
        with release.stopped():
            version, dwell = endpoint.plan().version, since(endpoint)
            endpoint.patch({"speculation": {"depth": {"max": 5}}})
            time.sleep(GONE_SECONDS)
            assert traffic.answered > 5
            assert endpoint.plan().version == version, "nobody was there to change it"
        plan = wait_for("the change is applied", lambda: p if (p := endpoint.plan()).max_depth == 5 else None)
    assert plan.version > version
    after = since(endpoint)
    same = dwell.keys() & after.keys()
    assert same, "no row kept its shape"
    assert {key: after[key] for key in same} == {key: dwell[key] for key in same}


def test_operator_uses_little_memory_and_no_torch(endpoint: Endpoint, release: Release) -> None:
    status = release.namespace.exec(release.leader_name(), "cat", "/proc/1/status")
    match = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert match
    assert int(match[1]) / 1024 <= IDLE_MIB
    find_torch = "import importlib.util; print(importlib.util.find_spec('torch'))"
    assert release.namespace.exec(release.leader_name(), "python", "-c", find_torch).strip() == "None"


def test_the_operator_had_every_right_it_needed(endpoint: Endpoint, release: Release) -> None:
    assert "forbidden" not in release.logs().lower()


def test_deleting_needs_no_operator(endpoint: Endpoint, release: Release) -> None:
    """Deletion succeeds while no operator runs. This is the last test of the shared endpoint."""
    with release.stopped():
        endpoint.delete(timeout_s=30)
