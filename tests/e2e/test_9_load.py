"""Depth falls as the load rises from 1 to 16 concurrent requests, then replicas are added, and both return."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from support.e2e.endpoint import MODEL, Endpoint
from support.e2e.kube import Namespace
from support.e2e.loop import PROOF, deployed, knobs, steps, wait_for_row
from support.e2e.release import Release
from support.e2e.traffic import Traffic
from support.kube import wait_for

pytestmark = [PROOF, pytest.mark.timeout(1200)]

ALONE, SOME, MANY = 1, 4, 16
MOST = 3
# Deep drafts are cheap for up to two sequences and expensive for larger batches.
BY_LOAD = knobs(steps(node_seconds=0.005, sequences=2), steps(node_seconds=0.3))


@pytest.fixture
def endpoint(release: Release, watched: Namespace) -> Iterator[Endpoint]:
    release.start()
    scaling = {"owner": "Operator", "minReplicas": 1, "maxReplicas": MOST, "scaleDownWindow": "20s"}
    with deployed(watched, "load", {}, {}, knobs=BY_LOAD, scaling=scaling, engine={"maxNumSeqs": 8}) as endpoint:
        yield endpoint


def serving(endpoint: Endpoint, count: int) -> bool:
    pods = endpoint.ready_pods()
    assert len(pods) == count, pods
    return True


def replicas(endpoint: Endpoint) -> int:
    return int(endpoint.namespace.get("deployment", f"{endpoint.name}-worker")["spec"]["replicas"])


def test_load_lowers_depth_then_adds_workers_and_reverts(endpoint: Endpoint) -> None:
    failures: list[str] = []
    with ExitStack() as stack:
        url = stack.enter_context(endpoint.namespace.reach("service", endpoint.name, 80))

        def load(concurrency: int) -> ExitStack:
            users = ExitStack()
            traffic = users.enter_context(Traffic(url, MODEL, concurrency=concurrency, max_tokens=32))
            users.callback(lambda: failures.extend(traffic.failures))
            return users

        with load(ALONE):
            deep = wait_for_row(endpoint, "deep for one", ALONE, (2, 3, 4))
            wait_for("DEPTH shows it", lambda: endpoint.depth() == deep, timeout_s=60)
        with load(SOME):
            wait_for_row(endpoint, "shallow for some", SOME, (0, 1))
            wait_for("DEPTH shows it", lambda: endpoint.depth() <= 1, timeout_s=60)
            assert replicas(endpoint) == 1, "depth first: one worker carries them"
        with load(MANY):
            # One after the other: each times steps of 0.3 to 1.5 s for over a minute before it serves.
            wait_for("more workers", lambda: serving(endpoint, MOST), timeout_s=400, every_s=2)
            wait_for_row(endpoint, "shallow for many", MANY, (0, 1))
        with load(ALONE):
            wait_for("one worker", lambda: serving(endpoint, 1), timeout_s=240, every_s=2)
            wait_for("DEPTH is back", lambda: endpoint.depth() >= 2, timeout_s=120)
    assert not failures
    history = endpoint.speculation()["history"]
    scaled = [(entry["before"], entry["after"]) for entry in history if entry["kind"] == "Replicas"]
    assert scaled, history
