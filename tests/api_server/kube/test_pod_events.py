"""The event of a pod that does not start, as a real kubelet writes it."""

from __future__ import annotations

import asyncio
import time

from specdecode_operator.controller.pods import mount_problem
from specdecode_operator.kube.client import KubeClient
from support.kube import Cluster


async def test_a_missing_secret_is_named(api: KubeClient, namespace: str, cluster: Cluster) -> None:
    spec = {
        "containers": [{"name": "c", "image": "none", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
        "volumes": [{"name": "v", "secret": {"secretName": "absent-secret"}}],
        "terminationGracePeriodSeconds": 0,
    }
    cluster.apply(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "mounts"}, "spec": spec}, namespace=namespace
    )
    uid = cluster.get("pod", "mounts", namespace)["metadata"]["uid"]
    started = time.monotonic()
    while (problem := await mount_problem(api, namespace, uid)) is None:
        assert time.monotonic() - started < 30, "no event"
        await asyncio.sleep(0.5)
    assert problem.startswith("FailedMount: ")
    assert "absent-secret" in problem
    cluster.kubectl("delete", "pod", "mounts", "--wait=false", namespace=namespace)
