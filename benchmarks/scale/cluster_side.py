"""What Kubernetes would do for the benchmark's deployments: pods that are Ready, and Deployments that say so.

There is no controller manager, scheduler or kubelet: ten thousand pods of theirs would measure them and not the
operator. Pods are made by hand, bound to nobody, with an address each that the stand-ins answer for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from scale.api_server import TOKEN, ApiServer

from specdecode_operator.api import crd
from specdecode_operator.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION

NAMESPACES = 10
RESOURCES = f"/apis/{GROUP}/{VERSION}"
MERGE = "application/merge-patch+json"
OURS = {
    "specdecodedeployments": f"{RESOURCES}/{PLURAL}",
    "deployments": "/apis/apps/v1/deployments",
    "configmaps": "/api/v1/configmaps",
    "services": "/api/v1/services",
    "secrets": "/api/v1/secrets",
    "poddisruptionbudgets": "/apis/policy/v1/poddisruptionbudgets",
    "pods": "/api/v1/pods",
    "events": "/api/v1/events",
}
"""Where all that the operator writes is listed."""


class Api:
    """JSON over one connection pool, as administrator."""

    def __init__(self, server: ApiServer) -> None:
        connector = aiohttp.TCPConnector(ssl=False, limit=32)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        self._session = aiohttp.ClientSession(server.url, connector=connector, headers=headers)

    async def close(self) -> None:
        await self._session.close()

    async def send(self, method: str, path: str, body: Any = None, *, kind: str = "application/json") -> Any:
        data = None if body is None else json.dumps(body)
        async with self._session.request(method, path, data=data, headers={"Content-Type": kind}) as answer:
            text = await answer.text()
            if answer.status >= 300:
                raise RuntimeError(f"{method} {path}: {answer.status} {text[:300]}")
            return json.loads(text)

    async def text(self, path: str) -> str:
        async with self._session.get(path) as answer:
            return await answer.text()

    async def watch(self, path: str) -> AsyncIterator[dict[str, Any]]:
        """Objects that come and change from now on."""
        timeout = aiohttp.ClientTimeout(total=None)
        version = (await self.send("GET", f"{path}?limit=1"))["metadata"]["resourceVersion"]
        params = {"watch": "true", "resourceVersion": version}
        async with self._session.get(path, params=params, timeout=timeout) as answer:
            rest = b""
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in filter(None, lines):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise RuntimeError(f"watch of {path}: {event['object']}")
                    yield event["object"]

    async def versions(self) -> dict[str, str]:
        """resourceVersion of every object that the operator may write."""
        found = {}
        for kind, path in OURS.items():
            for item in (await self.send("GET", path))["items"]:
                metadata = item["metadata"]
                found[f"{kind}/{metadata['namespace']}/{metadata['name']}"] = metadata["resourceVersion"]
        return found

    async def write_requests(self) -> int:
        """Writes of our kinds that the API server has answered, those that changed nothing included."""
        count = 0.0
        for line in (await self.text("/metrics")).splitlines():
            ours = line.startswith("apiserver_request_total{") and any(f'resource="{kind}"' in line for kind in OURS)
            if ours and any(f'verb="{verb}"' in line for verb in ("APPLY", "PATCH", "POST", "PUT", "DELETE")):
                count += float(line.rpartition(" ")[2])
        return int(count)


async def in_turns(work: Iterable[Awaitable[Any]], at_once: int = 16) -> None:
    """All of them, so many at a time."""
    slots = asyncio.Semaphore(at_once)

    async def one(item: Awaitable[Any]) -> None:
        async with slots:
            await item

    await asyncio.gather(*(one(item) for item in work))


@dataclass(slots=True)
class Side:
    """The benchmark's own controller: a watch of the Deployments that the operator makes."""

    api: Api
    pods: int
    made: dict[str, int] = field(default_factory=dict)
    """Deployments that have their pods, with the generation that their status tells of."""

    async def install(self, names: Sequence[tuple[str, str]]) -> None:
        """The CRDs, the namespaces, and a resource for every name."""
        crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        for definition in (crd.crd(), crd.draft_crd()):
            await self.api.send("POST", crds, definition)
        for namespace in sorted({namespace for namespace, _ in names}):
            await self.api.send("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
        while True:
            try:
                await self.api.send("GET", f"{RESOURCES}/{PLURAL}")
                break
            except RuntimeError:
                await asyncio.sleep(0.5)
        await in_turns(
            self.api.send("POST", f"{RESOURCES}/namespaces/{namespace}/{PLURAL}", resource(name, self.pods))
            for namespace, name in names
        )

    async def run(self) -> None:
        """Until cancelled."""
        slots = asyncio.Semaphore(16)
        tasks = set()

        async def one(found: dict[str, Any]) -> None:
            async with slots:
                await self._follow(found)

        async for found in self.api.watch("/apis/apps/v1/deployments"):
            task = asyncio.create_task(one(found))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _follow(self, found: dict[str, Any]) -> None:
        metadata = found["metadata"]
        key, generation = f"{metadata['namespace']}/{metadata['name']}", metadata["generation"]
        if self.made.get(key, 0) >= generation:
            return
        index = len(self.made)
        first, self.made[key] = key not in self.made, generation
        if first:
            for number in range(self.pods):
                await self._pod(
                    metadata["namespace"], f"{metadata['name']}-{number}", found, index * self.pods + number
                )
        counts = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
        status = {"observedGeneration": generation, **dict.fromkeys(counts, self.pods)}
        path = f"/apis/apps/v1/namespaces/{metadata['namespace']}/deployments/{metadata['name']}/status"
        await self.api.send("PATCH", path, {"status": status}, kind=MERGE)

    async def _pod(self, namespace: str, name: str, deployment: dict[str, Any], index: int) -> None:
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        spec = {"containers": [{"name": "worker", "image": "none"}]}
        path = f"/api/v1/namespaces/{namespace}/pods"
        await self.api.send("POST", path, {"metadata": {"name": name, "labels": labels}, "spec": spec})
        ip = address(index)
        conditions = [{"type": "Ready", "status": "True"}]
        status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": conditions}
        await self.api.send("PATCH", f"{path}/{name}/status", {"status": status}, kind=MERGE)


def names_of(count: int) -> list[tuple[str, str]]:
    return [(f"team-{index % NAMESPACES}", f"d{index:04}") for index in range(count)]


def address(index: int) -> str:
    """Of a pod; nobody has it."""
    return f"10.{128 + (index >> 16)}.{index >> 8 & 255}.{index & 255}"


def resource(name: str, pods: int) -> dict[str, Any]:
    speculation = {
        "draft": {"uri": "embedded://smollm2-135m-instruct-eagle3"},
        "depth": {"max": 5},
        "tasks": [{"name": "code", "match": "Python"}],
    }
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": "embedded://smollm2-135m-instruct"},
            "speculation": speculation,
            "replicas": pods,
            "workers": {"accelerator": {"count": 0}},
            "router": {"replicas": 0},
        },
    }
