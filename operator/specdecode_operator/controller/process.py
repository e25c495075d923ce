"""The operator process: connections, informer caches, and the three loops, which run while this replica leads."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from specdecode_operator import metrics
from specdecode_operator.controller.admin_tokens import TokenKeys, load_keys
from specdecode_operator.controller.caches import Caches
from specdecode_operator.controller.loops import Loops
from specdecode_operator.controller.readiness import Readiness, serve_probes
from specdecode_operator.controller.resource import identity_of
from specdecode_operator.errors import ClusterError, NotLeader
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.leader_election import LeaderElector
from specdecode_operator.settings import Settings
from specdecode_operator.state.deployment_state import DeploymentState, Pending, StateTable
from specdecode_operator.state.packed import Packed
from specdecode_operator.telemetry.worker_client import WorkerClient
from specdecode_operator.types import Key

KEY_RETRY_SECONDS = 2.0
"""Time between two attempts to read the key of the admin tokens."""

log = logging.getLogger(__name__)


class Process:
    """All background work between kopf's startup and its cleanup."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self._table = StateTable()
        self._loops: Loops | None = None
        """The loops while this replica leads, or else None."""

    async def start(self) -> None:
        """Connect to the API server, start the caches, and join the leader election."""
        settings = self._settings
        self._elector: LeaderElector | None = None
        client = await KubeClient.connect(guard=self._check_leadership)
        self._stack.push_async_callback(client.close)
        workers = WorkerClient(
            proxy=settings.worker_proxy or None, ca_file=Path(settings.worker_ca) if settings.worker_ca else None
        )
        self._stack.push_async_callback(workers.close)
        self._client, self._workers = client, workers
        self._caches = Caches(client, settings.watch_namespaces, self._workers_changed, self._child_changed)
        self._spawn(self._caches.run())
        # An account of all namespaces has its rights in each of them, so that one is asked for.
        readiness = Readiness(client, self._caches, settings.watch_namespaces or (settings.namespace,))
        probes = await serve_probes(settings.listen_address, settings.port_health, readiness)
        self._stack.push_async_callback(probes.cleanup)
        self._spawn(readiness.run(), ends=True)
        for kind in self._caches.informers:
            metrics.WATCH_CONTACT_AGE.labels(kind).set_function(partial(self._caches.contact_age, kind))
        if settings.leader_election:
            identity = f"{settings.identity}_{secrets.token_hex(4)}"
            self._elector = LeaderElector(
                client, namespace=settings.namespace, name=settings.lease_name, identity=identity
            )
            # The stack is unwound from its end: the loops stop, then the renewals, and then the Lease is given back.
            self._stack.push_async_callback(self._elector.release)
            self._spawn(self._elector.run())
        self._spawn(self._lead())

    async def stop(self) -> None:
        """Stop all tasks, the loops first. The lease is released, so that another replica can lead at once."""
        await self._stack.aclose()

    def resource_event(self, event: str | None, resource: Mapping[str, Any]) -> None:
        """Record a watch event of a SpecDecodeDeployment, and request a decision if a user made a change."""
        metadata = resource["metadata"]
        key = (metadata["namespace"], metadata["name"])
        if event == "DELETED" or metadata.get("deletionTimestamp"):
            self._forget(key)
            return
        known = self._table.get(key)
        before = known.resource.value["metadata"] if known else None
        if before is not None and _is_older(metadata, before):
            return
        if known is None or before is None or before["uid"] != metadata["uid"]:
            self._forget(key)
            state = DeploymentState(resource=Packed.of(dict(resource)), generation=metadata["generation"])
            self._table.put(key, state)
        else:
            self._table.update(key, resource=Packed.of(dict(resource)), generation=metadata["generation"])
            if identity_of(before) == identity_of(metadata):
                return  # The operator itself wrote the status.
        if self._loops is not None:
            self._loops.resource_changed(key)

    def _workers_changed(self, key: Key) -> None:
        if self._loops is not None and self._table.get(key) is not None:
            self._loops.workers_changed(key)

    def _child_changed(self, key: Key) -> None:
        if self._loops is not None and self._table.get(key) is not None:
            self._loops.child_changed(key)

    def _forget(self, key: Key) -> None:
        state = self._table.get(key)
        self._table.remove(key)
        if state is not None and self._loops is not None:
            self._loops.forget(key, state.resource.value["metadata"]["uid"])

    def _check_leadership(self) -> None:
        """Raise NotLeader unless this replica may write."""
        if self._elector is not None:
            self._elector.check()

    async def _lead(self) -> None:
        """Run the loops while this replica leads, and drop their results when it loses the lease."""
        while True:
            if self._elector is not None:
                await self._elector.wait_until_leader()
            metrics.LEADER.set(1)
            log.info("leading as %s", self._settings.identity)
            try:
                await self._run_loops()
            except NotLeader as error:
                log.warning("%s", error)
            finally:
                metrics.LEADER.set(0)
                metrics.forget_all()
                self._loops = None
                for key in self._table:
                    self._table.update(
                        key,
                        session=None,
                        decision=None,
                        decided=(),
                        pending=Pending(),
                        failure=None,
                        published=None,
                    )
            log.warning("not leading any more; waiting for the lease")

    async def _run_loops(self) -> None:
        await self._caches.wait_synced()
        keys = await self._token_keys()
        loops = Loops(self._settings, self._client, self._workers, self._caches, self._table, keys)
        self._loops = loops
        for key in self._table:
            loops.resource_changed(key)
        running = asyncio.ensure_future(loops.run())
        lost = asyncio.ensure_future(self._elector.lost.wait() if self._elector else asyncio.Event().wait())
        try:
            await asyncio.wait({running, lost}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
        finally:
            for task in (running, lost):
                task.cancel()
            await asyncio.gather(running, lost, return_exceptions=True)

    async def _token_keys(self) -> TokenKeys:
        while True:
            try:
                return await load_keys(self._client, self._settings.namespace)
            except ClusterError as error:
                log.warning("the key of the admin tokens: %s", error)
                await asyncio.sleep(KEY_RETRY_SECONDS)

    def _spawn(self, work: Coroutine[Any, Any, None], *, ends: bool = False) -> None:
        """Run work in the background. Unless it ``ends`` by itself, the process stops when it does."""
        task = asyncio.create_task(work)
        task.add_done_callback(_stop_after_failure if ends else _stop_process)
        self._stack.push_async_callback(_end, task)


def _is_older(metadata: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Return whether the object of an event is older than the known one, by their resource versions."""
    if metadata["uid"] != known["uid"]:
        return False
    versions = metadata.get("resourceVersion", ""), known.get("resourceVersion", "")
    return all(version.isdecimal() for version in versions) and int(versions[0]) < int(versions[1])


def _stop_process(task: asyncio.Task[None]) -> None:
    """Stop the process after a background task ended, because without that task it would do nothing."""
    if not task.cancelled():
        log.critical("a background task ended", exc_info=task.exception())
        signal.raise_signal(signal.SIGTERM)


def _stop_after_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _stop_process(task)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
