"""A deployment of two workers behind two routers, and a check that clients notice no fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from support.e2e.endpoint import MODEL, ONE_CORE, Endpoint
from support.e2e.kube import Namespace
from support.e2e.loop import deployed
from support.e2e.streams import StreamTraffic, failures, unbroken_answers
from support.e2e.worker_faults import wait_for_ready_pods
from support.kube import Manifest, wait_for
from support.percentile import percentile

NAME = "routed"
WORKERS: Manifest = {"resources": ONE_CORE}
SMALL = {"name": "router", "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}}}
TWO_WORKERS = {"owner": "Operator", "minReplicas": 2, "maxReplicas": 2}
CLIENTS = 8
DRAIN = {"endpointDelay": "1s", "gracePeriod": "60s"}
"""As by default but for the delay: a stream cannot move from a router that leaves, and takes long on two busy cores."""


@dataclass(frozen=True, slots=True)
class Routed:
    """The deployment behind routers, its URL and the unbroken answers."""

    endpoint: Endpoint
    url: str
    expected: dict[str, str]

    @contextmanager
    def unnoticed(self, fault: str, clients: int = CLIENTS) -> Iterator[str]:
        """Yield a ready worker while clients stream. Afterwards no request has failed and no text differs."""
        with self.unbroken_traffic(fault, clients):
            yield sorted(self.endpoint.ready_pods())[0]

    @contextmanager
    def unbroken_traffic(self, fault: str, clients: int = CLIENTS) -> Iterator[StreamTraffic]:
        """Yield clients that stream. Afterwards no request has failed and no text differs."""
        wait_for_ready_pods(self.endpoint, 2)
        with StreamTraffic(self.url, MODEL, clients) as traffic:
            traffic.wait_for_answers(clients)
            yield traffic
            wait_for_ready_pods(self.endpoint, 2)
            traffic.wait_for_answers(clients)
        answers = traffic.answers
        gap = percentile((answer.longest_gap_seconds for answer in answers), 99)
        broken = failures(answers, self.expected)
        print(f"\n{fault}: {len(answers)} answers, {len(broken)} broken, longest gap p99 {gap:.2f} s")
        assert broken == [], broken


@contextmanager
def routed_deployment(
    namespace: Namespace,
    name: str = NAME,
    workers: Manifest | None = None,
    api_key: str = "none",
    router_pods: Manifest | None = None,
    **spec: Any,
) -> Iterator[Routed]:
    """Deploy two workers behind two routers for the duration of the block. ``router_pods`` are fields of routers."""
    fields = {**WORKERS, **(workers or {})}
    router = {"replicas": 2, "template": {"spec": {"containers": [SMALL], **(router_pods or {})}}}

    def selects_routers() -> bool:
        selector: dict[str, str] = namespace.get("service", name)["spec"]["selector"]
        return selector["specdecode.io/role"] == "router"

    with deployed(namespace, name, {}, fields, router=router, scaling=TWO_WORKERS, drain=DRAIN, **spec) as endpoint:
        wait_for_ready_pods(endpoint, 2)
        wait_for("the Service selects routers", selects_routers)
        with namespace.reach("service", name, 80) as url:
            yield Routed(endpoint, url, unbroken_answers(url, MODEL, api_key))
