"""The control loop: new bounds reach workers live, and depth follows step time and acceptance down and up again."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from support.e2e.endpoint import CHILDREN, Endpoint
from support.e2e.loop import (
    MAX_DEPTH,
    SETTLED_SECONDS,
    assert_explained,
    decision,
    knobs,
    planned_depth,
    steps,
    wait_for_row,
)
from support.kube import wait_for

CONCURRENCY = 2
CHEAP = knobs(steps(node_seconds=0.002))
FAIR = knobs(steps(node_seconds=0.05))
UNLUCKY = knobs(steps(node_seconds=0.05), acceptance=(0.02,))


@pytest.fixture(scope="module", autouse=True)
def auto(endpoint: Endpoint) -> Iterator[None]:
    """Set mode Auto with chains alone: the knobs give times by the length of a chain."""
    depth = {"min": 0, "max": MAX_DEPTH, "initial": 3}
    endpoint.patch({"speculation": {"mode": "Auto", "depth": depth, "tree": {"topK": 1}}})
    yield
    endpoint.set_knobs(None)
    endpoint.patch({"speculation": {"tree": None}})


def test_new_depth_bound_reaches_workers_without_a_restart(endpoint: Endpoint) -> None:
    before, version = endpoint.identities(), endpoint.plan().version
    endpoint.patch({"speculation": {"depth": {"max": 2, "initial": 2}}})
    try:
        plan = wait_for("the worker has the bound", lambda: p if (p := endpoint.plan()).max_depth == 2 else None)
        assert plan.version > version
        assert plan.initial.depth == 2
        assert all(row.shape.depth <= 2 for row in plan.rows)
        assert endpoint.report().plan.version == plan.version, "the engine runs it, not only the server"
        assert endpoint.identities() == before
    finally:
        endpoint.patch({"speculation": {"depth": {"max": MAX_DEPTH, "initial": 3}}})


@pytest.mark.timeout(900)
def test_depth_falls_with_acceptance_and_rises_again(endpoint: Endpoint) -> None:
    endpoint.set_knobs(FAIR)
    with endpoint.traffic(CONCURRENCY):
        wait_for_row(endpoint, "speculating while drafts are good", CONCURRENCY, (1, 2, 3, 4))
        endpoint.set_knobs(UNLUCKY)
        fallen = wait_for_row(endpoint, "plain while drafts are bad", CONCURRENCY, (0,))
        why = decision(endpoint, CONCURRENCY, fallen)
        endpoint.set_knobs(FAIR)
        wait_for_row(endpoint, "speculating again", CONCURRENCY, (1, 2, 3, 4))
    assert_explained(endpoint, why)


def test_knobs_are_named_while_on(endpoint: Endpoint) -> None:
    endpoint.set_knobs(CHEAP)
    wait_for("status tells", lambda: endpoint.status()["traffic"]["synthetic"] is True, timeout_s=30)
    endpoint.set_knobs(None)
    wait_for("status tells", lambda: not endpoint.status()["traffic"].get("synthetic"), timeout_s=30)


@pytest.mark.timeout(420)
def test_advisory_reports_and_changes_nothing(endpoint: Endpoint) -> None:
    endpoint.set_knobs(FAIR)
    with endpoint.traffic(CONCURRENCY):
        wait_for_row(endpoint, "speculating while drafts are good", CONCURRENCY, (1, 2, 3, 4))
        endpoint.patch({"speculation": {"mode": "Advisory"}})
        try:
            before = wait_for("Advisory has come to rest", lambda: settled_versions(endpoint), timeout_s=60)
            version = endpoint.plan().version
            endpoint.set_knobs(UNLUCKY)
            wait_for(
                "plain is recommended",
                lambda: endpoint.speculation().get("recommended") == "none",
                timeout_s=SETTLED_SECONDS,
            )
            assert children_versions(endpoint) == before
            assert endpoint.plan().version == version
            assert planned_depth(endpoint, CONCURRENCY) > 0, "what is planned is not what is recommended"
        finally:
            endpoint.set_knobs(None)
            endpoint.patch({"speculation": {"mode": "Auto"}})


def children_versions(endpoint: Endpoint) -> dict[str, str]:
    """Return the resourceVersion of every object that the operator applies and of their dependents.

    The operator's persisted state is excluded.
    """
    return {
        f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["resourceVersion"]
        for item in endpoint.namespace.list(CHILDREN, endpoint.labels)
        if item["metadata"]["name"] != f"{endpoint.name}-state"
    }


def settled_versions(endpoint: Endpoint) -> dict[str, str] | None:
    """Return the versions, once the mode is observed and two readings five seconds apart are equal."""
    manifest = endpoint.get()
    if manifest["status"].get("observedGeneration") != manifest["metadata"]["generation"]:
        return None
    before = children_versions(endpoint)
    time.sleep(5)
    return before if children_versions(endpoint) == before else None
