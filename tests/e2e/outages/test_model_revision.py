"""A model whose URI names no commit: the first pod resolves it, status shows it, and later pods use the same one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.e2e.endpoint import Endpoint
from support.e2e.hubs import PORT, hub_in_pod
from support.e2e.kube import Namespace
from support.e2e.loop import HALF_A_CORE, deployed
from support.kube import wait_for
from support.published.hub import COMMIT, NEWER_COMMIT

pytestmark = [pytest.mark.timeout(600), pytest.mark.proof("outages")]
HUB, URI = "model-hub", "hf://RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8"


@pytest.fixture
def hub(watched: Namespace) -> Iterator[str]:
    """Yield the URL of a hub in the cluster, reachable from pods and from the test."""
    with hub_in_pod(watched, HUB), watched.reach("service", HUB, PORT) as url:
        yield url


def move_main(hub: str) -> Any:
    """Move the branch main of the hub's model to another commit. Return the requests that the hub got."""
    answer = httpx.put(f"{hub}/head", content=NEWER_COMMIT, timeout=10, trust_env=False)
    return answer.raise_for_status().json()


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
        assert pulled_commit(endpoint, first) == COMMIT
        wait_for("status has the commit", lambda: endpoint.status()["model"]["revision"] == COMMIT)
        before = endpoint.identities()
        move_main(hub)
        assert endpoint.identities() == before, "the resolved commit replaces no pod"

        watched.kubectl("delete", "pod", first)
        (second,) = wait_for("a new pod", lambda: set(endpoint.ready_pods()) - {first}, timeout_s=180, every_s=1)
        assert pulled_commit(endpoint, second) == COMMIT
        assert endpoint.status()["model"]["revision"] == COMMIT
        requests = move_main(hub)
    listings = [path.rpartition("/")[2] for _, path, _ in requests if "/revision/" in path]
    assert listings == ["main", COMMIT], "the second pod did not ask for the branch"
    print(f"\nrevisions that pods asked the hub for: {listings}")
