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

from specdecode_operator import manifests, metrics
from specdecode_operator.controller.admin_tokens import AdminTokens, load_keys
from specdecode_operator.controller.caches import Caches
from specdecode_operator.controller.planner import Planner
from specdecode_operator.controller.reconciler import Parts, Reconciler
from specdecode_operator.controller.resource import deployment_of, identity_of
from specdecode_operator.controller.workqueue import WorkQueue
from specdecode_operator.errors import ClusterError, SpecError
from specdecode_operator.kube.apply import ChildApplier
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.leader_election import LeaderElector
from specdecode_operator.settings import Settings
from specdecode_operator.state.deployment_state import DeploymentState, StateTable
from specdecode_operator.state.packed import Packed
from specdecode_operator.state.store import StateStore
from specdecode_operator.telemetry.scrape_round import WorkerAccess
from specdecode_operator.telemetry.scraper import RoundTimes, Scraper
from specdecode_operator.telemetry.worker_client import WorkerClient
from specdecode_operator.telemetry.worker_poll import Target
from specdecode_operator.types import Defaults, Key

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
        self._caches = Caches(client, settings.watch_namespaces, self._child_changed)
        self._spawn(self._caches.run())
        for kind in self._caches.informers:
            metrics.WATCH_CONTACT_AGE.labels(kind).set_function(partial(self._caches.contact_age, kind))
        if settings.leader_election:
            identity = f"{settings.identity}_{secrets.token_hex(4)}"
            self._elector = LeaderElector(
                client, namespace=settings.namespace, name=settings.lease_name, identity=identity
            )
            self._spawn(self._elector.run())
            self._stack.push_async_callback(self._elector.release)
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
            finally:
                metrics.LEADER.set(0)
                metrics.forget_all()
                self._loops = None
                for key in self._table:
                    self._table.update(key, session=None, decision=None, decided=(), failure=None, published=None)
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

    async def _token_keys(self) -> Any:
        while True:
            try:
                return await load_keys(self._client, self._settings.namespace)
            except ClusterError as error:
                log.warning("the key of the admin tokens: %s", error)
                await asyncio.sleep(KEY_RETRY_SECONDS)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(_stop_process)
        self._stack.push_async_callback(_end, task)


class Loops:
    """The three loops of a leader (telemetry, planner, reconciler), and the queues between them."""

    def __init__(
        self,
        settings: Settings,
        client: KubeClient,
        workers: WorkerClient,
        caches: Caches,
        table: StateTable,
        keys: Any,
    ) -> None:
        defaults = Defaults(
            worker_image=settings.worker_image, worker_image_pull_policy=settings.worker_image_pull_policy
        )
        self._table, self._caches = table, caches
        self._tokens = AdminTokens(client, keys)
        self._applier = ChildApplier(client, caches.record)
        self._store = StateStore(client, self._applier)
        self._scraper = Scraper(
            table,
            workers,
            targets=self._targets,
            access=self._access,
            notify=lambda key: self.planning.add(key),
            poll_seconds=settings.poll_seconds,
            guard=client.guard,
            on_unauthorized=self._unauthorized,
            on_round=self._record_round,
        )
        planner = Planner(
            table, caches, defaults, decided=lambda key, changed: self.reconciling.add(key, changed=changed)
        )
        reconciler = Reconciler(
            Parts(
                client=client,
                caches=caches,
                table=table,
                applier=self._applier,
                store=self._store,
                tokens=self._tokens,
                plan=lambda key: self.planning.add(key, changed=True),
                published=self._scraper.nudge,
            )
        )
        self.planning = WorkQueue(planner.handle, concurrency=1)
        self.reconciling = WorkQueue(reconciler.handle, concurrency=settings.concurrency)
        metrics.QUEUE_DEPTH.set_function(self.reconciling.depth)

    async def run(self) -> None:
        """Run until cancelled, or until one loop ends with an error."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._scraper.run())
            group.create_task(self.planning.run())
            group.create_task(self.reconciling.run())

    def resource_changed(self, key: Key) -> None:
        """Queue a deployment that a user changed. It goes before other events."""
        self.planning.add(key, changed=True)

    def child_changed(self, key: Key) -> None:
        """Queue a deployment of which a child or a pod changed."""
        self.planning.add(key)

    def forget(self, key: Key, uid: str) -> None:
        """Drop all records of a deleted deployment."""
        self._store.forget(uid)
        self._tokens.forget(uid)
        metrics.forget(*key)
        namespace, name = key
        for child in manifests.child_names(name):
            self._applier.forget(namespace, child)

    def _record_round(self, key: Key, times: RoundTimes) -> None:
        counters = self._scraper.counters
        metrics.record_round(times.duration, counters.reports_failed, counters.pushes_failed)

    def _unauthorized(self, key: Key) -> None:
        """Have the Secret of the tokens checked, because a worker accepts none of them."""
        self._tokens.suspect(self._uid(key))
        self.reconciling.add(key)

    def _uid(self, key: Key) -> str:
        state = self._table.get(key)
        return state.resource.value["metadata"]["uid"] if state else ""

    def _decided(self, key: Key, changed: bool) -> None:
        self.reconciling.add(key, changed=changed)

    def _targets(self, key: Key) -> tuple[Target, ...]:
        return tuple(
            Target(
                uid=worker.uid,
                name=worker.name,
                address=worker.address,
                ready=worker.ready,
                leaving=worker.leaving,
            )
            for worker in self._caches.workers(key)
        )

    def _access(self, state: DeploymentState) -> WorkerAccess:
        resource = state.resource.value
        try:
            tls = deployment_of(resource).spec.tls is not None
        except SpecError:
            tls = False
        return WorkerAccess(tokens=self._tokens.tokens(resource["metadata"]["uid"]), tls=tls)


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


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
