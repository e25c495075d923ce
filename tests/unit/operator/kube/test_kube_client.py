"""Client of the API server: errors, deadlines, the guard before writes, evictions."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kube import Cluster as Kubectl
from kube_objects import config_map
from kubernetes.aio.client import ApiException
from tcp_proxy import TcpProxy

from specdecode_operator.api.v1alpha1 import GROUP
from specdecode_operator.errors import (
    ClusterError,
    Conflict,
    EvictionBlocked,
    Gone,
    NotFound,
    NotLeader,
    Refused,
    Unavailable,
)
from specdecode_operator.kube.api_errors import translate, watch_error
from specdecode_operator.kube.client import CONFIG_MAPS, KubeClient
from specdecode_operator.kube.kinds import LEASES, PODS

WORKER_LABEL = f"{GROUP}/role=worker"


def answer(status: int, message: str = "no", **details: Any) -> ApiException:
    body = json.dumps({"kind": "Status", "code": status, "message": message, "details": details})
    return ApiException(status=status, reason="Reason", body=body)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, Refused),
        (403, Refused),
        (422, Refused),
        (404, NotFound),
        (409, Conflict),
        (410, Gone),
        (429, Unavailable),
        (500, Unavailable),
        (503, Unavailable),
        (504, Unavailable),
    ],
)
def test_status_codes_become_error_classes(status: int, error: type[ClusterError]) -> None:
    translated = translate(answer(status, "the reason"), "get /x")
    assert type(translated) is error
    assert str(translated) == "get /x: the reason"
    assert translated.sentence == "the reason"


@pytest.mark.parametrize("status", [500, 503])
def test_a_webhook_that_cannot_be_called_is_unavailable(status: int) -> None:
    message = 'Internal error occurred: failed calling webhook "a.b": connection refused'
    translated = translate(answer(status, message), "patch /x")
    assert type(translated) is Unavailable
    assert translated.sentence == message


def test_only_a_disruption_budget_blocks_an_eviction() -> None:
    cause = {"reason": "DisruptionBudget", "message": "The disruption budget b needs 1 healthy pods and has 1"}
    blocked = translate(answer(429, "Cannot evict pod.", causes=[cause]), "post /x")
    assert type(blocked) is EvictionBlocked
    assert blocked.sentence == f"Cannot evict pod. {cause['message']}"
    assert type(translate(ApiException(status=429, reason="Too Many", body="wait"), "post /x")) is Unavailable


@pytest.mark.parametrize("body", [None, "", "plain text", "[]", '"text"', "{}"])
def test_answers_without_status_are_translated(body: str | None) -> None:
    assert str(translate(ApiException(status=502, reason="Bad Gateway", body=body), "get /x")) == (
        "get /x: 502 Bad Gateway"
    )


def test_an_error_event_of_an_expired_version_is_gone() -> None:
    assert type(watch_error({"code": 410, "message": "too old"}, "watch /x")) is Gone
    assert type(watch_error({"code": 500}, "watch /x")) is Unavailable


def refuse() -> None:
    raise NotLeader("not the leader")


class Recorder:
    """Fake of the dynamic client that records the requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, float]] = []

    async def request(self, method: str, path: str, *, _request_timeout: Any, **_: Any) -> Any:
        self.requests.append((method, _request_timeout.total))
        return self

    async def json(self) -> dict[str, Any]:
        return {"metadata": {}}


@pytest.fixture
async def recorded() -> tuple[KubeClient, Recorder]:
    client, recorder = KubeClient(SimpleNamespace(configuration=None)), Recorder()
    client._client = recorder
    return client, recorder


MANIFEST = config_map("ns", "a")
WRITES: list[Callable[[KubeClient], Any]] = [
    lambda client: client.create(CONFIG_MAPS, MANIFEST),
    lambda client: client.update(CONFIG_MAPS, MANIFEST),
    lambda client: client.patch(CONFIG_MAPS, "ns", "a", {}),
    lambda client: client.delete(CONFIG_MAPS, "ns", "a"),
    lambda client: client.apply(MANIFEST, force=True),
    lambda client: client.apply_status("ns", "a", {}),
    lambda client: client.evict("ns", "a", "uid"),
]


@pytest.mark.parametrize("write", WRITES)
async def test_every_write_passes_the_guard(
    recorded: tuple[KubeClient, Recorder], write: Callable[[KubeClient], Any]
) -> None:
    client, recorder = recorded
    await write(client)
    client.guard = lambda: 3.0
    await write(client)
    assert [seconds for _, seconds in recorder.requests] == [10, 3.0], "a write ends before leadership does"
    client.guard = refuse
    with pytest.raises(NotLeader):
        await write(client)
    assert len(recorder.requests) == 2, "nothing was sent"


async def test_a_deletion_names_the_object_and_takes_what_it_owns() -> None:
    """Pods of a Job would stay by default, and another Job may have the name meanwhile."""
    bodies: list[Any] = []

    class Deletions(Recorder):
        async def request(self, method: str, path: str, *, _request_timeout: Any, **more: Any) -> Any:
            bodies.append(more["body"])
            return await super().request(method, path, _request_timeout=_request_timeout)

    client = KubeClient(SimpleNamespace(configuration=None))
    client._client = Deletions()
    await client.delete(CONFIG_MAPS, "ns", "a", uid="u1")
    await client.delete(CONFIG_MAPS, "ns", "a")
    background = {"propagationPolicy": "Background"}
    assert bodies == [{**background, "preconditions": {"uid": "u1"}}, background]


async def test_reads_and_leases_pass_without_the_guard(recorded: tuple[KubeClient, Recorder]) -> None:
    client, recorder = recorded
    client.guard = refuse
    await client.get(CONFIG_MAPS, "ns", "a")
    await client.list(CONFIG_MAPS, "ns")
    await client.create(LEASES, MANIFEST, guarded=False)
    await client.update(LEASES, MANIFEST, guarded=False)
    assert [method for method, _ in recorder.requests] == ["get", "get", "post", "put"]


@pytest.mark.cluster
async def test_errors_have_a_class_each(api: KubeClient, namespace: str) -> None:
    assert await api.get(CONFIG_MAPS, namespace, "absent") is None
    assert await api.get_metadata(CONFIG_MAPS, namespace, "absent") is None
    await api.create(CONFIG_MAPS, config_map(namespace, "once"))
    with pytest.raises(Conflict):
        await api.create(CONFIG_MAPS, config_map(namespace, "once"))
    with pytest.raises(Refused, match="lowercase RFC 1123"):
        await api.create(CONFIG_MAPS, config_map(namespace, "Not A Name"))


@pytest.mark.cluster
async def test_metadata_has_no_data(api: KubeClient, namespace: str) -> None:
    await api.apply(config_map(namespace, "large", a="x" * 1000), force=True)
    resource = await api.get_metadata(CONFIG_MAPS, namespace, "large")
    assert resource is not None
    assert resource["metadata"]["name"] == "large"
    assert "data" not in resource


@pytest.mark.cluster
async def test_apply_means_the_object_with_that_uid(api: KubeClient, namespace: str, cluster: Kubectl) -> None:
    made = await api.apply(config_map(namespace, "precise", a="1"), force=False)
    uid = made["metadata"]["uid"]
    applied = await api.apply(config_map(namespace, "precise", a="2"), force=True, uid=uid)
    assert (applied["data"], applied["metadata"]["uid"]) == ({"a": "2"}, uid)
    with pytest.raises(Conflict):
        await api.apply(config_map(namespace, "precise", a="3"), force=True, uid="00000000-0000-0000-0000-000000000000")
    cluster.kubectl("delete", "configmap", "precise", namespace=namespace)
    with pytest.raises(Conflict):
        await api.apply(config_map(namespace, "precise", a="3"), force=True, uid=uid)
    assert await api.get(CONFIG_MAPS, namespace, "precise") is None


@pytest.mark.cluster
async def test_apply_without_force_takes_no_field(api: KubeClient, namespace: str, cluster: Kubectl) -> None:
    cluster.apply(config_map(namespace, "theirs", a="1"), server_side=True)
    with pytest.raises(Conflict, match=r"data\.a"):
        await api.apply(config_map(namespace, "theirs", a="2"), force=False)
    assert cluster.get("configmap", "theirs", namespace)["data"] == {"a": "1"}


@pytest.mark.cluster
async def test_update_needs_the_latest_version(api: KubeClient, namespace: str) -> None:
    first = await api.create(CONFIG_MAPS, config_map(namespace, "replaced", a="1"))
    second = await api.update(CONFIG_MAPS, {**first, "data": {"b": "2"}})
    assert second["data"] == {"b": "2"}
    with pytest.raises(Conflict):
        await api.update(CONFIG_MAPS, {**first, "data": {"c": "3"}})


def pod(name: str, **spec: Any) -> dict[str, Any]:
    """Return a pod that is never scheduled."""
    containers = [{"name": "worker", "image": "none"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"schedulerName": "none", "containers": containers, "terminationGracePeriodSeconds": 0, **spec},
    }


@pytest.mark.cluster
async def test_a_disruption_budget_blocks_an_eviction(api: KubeClient, namespace: str, cluster: Kubectl) -> None:
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "strict"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "guarded"}}},
    }
    cluster.apply(budget, pod("guarded"), pod("free"), namespace=namespace)
    status = json.dumps({"status": {"conditions": [{"type": "Ready", "status": "True"}], "phase": "Running"}})
    patch = ("patch", "pod", "guarded", "--subresource=status", "--type=merge", "-p", status)
    cluster.kubectl(*patch, namespace=namespace)
    uids = {name: cluster.get("pod", name, namespace)["metadata"]["uid"] for name in ("guarded", "free")}
    with pytest.raises(EvictionBlocked, match="strict"):
        await api.evict(namespace, "guarded", uids["guarded"])
    api.timeout_seconds = 30  # the API server tries for 10 s
    with pytest.raises(Conflict):
        await api.evict(namespace, "free", uids["guarded"])
    await api.evict(namespace, "free", uids["free"])
    assert await api.get(PODS, namespace, "free") is None
    await api.evict(namespace, "free", uids["free"])  # one that is gone is no error
    cluster.kubectl("delete", "pod", "guarded", "--wait=false", namespace=namespace)


@pytest.mark.cluster
async def test_watch_yields_events_of_any_size(api: KubeClient, namespace: str) -> None:
    version = (await api.list(CONFIG_MAPS, namespace, labels=WORKER_LABEL))["metadata"]["resourceVersion"]
    seen: list[tuple[str, str]] = []

    async def watch() -> None:
        stream = api.watch(CONFIG_MAPS, namespace, labels=WORKER_LABEL, version=version, metadata_only=False)
        async for event, resource in stream:
            seen.append((event, resource["metadata"]["name"]))
            if len(seen) == 2:
                return

    task = asyncio.create_task(watch())
    await api.apply(config_map(namespace, "seen", a="x" * 200_000), force=True)
    await api.apply(config_map(namespace, "seen", a="2"), force=True)
    await asyncio.wait_for(task, 10)
    assert seen == [("ADDED", "seen"), ("MODIFIED", "seen")]


@pytest.mark.cluster
async def test_an_absent_api_server_is_unavailable(api: KubeClient) -> None:
    api._api.configuration.host = "https://127.0.0.1:9"
    with pytest.raises(Unavailable):
        await api.get(CONFIG_MAPS, "default", "any")


@pytest.mark.cluster
@pytest.mark.parametrize("reused", [True, False])
async def test_a_silent_connection_ends_at_the_deadline(
    proxied: KubeClient, proxy: TcpProxy, namespace: str, reused: bool
) -> None:
    if reused:
        await proxied.get(CONFIG_MAPS, namespace, "any")
    proxied.timeout_seconds = 1
    proxy.silence_all()
    started = time.monotonic()
    with pytest.raises(Unavailable):
        await proxied.get(CONFIG_MAPS, namespace, "any")
    assert time.monotonic() - started < 3
