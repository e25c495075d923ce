"""Apply of children on a real API server, with informers: repairs, objects of others, orphans."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import GROUP
from specdecode_operator.kube.apply import ChildApplier, ChildRecord, project_child
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.informer import Informer
from specdecode_operator.kube.kinds import CONFIG_MAPS, SERVICES, Child
from specdecode_operator.types import ChildProblem, Key
from support.background import background
from support.kube import Cluster as Kubectl
from support.operators.kube_objects import config_map, owned
from support.waiting import eventually


class Children:
    """Applier with the informers that it reads."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self.changes: list[Key] = []
        self.informers = {
            kind.kind: Informer(
                client,
                kind,
                [namespace],
                labels=f"{GROUP}/role",
                project=project_child(kind),
                metadata_only=True,
                on_change=self.changes.append,
            )
            for kind in (CONFIG_MAPS, SERVICES)
        }
        self.applier = ChildApplier(client, self.record)

    def record(self, child: Child) -> ChildRecord | None:
        kind, namespace, name = child
        return self.informers[kind].get(namespace, name)

    async def apply(self, manifest: dict[str, Any], owner_uid: str) -> ChildProblem | None:
        return await self.applier.apply(manifest, owner_uid)


@pytest.fixture
async def children(api: KubeClient, namespace: str) -> AsyncIterator[Children]:
    made = Children(api, namespace)
    async with background(*(informer.run() for informer in made.informers.values())):
        for informer in made.informers.values():
            await asyncio.wait_for(informer.synced.wait(), 10)
        yield made


@pytest.fixture
def owner(cluster: Kubectl, namespace: str, request: pytest.FixtureRequest) -> tuple[str, str]:
    """Return name and uid of a ConfigMap that owns the children, so that they are not collected."""
    name = f"owner-{abs(hash(request.node.name)) % 10**6}"
    cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}, namespace=namespace)
    return name, cluster.get("configmap", name, namespace)["metadata"]["uid"]


def child(namespace: str, name: str, owner: tuple[str, str], **data: str) -> dict[str, Any]:
    return owned(config_map(namespace, name, parent=owner[0], **data), owner[1], owner[0], kind="ConfigMap")


def requests_of(client: KubeClient, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the methods of all requests but watches from now on."""
    methods: list[str] = []
    send = client._client.request

    async def recording(method: str, path: str, **params: Any) -> Any:
        if "watch" not in params:
            methods.append(method)
        return await send(method, path, **params)

    monkeypatch.setattr(client._client, "request", recording)
    return methods


async def test_a_child_rests_and_is_repaired_within_two_seconds(
    children: Children,
    owner: tuple[str, str],
    api: KubeClient,
    namespace: str,
    cluster: Kubectl,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    methods = requests_of(api, monkeypatch)
    manifest = child(namespace, "resting", owner, a="1")
    identity = ("ConfigMap", namespace, "resting")
    assert await children.apply(manifest, owner[1]) is None
    await eventually(lambda: children.record(identity), 2)
    for _ in range(3):
        assert await children.apply(manifest, owner[1]) is None
    assert methods == ["get", "patch"]
    cluster.kubectl("label", "configmap", "resting", "theirs=yes", namespace=namespace)
    await eventually(lambda: children.changes.count((namespace, owner[0])) == 2, 2)
    await children.apply(manifest, owner[1])
    assert methods == ["get", "patch"], "fields of others are left to them"

    before = children.record(identity)
    cluster.kubectl("patch", "configmap", "resting", "-p", '{"data":{"a":"2"}}', namespace=namespace)
    await eventually(lambda: children.record(identity) != before, 2)
    drifted = children.record(identity)
    assert await children.apply(manifest, owner[1]) is None
    assert cluster.get("configmap", "resting", namespace)["data"] == {"a": "1"}
    assert methods[2:] == ["patch"]
    await eventually(lambda: children.record(identity) != drifted, 2)
    assert await children.apply(manifest, owner[1]) is None
    assert methods[3:] == [], "the repaired child rests"
    cluster.kubectl("delete", "configmap", "resting", "--wait=false", namespace=namespace)
    await eventually(lambda: children.record(identity) is None, 2)
    assert await children.apply(manifest, owner[1]) is None
    assert cluster.get("configmap", "resting", namespace)["data"] == {"a": "1"}
