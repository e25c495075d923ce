"""The control loop: an autoscaler, a collapse of acceptance, the load and the task mix, on deployments of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from specdecode_worker.contract import TreeShape
from support.e2e.endpoint import Endpoint
from support.e2e.kube import Namespace
from support.e2e.loop import PROOF, SETTLED_SECONDS, deployed, knobs, names_load, planned_depth, steps, wait_for_row
from support.kube import ROOT, Cluster, Manifest, wait_for

pytestmark = [PROOF, pytest.mark.timeout(1200)]


@pytest.fixture
def endpoint(request: pytest.FixtureRequest, watched: Namespace) -> Iterator[Endpoint]:
    """Yield the deployment that a test describes by ``deploys``."""
    name, speculation, options = request.param
    with deployed(watched, name, speculation, {}, **options) as endpoint:
        yield endpoint


def deploys(name: str, speculation: Manifest | None = None, **options: Any) -> pytest.MarkDecorator:
    """Return the mark of a test that has a deployment of its own, with these options of ``deployed``."""
    return pytest.mark.parametrize("endpoint", [(name, speculation or {}, options)], indirect=True, ids=[name])


# A HorizontalPodAutoscaler on the resource, fed by metrics-server; the operator follows its replica count.


ALWAYS_ONE: Manifest = {"owner": "External", "minReplicas": 1, "maxReplicas": 1}
"""Replica bounds of the operator.

An operator that used them instead of the autoscaler's count would stay at one replica.
"""
AUTOSCALER: Manifest = {
    "apiVersion": "autoscaling/v2",
    "kind": "HorizontalPodAutoscaler",
    "metadata": {"name": "external"},
    "spec": {
        "scaleTargetRef": {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "name": "external"},
        "minReplicas": 1,
        "maxReplicas": 2,
        "metrics": [
            {
                "type": "Resource",
                "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 200}},
            }
        ],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
    },
}


@pytest.fixture
def autoscaler(cluster: Cluster, endpoint: Endpoint) -> Iterator[None]:
    """Scale the deployment by its load. On the local cluster this installs metrics-server."""
    if cluster.local:
        subprocess.run([ROOT / "hack" / "cluster" / "metrics-server"], check=True, timeout=900)
    cluster.kubectl("top", "node")
    endpoint.namespace.apply(AUTOSCALER)
    yield
    endpoint.namespace.kubectl("delete", "hpa", endpoint.name)


def is_scaling(endpoint: Endpoint) -> bool:
    conditions = endpoint.namespace.get("hpa", endpoint.name).get("status", {}).get("conditions", [])
    return any((one["type"], one["status"]) == ("ScalingActive", "True") for one in conditions)


@deploys("external", scaling=ALWAYS_ONE)
def test_autoscaler_changes_the_replicas(endpoint: Endpoint, autoscaler: None) -> None:
    with endpoint.traffic(4):
        wait_for("ScalingActive", lambda: is_scaling(endpoint), timeout_s=180, every_s=2)
        wait_for("spec.replicas is set", lambda: endpoint.get()["spec"]["replicas"] == 2, timeout_s=120, every_s=2)
        wait_for("two workers", lambda: len(endpoint.ready_pods()) == 2, timeout_s=120, every_s=2)
        wait_for("status counts them", lambda: endpoint.status()["readyReplicas"] == 2, timeout_s=30)
    wait_for("one worker again", lambda: len(endpoint.pods()) == 1, timeout_s=240, every_s=2)
    assert endpoint.get()["spec"]["replicas"] == 1
    assert endpoint.condition("ScalingLimited")["status"] == "absent", "the operator scales nothing here"


# A collapse of acceptance on one of two workers: it is named, runs without speculation, and recovers.


FAIR = knobs(steps(node_seconds=0.01))
COLLAPSED = knobs(steps(node_seconds=0.01), acceptance=(0.05,))
PAST_DRAFTS = 220


def past_drafts(endpoint: Endpoint) -> list[float]:
    """Return the number of first draft tokens in each worker's recorded history."""
    return [sum(task["past_total"] for task in pod["tasks"]) for pod in endpoint.state()["pods"]]


@deploys("pair", knobs=FAIR, replicas=2)
def test_acceptance_collapse_is_detected_named_and_cleared(endpoint: Endpoint) -> None:
    wait_for("two workers", lambda: len(endpoint.ready_pods()) == 2, timeout_s=180, every_s=2)
    sick, well = sorted(endpoint.ready_pods())
    with endpoint.traffic(4, max_tokens=48):
        wait_for(
            "both have a past",
            lambda: len(drafts := past_drafts(endpoint)) == 2 and min(drafts) > PAST_DRAFTS,
            timeout_s=SETTLED_SECONDS,
        )
        assert endpoint.condition("WorkersHealthy")["status"] == "True"
        endpoint.set_knobs(COLLAPSED, sick)

        def named() -> bool:
            condition = endpoint.condition("WorkersHealthy")
            assert (condition["status"], condition["reason"]) == ("False", "AcceptanceCollapsed"), condition
            assert f"pod {sick}: first token accepted" in condition["message"], condition
            assert well not in condition["message"], condition
            return True

        wait_for("it is named", named, timeout_s=SETTLED_SECONDS)
        wait_for("it runs plainly", lambda: endpoint.report(sick).plan.quiet, timeout_s=30)
        assert not endpoint.report(well).plan.quiet
        endpoint.set_knobs(FAIR, sick)
        endpoint.wait_condition("WorkersHealthy", "True", timeout_s=SETTLED_SECONDS)
        wait_for("it speculates", lambda: not endpoint.report(sick).plan.quiet, timeout_s=30)
    events = {
        e["reason"]: e["type"] for e in endpoint.namespace.list("events") if e["involvedObject"]["name"] == "pair"
    }
    assert events.get("AcceptanceCollapsed") == "Warning", events


# Depth falls as the load rises from 1 to 16 concurrent requests, then replicas are added, and both return.


ALONE, SOME, MANY = 1, 4, 16
MOST = 3
# Deep drafts are cheap for up to two sequences and expensive for larger batches.
BY_LOAD = knobs(steps(node_seconds=0.005, sequences=2), steps(node_seconds=0.3))
BY_OPERATOR = {"owner": "Operator", "minReplicas": 1, "maxReplicas": MOST, "scaleDownWindow": "20s"}


def serving(endpoint: Endpoint, count: int) -> bool:
    pods = endpoint.ready_pods()
    assert len(pods) == count, pods
    return True


@deploys("load", knobs=BY_LOAD, scaling=BY_OPERATOR, engine={"maxNumSeqs": 8})
def test_load_lowers_depth_then_adds_workers_and_reverts(endpoint: Endpoint) -> None:
    with endpoint.traffic(ALONE, max_tokens=32):
        deep = wait_for_row(endpoint, "deep for one", ALONE, (2, 3, 4))
        wait_for("DEPTH shows it", lambda: endpoint.depth() == deep, timeout_s=60)
    with endpoint.traffic(SOME, max_tokens=32):
        wait_for_row(endpoint, "shallow for some", SOME, (0, 1))
        wait_for("DEPTH shows it", lambda: endpoint.depth() <= 1, timeout_s=60)
        workload = endpoint.namespace.get("deployment", f"{endpoint.name}-worker")
        assert workload["spec"]["replicas"] == 1, "depth first: one worker carries them"
    with endpoint.traffic(MANY, max_tokens=32):
        # One after the other: each times steps of 0.3 to 1.5 s for over a minute before it serves.
        wait_for("more workers", lambda: serving(endpoint, MOST), timeout_s=400, every_s=2)
        wait_for_row(endpoint, "shallow for many", MANY, (0, 1))
    with endpoint.traffic(ALONE, max_tokens=32):
        wait_for("one worker", lambda: serving(endpoint, 1), timeout_s=240, every_s=2)
        wait_for("DEPTH is back", lambda: endpoint.depth() >= 2, timeout_s=120)
    history = endpoint.speculation()["history"]
    scaled = [(entry["before"], entry["after"]) for entry in history if entry["kind"] == "Replicas"]
    assert scaled, history


# A change of the task mix: the row of the affected task stops, and those of other tasks lose nothing.


CONCURRENCY = 2
CODE = tuple(f"Write a Python function that returns the {what}." for what in ("factorial of n", "sum of a list", "gcd"))
PROSE = ("Tell a short story about a lighthouse keeper.", "Describe a morning at a fish market.")
STEPS = steps(node_seconds=0.02)
"""Step times where a node costs a fifteenth of a plain step.

At this cost even one node that is rarely accepted loses enough to be stopped.
"""
PROSE_IS_HARD = knobs(STEPS, task_acceptance={"other": (0.02,)})
SPECULATES = (1, 2, 3, 4)
KNOWN_DRAFTS = 250


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


@deploys("tasks", {"tasks": [{"name": "code", "match": "Python"}]}, knobs=knobs(STEPS))
def test_harder_prose_stops_drafts_of_prose_alone(endpoint: Endpoint) -> None:
    with endpoint.traffic(CONCURRENCY, prompts=CODE):
        wait_for("code speculates", lambda: is_known(endpoint, "code"), timeout_s=SETTLED_SECONDS)
    with endpoint.traffic(CONCURRENCY, prompts=PROSE):
        wait_for("prose speculates", lambda: is_known(endpoint, "other"), timeout_s=SETTLED_SECONDS)
        code = planned_depth(endpoint, CONCURRENCY, "code")
        endpoint.set_knobs(PROSE_IS_HARD)
        wait_for_row(endpoint, "prose runs plainly", CONCURRENCY, (0,), "other")
        wait_for("status tells", lambda: stops(endpoint, "other"), timeout_s=30)
        stop = stops(endpoint, "other")[0]
        assert planned_depth(endpoint, CONCURRENCY, "code") >= code, "what prose lost is not code's loss"
        # Rows are decided together: what prose no longer drafts leaves room for larger trees of code.
        later = [entry["after"] for entry in history(endpoint, "code") if entry["time"] >= stop["time"]]
        assert all(TreeShape.parse(after).depth >= code for after in later), later
    with endpoint.traffic(CONCURRENCY, prompts=CODE):
        before = endpoint.report().drafts
        wait_for("code is drafted", lambda: endpoint.report().drafts > before + 20, timeout_s=60)
        assert planned_depth(endpoint, CONCURRENCY, "code") in SPECULATES
