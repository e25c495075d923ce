"""A change of the task mix changes the row of the affected task and leaves the other tasks' rows alone."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from specdecode_worker.contract import Port
from support.e2e.endpoint import MODEL, Endpoint
from support.e2e.kube import Namespace
from support.e2e.loop import PROOF, SETTLED_SECONDS, deployed, knobs, names_load, planned_depth, steps, wait_for_row
from support.e2e.release import Release
from support.e2e.streams import StreamTraffic
from support.e2e.traffic import Traffic
from support.kube import Manifest, wait_for

pytestmark = [PROOF, pytest.mark.timeout(900)]

CONCURRENCY = 2
CODE = tuple(f"Write a Python function that returns the {what}." for what in ("factorial of n", "sum of a list", "gcd"))
PROSE = ("Tell a short story about a lighthouse keeper.", "Describe a morning at a fish market.")
STEPS = steps(node_seconds=0.02)
"""Step times where a node costs a fifteenth of a plain step.

At this cost even one node that is rarely accepted loses enough to be stopped.
"""
FAIR = knobs(STEPS)
PROSE_IS_HARD = knobs(STEPS, task_acceptance={"other": (0.02,)})
SPECULATES = (1, 2, 3, 4)
KNOWN_DRAFTS = 250


@pytest.fixture
def endpoint(release: Release, watched: Namespace) -> Iterator[Endpoint]:
    release.start()
    tasks = [{"name": "code", "match": "Python"}]
    with deployed(watched, "tasks", {"tasks": tasks}, {}, knobs=FAIR) as endpoint:
        yield endpoint


def drafted(endpoint: Endpoint, task: str) -> int:
    """Return the number of first draft tokens of a task."""
    return sum(cell.total for cell in endpoint.report().acceptance if (cell.task, cell.depth) == (task, 1))


def is_known(endpoint: Endpoint, task: str) -> bool:
    """Assert that the task has enough drafts and rows of its own, and return whether they speculate."""
    assert drafted(endpoint, task) > KNOWN_DRAFTS
    assert task in {plan_row.task for plan_row in endpoint.plan().rows}
    return planned_depth(endpoint, CONCURRENCY, task) in SPECULATES


def history(endpoint: Endpoint, task: str) -> list[Manifest]:
    """Return the changes of the task's row at this load, newest first."""
    entries = endpoint.speculation().get("history", [])
    return [entry for entry in entries if names_load(entry, CONCURRENCY) and entry["load"].endswith(f"task {task}")]


def stops(endpoint: Endpoint, task: str) -> list[Manifest]:
    """Return the changes of the task's row at this load to plain decoding, newest first."""
    return [entry for entry in history(endpoint, task) if entry["after"] == "none"]


def test_harder_prose_changes_only_its_own_row(endpoint: Endpoint) -> None:
    with endpoint.namespace.reach("service", endpoint.name, 80) as url:
        with Traffic(url, MODEL, concurrency=CONCURRENCY, prompts=CODE) as traffic:
            wait_for("code speculates", lambda: is_known(endpoint, "code"), timeout_s=SETTLED_SECONDS)
        with Traffic(url, MODEL, concurrency=CONCURRENCY, prompts=PROSE) as more:
            wait_for("prose speculates", lambda: is_known(endpoint, "other"), timeout_s=SETTLED_SECONDS)
            code = planned_depth(endpoint, CONCURRENCY, "code")
            endpoint.set_knobs(PROSE_IS_HARD)
            wait_for_row(endpoint, "prose runs plainly", CONCURRENCY, (0,), "other")
            wait_for("status tells", lambda: stops(endpoint, "other"), timeout_s=30)
            stop = stops(endpoint, "other")[0]
            assert planned_depth(endpoint, CONCURRENCY, "code") >= code, "what prose lost is not code's loss"
            assert [entry for entry in history(endpoint, "code") if entry["time"] >= stop["time"]] == []
        with Traffic(url, MODEL, concurrency=CONCURRENCY, prompts=CODE) as again:
            before = endpoint.report().drafts
            wait_for("code is drafted", lambda: endpoint.report().drafts > before + 20, timeout_s=60)
            assert planned_depth(endpoint, CONCURRENCY, "code") in SPECULATES
    assert [*traffic.failures, *more.failures, *again.failures] == []


SECRET, KEYS = "customers", {"acme": "key-of-acme", "globex": "key-of-globex"}
ACME_IS_HARD = knobs(steps(node_seconds=0.05), task_acceptance={"acme": (0.02,)})
"""A node that is rarely accepted loses a seventh, far more than the least gain of a change."""


def test_a_customer_whose_texts_the_draft_does_not_know_goes_to_off_alone(release: Release, watched: Namespace) -> None:
    release.start()
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": KEYS}
    watched.kubectl("apply", "--filename", "-", stdin=json.dumps(secret))
    tasks = [{"name": "acme", "clients": ["acme"]}]
    keys = {"name": SECRET}
    with deployed(watched, "customers", {"tasks": tasks}, {}, knobs=ACME_IS_HARD, apiKeysSecretRef=keys) as endpoint:
        (pod,) = endpoint.ready_pods()
        # One customer after the other: the knobs price the largest tree of a step, so beside the tree of one customer
        # a node of the other costs nothing.
        with watched.reach("pod", pod, Port.http) as url:
            with StreamTraffic(url, MODEL, CONCURRENCY, KEYS["globex"]):
                wait_for("globex speculates", lambda: is_known(endpoint, "other"), timeout_s=SETTLED_SECONDS)
            with StreamTraffic(url, MODEL, CONCURRENCY, KEYS["acme"]):
                wait_for("acme is counted", lambda: drafted(endpoint, "acme"), timeout_s=60)
                wait_for_row(endpoint, "acme runs plainly", CONCURRENCY, (0,), "acme")
                wait_for("status tells", lambda: stops(endpoint, "acme"), timeout_s=30)
            with StreamTraffic(url, MODEL, CONCURRENCY, KEYS["globex"]):
                before = drafted(endpoint, "other")
                wait_for("globex is drafted", lambda: drafted(endpoint, "other") > before + 20, timeout_s=60)
                assert is_known(endpoint, "other")
                assert planned_depth(endpoint, CONCURRENCY, "acme") == 0
        assert stops(endpoint, "other") == []
    watched.kubectl("delete", "secret", SECRET)
