"""Routers before real workers: faults that clients do not notice, and scaling to zero.

Clients stream sampled answers, one after the other, and repeat nothing by themselves. Each answer is compared with the
one that came while nothing happened. ``make proofs P=router`` runs it; test_0_core.py
has some of the faults in one run.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.e2e.endpoint import MODEL, Endpoint
from support.e2e.kube import Namespace
from support.e2e.loop import deployed
from support.e2e.release import Release
from support.e2e.routed import NAME, TWO_WORKERS, WORKERS, Routed, routed_deployment
from support.e2e.streams import PROMPTS, connect, failures, stream_answer
from support.e2e.worker_faults import evict, restarts, signal_engine, swap_draft, wait_for_ready_pods
from support.kube import Manifest, wait_for

OTHER = "routed-next"
"""Deployment that gets a share of the traffic."""
pytestmark = pytest.mark.timeout(900)
PROOF = pytest.mark.proof("router")


@pytest.fixture(scope="module")
def routed(watched: Namespace) -> Iterator[Routed]:
    with routed_deployment(watched) as routed:
        yield routed


@PROOF
def test_stopped_engine_is_not_noticed_and_the_watchdog_ends_its_worker(routed: Routed) -> None:
    with routed.unnoticed("SIGSTOP of an engine") as pod:
        before = restarts(routed.endpoint, pod)
        signal_engine(routed.endpoint, pod, signal.SIGSTOP)
        wait_for("the worker restarted", lambda: restarts(routed.endpoint, pod) > before, timeout_s=180)


@PROOF
def test_short_stop_of_an_engine_gives_no_token_twice(routed: Routed) -> None:
    with routed.unnoticed("SIGSTOP and SIGCONT of an engine") as pod:
        before = restarts(routed.endpoint, pod)
        signal_engine(routed.endpoint, pod, signal.SIGSTOP)
        time.sleep(5)
        signal_engine(routed.endpoint, pod, signal.SIGCONT)
        assert restarts(routed.endpoint, pod) == before


def evict_each(endpoint: Endpoint) -> None:
    for pod in sorted(endpoint.ready_pods()):
        evict(endpoint, pod)
        wait_for("the pod is gone", lambda pod=pod: pod not in endpoint.all_pods(), timeout_s=60)  # type: ignore[misc]
        wait_for_ready_pods(endpoint, 2)


def roll(endpoint: Endpoint) -> None:
    new = {"after": endpoint.ready_pods()[0]}
    replace_pods(endpoint, {"workers": {"template": {"metadata": {"annotations": new}}}})
    wait_for_ready_pods(endpoint, 2)


def replace_pods(endpoint: Endpoint, spec: Manifest) -> None:
    """Change the spec and wait until all pods are new."""
    before = set(endpoint.ready_pods())
    endpoint.patch(spec)
    wait_for("all pods are new", lambda: not before & endpoint.all_pods(), timeout_s=300, every_s=2)


def scale_down_and_up(endpoint: Endpoint) -> None:
    endpoint.patch({"scaling": {"minReplicas": 1, "maxReplicas": 1}})
    wait_for("one worker", lambda: len(endpoint.all_pods()) == 1, timeout_s=120)
    endpoint.patch({"scaling": TWO_WORKERS})
    wait_for_ready_pods(endpoint, 2)


def swap_drafts(endpoint: Endpoint) -> None:
    """Swap the draft of each worker for its quantized form while it serves."""
    for pod in endpoint.ready_pods():
        assert swap_draft(endpoint, pod, quantization="int8") == "int8"


@PROOF
def test_all_changes_in_one_run_are_not_noticed(routed: Routed) -> None:
    """The draft of the spec changes too, which replaces the workers."""
    with routed.unnoticed("evictions, rolling update, 2 -> 1 -> 2, draft swap and draft of the spec in one run"):
        evict_each(routed.endpoint)
        swap_drafts(routed.endpoint)
        roll(routed.endpoint)
        scale_down_and_up(routed.endpoint)
        replace_pods(routed.endpoint, {"speculation": {"draft": {"quantization": "int8"}}})


def answered(endpoint: Endpoint) -> int:
    """Return how many requests the endpoint's workers have finished."""
    reports = [endpoint.report(pod) for pod in endpoint.ready_pods()]
    return sum(cell.finished for report in reports for cell in report.traffic)


def split(endpoint: Endpoint, *shares: Manifest) -> None:
    """Set ``router.trafficSplit`` and wait until all routers run with it."""
    endpoint.patch({"router": {"trafficSplit": list(shares)}})
    routers = f"{endpoint.name}-router"

    def is_template_new() -> bool:
        template = json.dumps(endpoint.namespace.get("deployment", routers)["spec"]["template"])
        return (OTHER in template) == bool(shares)

    wait_for("the routers' template has the shares", is_template_new, timeout_s=60)
    endpoint.namespace.kubectl("rollout", "status", f"deployment/{routers}", "--timeout=180s")


@PROOF
def test_a_share_of_the_traffic_goes_to_another_deployment_and_back(routed: Routed, watched: Namespace) -> None:
    """The other deployment has the same weights, so that answers can be compared wherever they come from."""
    with (
        deployed(watched, OTHER, {}, WORKERS, router={"replicas": 0}) as other,
        routed.unnoticed("half of the conversations to another deployment and back"),
    ):
        assert answered(other) == 0
        split(routed.endpoint, {"deployment": OTHER, "percent": 50})
        wait_for("the other deployment answers", lambda: answered(other) >= 4, timeout_s=180, every_s=2)
        split(routed.endpoint)
        wait_for("it has answered all", lambda: not sum(other.report(pod).running for pod in other.ready_pods()))
        before = answered(other)
        time.sleep(20)
        assert answered(other) == before, "traffic goes on, and none of it there"


@PROOF
def test_held_requests_wake_workers_also_while_the_operator_restarts(routed: Routed, release: Release) -> None:
    endpoint = routed.endpoint
    endpoint.patch({"scaling": {"minReplicas": 0, "idleAfter": "10s"}})
    wait_for("no worker", lambda: not endpoint.all_pods(), timeout_s=180, every_s=2)
    assert (endpoint.condition("Ready")["status"], endpoint.condition("Ready")["reason"]) == ("True", "ScaledToZero")
    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(stream_answer, connect(routed.url), MODEL, PROMPTS[i % len(PROMPTS)]) for i in range(20)]
        release.namespace.kubectl("delete", "pod", "--all", "--force", "--grace-period=0")
        answers = [future.result(timeout=240) for future in asked]
    assert failures(answers, routed.expected) == []
    demand = endpoint.namespace.get("configmap", f"{NAME}-demand").get("data", {})
    print(f"\n0 -> 1: {len(answers)} held requests answered; demand {json.dumps(demand)}")
    wait_for("no worker again", lambda: not endpoint.all_pods(), timeout_s=180, every_s=2)
