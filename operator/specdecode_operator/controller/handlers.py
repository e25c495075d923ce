"""Kopf and the watches: events of our kind and of its children become keys in the work queue, and nothing more.

Only ``on.event`` is used on our kind: timers, daemons and deletion handlers would put a finalizer on the resource,
and deleting it would hang once the operator is gone. Children go by their ownerReferences. Kopf's own watches send
no label selector, so those of the children are our own.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import kopf
import prometheus_client

from specdecode_operator import metrics
from specdecode_operator.api.v1alpha1 import GROUP, PAUSED_ANNOTATION, PIN_ANNOTATION, PLURAL, VERSION
from specdecode_operator.controller.reconciler import Reconciler
from specdecode_operator.controller.workqueue import WorkQueue
from specdecode_operator.errors import ClusterError
from specdecode_operator.kube.client import PODS, WORKLOADS, Kind, KubeClient
from specdecode_operator.kube.pod_cache import PodCache
from specdecode_operator.settings import Settings
from specdecode_operator.state.store import StateStore
from specdecode_operator.telemetry.worker_client import WorkerClient
from specdecode_operator.types import Defaults, Key

CHILD_LABELS = f"{GROUP}/role=worker"
LONGEST_PAUSE_SECONDS = 30.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Process:
    """What runs beside kopf from startup to cleanup."""

    settings: Settings
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    queue: WorkQueue | None = None
    early: list[Key] = field(default_factory=list)
    seen: dict[Key, tuple[Any, ...]] = field(default_factory=dict)
    """Of every deployment, what people say of it."""

    async def start(self) -> None:
        """Connects, and starts the queue and a watch for every kind of child in every namespace."""
        cluster = await KubeClient.connect()
        self.stack.push_async_callback(cluster.close)
        workers = WorkerClient(proxy=self.settings.worker_proxy or None)
        self.stack.push_async_callback(workers.close)
        defaults = Defaults(
            worker_image=self.settings.worker_image,
            worker_image_pull_policy=self.settings.worker_image_pull_policy,
        )
        pods = PodCache()
        reconciler = Reconciler(
            cluster, workers, StateStore(cluster), defaults, poll_seconds=self.settings.poll_seconds, pods=pods
        )
        self.queue = WorkQueue(reconciler.handle, concurrency=self.settings.concurrency)
        metrics.QUEUE_DEPTH.set_function(self.queue.depth)
        self._spawn(self.queue.run())
        for namespace in self.settings.watch_namespaces or (None,):
            for kind in (WORKLOADS, PODS):
                told = pods if kind is PODS else None
                self._spawn(watch_children(cluster, kind, namespace, self.queue.add, told))
        for key in self.early:
            self.queue.add(key, changed=True)

    async def stop(self) -> None:
        await self.stack.aclose()

    def event(self, key: Key, event: str | None, metadata: Mapping[str, Any]) -> None:
        """Of a deployment. One that says what the last one said is of the status, which we wrote ourselves."""
        said = _said(metadata)
        if event != "DELETED" and self.seen.get(key) == said:
            return
        if event == "DELETED":
            self.seen.pop(key, None)
        else:
            self.seen[key] = said
        if self.queue is None:
            self.early.append(key)
        else:
            self.queue.add(key, changed=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(_must_not_end)
        self.stack.push_async_callback(_ended, task)


def _said(metadata: Mapping[str, Any]) -> tuple[Any, ...]:
    """What people say of a deployment: a spec by its generation, pause and pin by annotations, and that it shall go."""
    annotations = metadata.get("annotations") or {}
    steering = (annotations.get(name) for name in (PAUSED_ANNOTATION, PIN_ANNOTATION))
    return metadata["uid"], metadata["generation"], metadata.get("deletionTimestamp"), *steering


def _must_not_end(task: asyncio.Task[None]) -> None:
    """A watch or queue that died would leave a process that looks alive and does nothing: better to start again."""
    if not task.cancelled():
        log.critical("a background task ended", exc_info=task.exception())
        signal.raise_signal(signal.SIGTERM)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def watch_children(
    cluster: KubeClient, kind: Kind, namespace: str | None, add: Callable[[Key], None], pods: PodCache | None = None
) -> None:
    """Lists, then watches, for ever; after an error it lists again, with growing pauses while the API is away. ``pods``
    is told while a watch is on, and of what it sees."""
    pods = pods or PodCache()
    pause = 1.0
    while True:
        try:
            version = ""
            async for page in cluster.pages(kind, namespace, labels=CHILD_LABELS):
                for child in page.get("items") or []:
                    _add_parent(cluster, "ADDED", child, add)
                version = page["metadata"]["resourceVersion"]
            pause = 1.0
            # From ``version`` on every change comes, so lists that are asked for from now on hold until one does.
            pods.begins(namespace)
            async for event, child in cluster.watch(kind, namespace, labels=CHILD_LABELS, version=version):
                parent = _add_parent(cluster, event, child, add)
                if parent is not None:
                    pods.changed(parent)
            pods.ends(namespace)
        except ClusterError as error:
            pods.ends(namespace)
            log.warning("watch of %s: %s", kind.plural, error)
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE_SECONDS, pause * 2)


def _add_parent(cluster: KubeClient, event: str, child: dict[str, Any], add: Callable[[Key], None]) -> Key | None:
    """The parent, which is added."""
    metadata = child["metadata"]
    if event == "DELETED":
        cluster.forget(metadata["namespace"], metadata["name"])
    name = metadata.get("labels", {}).get(f"{GROUP}/name")
    if not name:
        return None
    add((metadata["namespace"], name))
    return metadata["namespace"], name


def register(settings: Settings) -> kopf.OperatorRegistry:
    """The handlers, in a registry of their own."""
    registry = kopf.OperatorRegistry()
    process = Process(settings)

    async def startup(**_: Any) -> None:
        prometheus_client.start_http_server(settings.port_metrics, addr=settings.listen_address)
        await process.start()

    async def cleanup(**_: Any) -> None:
        await process.stop()

    async def changed(namespace: str, name: str, type: str | None, meta: Mapping[str, Any], **_: Any) -> None:
        process.event((namespace, name), type, meta)

    kopf.on.login(registry=registry)(_login)
    kopf.on.startup(registry=registry)(startup)
    kopf.on.cleanup(registry=registry)(cleanup)
    kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(changed)
    return registry


def _login(**kwargs: Any) -> Any:
    return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)


class EndlessBackoffs:
    """Kopf gives a request up when its back-offs end; the API server may be away for longer than that."""

    def __iter__(self) -> Iterator[float]:
        pause = 1.0
        while True:
            yield pause
            pause = min(LONGEST_PAUSE_SECONDS, pause * 2)


def kopf_settings() -> kopf.OperatorSettings:
    """No peering, no events of kopf's own, no scan of CRDs and namespaces, endless patience with the API server."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.networking.error_backoffs = EndlessBackoffs()
    settings.watching.server_timeout = 300
    return settings
