"""The apply with a cache in the client, until ChildApplier replaces it."""

from __future__ import annotations

from typing import Any

import pytest
from kube import Cluster as Kubectl
from kube_objects import config_map

from specdecode_operator.kube.client import CONFIG_MAPS, KubeClient

pytestmark = pytest.mark.cluster


def methods_of(api: KubeClient, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fills with the methods of all requests from now on."""
    calls: list[str] = []
    send = api._client.request

    async def counted(method: str, path: str, **params: Any) -> Any:
        calls.append(method)
        return await send(method, path, **params)

    monkeypatch.setattr(api._client, "request", counted)
    return calls


async def test_apply_owns_fields_and_mends_what_was_deleted(api: KubeClient, namespace: str, cluster: Kubectl) -> None:
    await api.apply(config_map(namespace, "applied", a="1", b="2"))
    await api.apply(config_map(namespace, "applied", a="3"))
    found = await api.get(CONFIG_MAPS, namespace, "applied")
    assert found is not None
    assert found["data"] == {"a": "3"}, "what is no longer applied goes"
    cluster.kubectl("delete", "configmap", "applied", namespace=namespace)
    await api.apply(config_map(namespace, "applied", a="3"))
    assert await api.get(CONFIG_MAPS, namespace, "applied") is None, "the same text is not sent twice in a minute"
    api.forget(namespace, "applied")
    await api.apply(config_map(namespace, "applied", a="3"))
    assert await api.get(CONFIG_MAPS, namespace, "applied") is not None


async def test_what_stands_is_not_applied_again_and_what_was_touched_is(
    api: KubeClient, namespace: str, cluster: Kubectl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdecode_operator.kube.applied.REAPPLY_SECONDS", 0)
    calls = methods_of(api, monkeypatch)
    for _ in range(3):
        await api.apply(config_map(namespace, "touched", a="1"))
    assert calls == ["patch", "get", "get"], "at rest nothing is written, not even the same again"
    metadata = cluster.get("configmap", "touched", namespace)["metadata"]
    cluster.kubectl("label", "configmap", "touched", "theirs=yes", namespace=namespace)
    await api.apply(config_map(namespace, "touched", a="1"))
    assert calls[3:] == ["get"], "fields of others are theirs"
    cluster.kubectl("patch", "configmap", "touched", "-p", '{"data":{"a":"2"}}', namespace=namespace)
    await api.apply(config_map(namespace, "touched", a="1"))
    assert calls[4:] == ["get", "patch"]
    found = cluster.get("configmap", "touched", namespace)
    assert (found["data"], found["metadata"]["uid"]) == ({"a": "1"}, metadata["uid"])
    cluster.kubectl("delete", "configmap", "touched", namespace=namespace)
    await api.apply(config_map(namespace, "touched", a="1"))
    assert cluster.get("configmap", "touched", namespace)["data"] == {"a": "1"}


async def test_the_next_operator_applies_nothing_that_stands(
    api: KubeClient, namespace: str, cluster: Kubectl, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stands", "touched", "other-text"):
        await api.apply(config_map(namespace, name, a="1"))
    told = api.applied.told(namespace, ["stands", "touched", "other-text"])
    cluster.kubectl("patch", "configmap", "touched", "-p", '{"data":{"a":"2"}}', namespace=namespace)
    restarted = await KubeClient.connect(cluster.kubeconfig)
    restarted.applied.recall(namespace, told)
    calls = methods_of(restarted, monkeypatch)
    await restarted.apply(config_map(namespace, "stands", a="1"))
    assert calls == ["get"]
    await restarted.apply(config_map(namespace, "touched", a="1"))
    assert calls[1:] == ["get", "patch"], "somebody took a field while no operator looked"
    await restarted.apply(config_map(namespace, "other-text", a="3"))
    assert calls[3:] == ["patch"], "this operator wants something else"
    await restarted.close()
