"""Routers before real workers: faults that clients do not notice, and scaling to zero.

Clients stream sampled answers, one after the other, and repeat nothing by themselves. Each answer is compared with the
one that came while nothing happened. ``make router`` runs all of it; ``make test`` runs the first fault only.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from harness.endpoint import MODEL, Endpoint
from harness.kube import Namespace
from harness.loop import deployed
from harness.release import Release
from harness.streams import (
    PROMPTS,
    StreamTraffic,
    connect,
    failures,
    gap_percentile,
    stream_answer,
    unbroken_answers,
)
from harness.worker_faults import evict, kill_pod, restarts, signal_engine, wait_for_ready_pods
from kube import wait_for

pytestmark = pytest.mark.timeout(900)
PROOFS = pytest.mark.skipif(not os.environ.get("ROUTER_PROOFS"), reason="minutes: ROUTER_PROOFS=1, or make router")

NAME = "routed"
WORKERS = {"resources": {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "4Gi"}}}
ROUTERS = {"replicas": 2, "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}}}
TWO_WORKERS = {"owner": "Operator", "minReplicas": 2, "maxReplicas": 2}


@dataclass(frozen=True, slots=True)
class Routed:
    """The deployment behind routers, its URL and the unbroken answers."""

    endpoint: Endpoint
    url: str
    expected: dict[str, str]

    @contextmanager
    def unnoticed(self, fault: str, clients: int = 8) -> Iterator[str]:
        """Yield a ready worker while clients stream. Afterwards no request has failed and no text differs."""
        wait_for_ready_pods(self.endpoint, 2)
        with StreamTraffic(self.url, MODEL, clients) as traffic:
            wait_for("traffic", lambda: traffic.count() >= clients)
            yield sorted(self.endpoint.ready_pods())[0]
            wait_for_ready_pods(self.endpoint, 2)
            ended = traffic.count()
            wait_for("traffic after the fault", lambda: traffic.count() >= ended + clients)
        answers = traffic.answers
        gap = gap_percentile(answers, 99)
        print(f"\n{fault}: {len(answers)} answers, longest gap p99 {gap:.2f} s")
        assert failures(answers, self.expected) == []


@pytest.fixture(scope="module")
def routed(release: Release, watched: Namespace) -> Iterator[Routed]:
    release.start()
    with deployed(watched, NAME, {}, WORKERS, router=ROUTERS, scaling=TWO_WORKERS) as endpoint:
        wait_for_ready_pods(endpoint, 2)
        wait_for("the Service selects routers", lambda: _selected_role(endpoint) == "router")
        with watched.reach("service", NAME, 80) as url:
            yield Routed(endpoint, url, unbroken_answers(url, MODEL))


def _selected_role(endpoint: Endpoint) -> str:
    selector: dict[str, str] = endpoint.namespace.get("service", NAME)["spec"]["selector"]
    return selector["specdecode.io/role"]


def test_killed_engine_is_not_noticed(routed: Routed) -> None:
    with routed.unnoticed("SIGKILL of an engine", clients=4) as pod:
        before = restarts(routed.endpoint, pod)
        signal_engine(routed.endpoint, pod, signal.SIGKILL)
        wait_for("the worker restarted", lambda: restarts(routed.endpoint, pod) > before, timeout_s=120)


@PROOFS
def test_killed_pod_is_not_noticed(routed: Routed) -> None:
    with routed.unnoticed("SIGKILL of a pod") as pod:
        kill_pod(routed.endpoint, pod)
        wait_for("the pod is gone", lambda: pod not in routed.endpoint.all_pods(), timeout_s=60)


@PROOFS
def test_stopped_engine_is_not_noticed_and_the_watchdog_ends_its_worker(routed: Routed) -> None:
    with routed.unnoticed("SIGSTOP of an engine") as pod:
        before = restarts(routed.endpoint, pod)
        signal_engine(routed.endpoint, pod, signal.SIGSTOP)
        wait_for("the worker restarted", lambda: restarts(routed.endpoint, pod) > before, timeout_s=180)


@PROOFS
def test_short_stop_of_an_engine_gives_no_token_twice(routed: Routed) -> None:
    with routed.unnoticed("SIGSTOP and SIGCONT of an engine") as pod:
        before = restarts(routed.endpoint, pod)
        signal_engine(routed.endpoint, pod, signal.SIGSTOP)
        time.sleep(5)
        signal_engine(routed.endpoint, pod, signal.SIGCONT)
        assert restarts(routed.endpoint, pod) == before


@PROOFS
def test_evictions_are_not_noticed(routed: Routed) -> None:
    with routed.unnoticed("eviction of each worker"):
        for pod in sorted(routed.endpoint.ready_pods()):
            evict(routed.endpoint, pod)
            wait_for("the pod is gone", lambda pod=pod: pod not in routed.endpoint.all_pods(), timeout_s=60)  # type: ignore[misc]
            wait_for_ready_pods(routed.endpoint, 2)


@PROOFS
def test_rolling_update_is_not_noticed(routed: Routed) -> None:
    with routed.unnoticed("rolling update"):
        before = set(routed.endpoint.ready_pods())
        routed.endpoint.patch({"workers": {"env": [{"name": "ROLLED", "value": "yes"}]}})
        wait_for("all pods are new", lambda: not before & routed.endpoint.all_pods(), timeout_s=300, every_s=2)


@PROOFS
def test_scaling_down_and_up_is_not_noticed(routed: Routed) -> None:
    with routed.unnoticed("2 -> 1 -> 2 workers"):
        routed.endpoint.patch({"scaling": {"minReplicas": 1, "maxReplicas": 1}})
        wait_for("one worker", lambda: len(routed.endpoint.all_pods()) == 1, timeout_s=120)
        routed.endpoint.patch({"scaling": TWO_WORKERS})


@PROOFS
def test_held_requests_wake_workers_also_while_the_operator_restarts(routed: Routed, release: Release) -> None:
    endpoint = routed.endpoint
    endpoint.patch({"scaling": {"minReplicas": 0, "idleSeconds": 10}})
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
