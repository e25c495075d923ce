"""Control of the number of workers, by the operator or an autoscaler, and the plan that a new worker starts with."""

from __future__ import annotations

import json

import httpx
import pytest

from specdecode_worker.contract import Port
from support.e2e.endpoint import MODEL, Endpoint
from support.e2e.kube import Namespace
from support.e2e.release import Release
from support.e2e.traffic import Traffic, chat_body
from support.kube import Manifest, wait_for


def scale(namespace: Namespace, name: str) -> Manifest:
    """Return the scale subresource, as an autoscaler reads it."""
    path = f"/apis/specdecode.io/v1alpha1/namespaces/{namespace.name}/specdecodedeployments/{name}/scale"
    subresource: Manifest = json.loads(namespace.kubectl("get", "--raw", path))
    return subresource


def two_ready(endpoint: Endpoint) -> list[str]:
    ready = endpoint.ready_pods()
    return ready if len(ready) == 2 else []


def test_kubectl_scale_adds_a_serving_worker(endpoint: Endpoint) -> None:
    (first,) = endpoint.ready_pods()
    endpoint.namespace.kubectl("scale", "sdd", endpoint.name, "--replicas=2")
    try:
        pods = wait_for("two workers", lambda: two_ready(endpoint), timeout_s=120, every_s=2)
        (second,) = set(pods) - {first}
        with endpoint.namespace.reach("pod", second, Port.http) as url:
            body = chat_body(MODEL, "Say hello.", 8)
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        wait_for("status counts it", lambda: endpoint.status()["readyReplicas"] == 2, timeout_s=30)
        subresource = scale(endpoint.namespace, endpoint.name)
        assert subresource["spec"]["replicas"] == subresource["status"]["replicas"] == 2
        assert "specdecode.io/name=shared" in subresource["status"]["selector"]
    finally:
        endpoint.namespace.kubectl("scale", "sdd", endpoint.name, "--replicas=1")
    wait_for("one worker", lambda: len(endpoint.pods()) == 1, timeout_s=60)


def test_scale_is_readable_without_optional_spec_fields(watched: Namespace, endpoint: Endpoint) -> None:
    bare: Manifest = {
        "apiVersion": "specdecode.io/v1alpha1",
        "kind": "SpecDecodeDeployment",
        "metadata": {"name": "bare"},
        "spec": {"model": {"uri": "embedded://smollm2-135m-instruct"}, "paused": True},
    }
    watched.apply(bare)
    try:
        assert scale(watched, "bare")["spec"]["replicas"] == 1
        wait_for("only status is written", lambda: watched.get("sdd", "bare").get("status"), timeout_s=30)
        assert not Endpoint(watched, "bare").pods()
    finally:
        watched.kubectl("delete", "sdd", "bare")


@pytest.mark.timeout(300)
def test_a_killed_worker_is_replaced_and_starts_with_the_present_plan(endpoint: Endpoint, release: Release) -> None:
    """No operator runs to push the plan and no traffic arrives, so the pod must already have it when it starts."""
    (old,) = endpoint.ready_pods()
    version = endpoint.plan().version
    assert version > 0
    with release.stopped():
        endpoint.namespace.kubectl("delete", "pod", old, "--grace-period=0", "--force")
        (new,) = wait_for("a new worker", lambda: set(endpoint.ready_pods()) - {old}, timeout_s=120, every_s=0.5)
        state = endpoint.report(new).plan
        assert (state.version, state.matches_draft) == (version, True)
        with (
            endpoint.namespace.reach("service", endpoint.name, 80) as url,
            Traffic(url, MODEL, concurrency=1, max_tokens=8) as traffic,
        ):
            wait_for("the Service sends requests to it", lambda: traffic.answered >= 3, timeout_s=30)
