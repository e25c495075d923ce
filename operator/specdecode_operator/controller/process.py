"""The operator process: connections, informer caches, and one loop a deployment while this replica leads."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from specdecode_operator import manifests, metrics
from specdecode_operator.controller.admin_tokens import AdminTokens, TokenKeys, load_keys
from specdecode_operator.controller.children import Caches, JobWriter
from specdecode_operator.controller.deployment_loop import DeploymentLoop, Shared
from specdecode_operator.controller.readiness import Readiness, serve_probes
from specdecode_operator.errors import ClusterError, NotLeader
from specdecode_operator.kube.apply import ChildApplier
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.informer import is_shown
from specdecode_operator.kube.leader_election import LeaderElector
from specdecode_operator.settings import Settings
from specdecode_operator.state.store import StateStore
from specdecode_operator.telemetry.polling import WorkerCalls, WorkerClient
from specdecode_operator.types import Defaults, Key

KEY_RETRY_SECONDS = 2.0
"""Time between two attempts to read the key of the admin tokens."""
CHECK_SECONDS = 0.3
"""Time from a watch event of a child to its check. A write is answered within some 10 ms; a repair waits for it."""

Resource = Mapping[str, Any]

log = logging.getLogger(__name__)


class Fleet:
    """The loops of all deployments, while this replica leads."""

    def __init__(self, settings: Settings, process: Process, keys: TokenKeys) -> None:
        client, caches = process.client, process.caches
        self._applier = ChildApplier(client, caches.record)
        self._loops: dict[Key, tuple[DeploymentLoop, asyncio.Task[None]]] = {}
        self._unchecked: set[Key] = set()
        """Deployments of which a child changed less than CHECK_SECONDS ago."""
        self._shared = Shared(
            client=client,
            calls=WorkerCalls(process.workers, period=settings.poll_seconds),
            caches=caches,
            resources=process.resources,
            update=process.update,
            gone=process.forget,
            applier=self._applier,
            store=StateStore(client, self._applier, caches.note_draft),
            tokens=AdminTokens(client, keys),
            jobs=JobWriter(client),
            defaults=Defaults(**{one.name: getattr(settings, one.name) for one in fields(Defaults)}),
            writers=asyncio.Semaphore(settings.concurrency),
        )
        for key in process.resources:
            self.start(key)

    def start(self, key: Key) -> None:
        """Start the loop of a deployment."""
        loop = DeploymentLoop(key, self._shared)
        self._loops[key] = loop, asyncio.create_task(loop.run(), name="/".join(key))

    def wake(self, key: Key, *, changed: bool = False) -> None:
        """Have a step made: after a change by a user, or of pods or their workload."""
        if key in self._loops:
            self._loops[key][0].wake(changed=changed)

    def child_changed(self, key: Key) -> None:
        """Have a step made after a change of another child, unless the change is the operator's own.

        The check waits for the answer to the operator's write, because the watch event may come before it.
        """
        if key in self._loops and key not in self._unchecked:
            self._unchecked.add(key)
            asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check_children, key)

    def _check_children(self, key: Key) -> None:
        self._unchecked.discard(key)
        if not self._applier.is_settled(key, manifests.child_names(key[1])):
            self.wake(key)

    def forget(self, key: Key, uid: str) -> None:
        """End the loop of a deployment that was deleted, and drop its records."""
        if key in self._loops:
            self._loops.pop(key)[1].cancel()
        self._shared.store.forget(uid)
        self._shared.tokens.forget(uid)
        self._shared.jobs.forget(key)
        metrics.forget(*key)
        for child in manifests.child_names(key[1]):
            self._applier.forget(key[0], child)

    async def stop(self) -> None:
        """End all loops."""
        tasks = [task for _, task in self._loops.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Process:
    """All background work between kopf's startup and its cleanup."""

    client: KubeClient
    workers: WorkerClient
    caches: Caches

    def __init__(self, settings: Settings) -> None:
        """Prepare the process.

        Args:
            settings: Settings of the operator.
        """
        self._settings = settings
        self._stack = AsyncExitStack()
        self._elector: LeaderElector | None = None
        self.resources: dict[Key, Resource] = {}
        """SpecDecodeDeployments as the API server has them."""
        self.fleet: Fleet | None = None
        """The loops while this replica leads, or else None."""

    async def start(self) -> None:
        """Connect to the API server, start the caches, join the leader election, and wait for the CRD."""
        settings = self._settings
        client = await KubeClient.connect(guard=self._check_leadership)
        self._stack.push_async_callback(client.close)
        workers = WorkerClient(
            proxy=settings.worker_proxy or None, ca_file=Path(settings.worker_ca) if settings.worker_ca else None
        )
        self._stack.push_async_callback(workers.close)
        self.client, self.workers = client, workers
        self.caches = Caches(client, settings.watch_namespaces, self._workers_changed, self._child_changed)
        self._spawn(self.caches.run())
        # An account of all namespaces has its rights in each of them, so that one is asked for.
        readiness = Readiness(client, self.caches, settings.watch_namespaces or (settings.namespace,))
        probes = await serve_probes(settings.listen_address, settings.port_health, readiness)
        self._stack.push_async_callback(probes.cleanup)
        self._spawn(readiness.run(), ends=True)
        for kind in self.caches.informers:
            metrics.WATCH_CONTACT_AGE.labels(kind).set_function(partial(self.caches.contact_age, kind))
        if settings.leader_election:
            identity = f"{settings.identity}_{secrets.token_hex(4)}"
            self._elector = LeaderElector(
                client, namespace=settings.namespace, name=settings.lease_name, identity=identity
            )
            # The stack is unwound from its end: the loops stop, then the renewals, and then the Lease is given back.
            self._stack.push_async_callback(self._elector.release)
            self._spawn(self._elector.run())
        self._spawn(self._lead())
        try:
            await readiness.has_kind.wait()
        except asyncio.CancelledError:  # a stop, after which kopf runs no cleanup: the Lease would stay
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop all tasks, the loops first. The lease is released, so that another replica can lead at once."""
        await self._stack.aclose()

    # --- events -----------------------------------------------------------------------------------------------------

    def resource_event(self, event: str | None, resource: Resource) -> None:
        """Take a watch event of a SpecDecodeDeployment, and have a step made if a user made a change."""
        metadata = resource["metadata"]
        if event == "DELETED" or metadata.get("deletionTimestamp"):
            self.forget((metadata["namespace"], metadata["name"]))
        else:
            self.update(dict(resource))

    def update(self, resource: Resource) -> None:
        """Take a resource of the API server unless a newer one is known."""
        metadata = resource["metadata"]
        key = metadata["namespace"], metadata["name"]
        known = self.resources.get(key, {}).get("metadata")
        if known is not None and known["uid"] != metadata["uid"]:
            self.forget(key)
            known = None
        if known is not None and _is_older(metadata, known):
            return
        # The record of field owners is most of the object.
        slim = {name: value for name, value in metadata.items() if name != "managedFields"}
        self.resources[key] = {**resource, "metadata": slim}
        if self.fleet is None:
            return
        if known is None:
            self.fleet.start(key)
        elif known["generation"] != metadata["generation"]:
            self.fleet.wake(key, changed=True)

    def forget(self, key: Key) -> None:
        """Drop a deployment that was deleted."""
        resource = self.resources.pop(key, None)
        if resource is not None and self.fleet is not None:
            self.fleet.forget(key, resource["metadata"]["uid"])

    def _workers_changed(self, key: Key) -> None:
        if self.fleet is not None:
            self.fleet.wake(key)

    def _child_changed(self, key: Key) -> None:
        if self.fleet is not None:
            self.fleet.child_changed(key)

    # --- leadership -------------------------------------------------------------------------------------------------

    def _check_leadership(self) -> float | None:
        """Return the seconds for which this replica may write, if it is known. Raise NotLeader if it may not."""
        return self._elector.check() if self._elector is not None else None

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
            log.warning("not leading any more; waiting for the lease")

    async def _run_loops(self) -> None:
        """Run the loops until the lease is lost; without an election, for ever."""
        await self.caches.wait_synced()
        self.fleet = Fleet(self._settings, self, await self._token_keys())
        try:
            await (self._elector.lost.wait() if self._elector else asyncio.Event().wait())
        finally:
            fleet, self.fleet = self.fleet, None
            await fleet.stop()

    async def _token_keys(self) -> TokenKeys:
        while True:
            try:
                return await load_keys(self.client, self._settings.namespace)
            except ClusterError as error:
                log.warning("the key of the admin tokens: %s", error)
                await asyncio.sleep(KEY_RETRY_SECONDS)

    def _spawn(self, work: Coroutine[Any, Any, None], *, ends: bool = False) -> None:
        """Run work in the background. Unless it ``ends`` by itself, the process stops when it does."""
        task = asyncio.create_task(work)
        task.add_done_callback(_stop_after_failure if ends else _stop_process)
        self._stack.push_async_callback(_end, task)


def _is_older(metadata: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Return whether an object is older than the known one of the same uid, by their resource versions."""
    versions = metadata.get("resourceVersion", ""), known.get("resourceVersion", "")
    return versions[0] != versions[1] and is_shown(*versions)


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
