"""A model whose URI names no commit: the first pod resolves it, status shows it, and later pods use the same one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.e2e.endpoint import Endpoint
from support.e2e.hubs import PORT, hub_in_pod
from support.e2e.kube import Namespace
from support.e2e.loop import HALF_A_CORE, deployed
from support.e2e.release import Release
from support.kube import wait_for

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.proof("outages"),
]
HUB, URI = "model-hub", "hf://org/model"
FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture
def hub(watched: Namespace, release: Release) -> Iterator[str]:
    """Yield the URL of a hub in the cluster, reachable from pods and from the test."""
    release.start()
    program = Path(__file__).parents[2] / "support" / "e2e" / "hub_pod.py"
    with hub_in_pod(watched, HUB, {"hub.py": program}), watched.reach("service", HUB, PORT) as url:
        yield url


def pulled_commit(endpoint: Endpoint, pod: str) -> str:
    """Return the commit that a pod reports to have, from the termination message of its first container."""
    (status,) = endpoint.namespace.get("pod", pod)["status"]["initContainerStatuses"]
    return str(json.loads(status["state"]["terminated"]["message"])["revisions"][URI])


def test_new_pods_use_the_resolved_commit(hub: str, watched: Namespace) -> None:
    env = [{"name": "HF_ENDPOINT", "value": f"http://{HUB}:{PORT}"}]
    workers = {"resources": HALF_A_CORE, "template": {"spec": {"initContainers": [{"name": "pull", "env": env}]}}}
    speculation = {"method": "none", "draft": None}
    with deployed(
        watched, "unpinned", speculation, workers, model={"uri": URI}, engine={"maxModelLen": 512}
    ) as endpoint:
        first = endpoint.one_pod()
        assert pulled_commit(endpoint, first) == FIRST
        wait_for("status has the commit", lambda: endpoint.status()["model"]["revision"] == FIRST)
        before = endpoint.identities()
        httpx.put(f"{hub}/head", content=SECOND, timeout=10, trust_env=False).raise_for_status()
        assert endpoint.identities() == before, "the resolved commit replaces no pod"

        watched.kubectl("delete", "pod", first)
        (second,) = wait_for("a new pod", lambda: set(endpoint.ready_pods()) - {first}, timeout_s=180, every_s=1)
        assert pulled_commit(endpoint, second) == FIRST
        assert endpoint.status()["model"]["revision"] == FIRST
        listings = httpx.get(f"{hub}/listings", timeout=10, trust_env=False).json()
    assert listings == ["main", FIRST], "the second pod did not ask for the branch"
    print(f"\nrevisions that pods asked the hub for: {listings}")
