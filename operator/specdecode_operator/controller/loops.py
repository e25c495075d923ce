"""The three loops of a leader: telemetry, planner and reconciler, with the queues between them."""

from __future__ import annotations

import asyncio
from dataclasses import fields

from specdecode_operator import manifests, metrics
from specdecode_operator.controller.admin_tokens import AdminTokens, TokenKeys
from specdecode_operator.controller.caches import Caches
from specdecode_operator.controller.planner import Planner
from specdecode_operator.controller.reconciler import Parts, Reconciler
from specdecode_operator.controller.workqueue import WorkQueue
from specdecode_operator.kube.apply import CACHE_LAG_SECONDS, ChildApplier
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.settings import Settings
from specdecode_operator.state.deployment_state import DeploymentState, StateTable
from specdecode_operator.state.draft_store import DraftStore
from specdecode_operator.state.store import StateStore
from specdecode_operator.telemetry.scrape_round import WorkerAccess
from specdecode_operator.telemetry.scraper import RoundTimes, Scraper
from specdecode_operator.telemetry.worker_client import WorkerClient
from specdecode_operator.telemetry.worker_poll import Target
from specdecode_operator.training_jobs.job_writer import JobWriter
from specdecode_operator.types import Defaults, Key

CHECK_SECONDS = 0.3
"""Time from a watch event of a child to its check. A write is answered within some 10 ms; a repair waits for it."""


class Loops:
    """The three loops of a leader (telemetry, planner, reconciler), and the queues between them."""

    def __init__(
        self,
        settings: Settings,
        client: KubeClient,
        workers: WorkerClient,
        caches: Caches,
        table: StateTable,
        keys: TokenKeys,
    ) -> None:
        defaults = Defaults(**{one.name: getattr(settings, one.name) for one in fields(Defaults)})
        self._table, self._caches = table, caches
        self._unchecked: set[Key] = set()
        """Deployments of which a child changed less than CHECK_SECONDS ago."""
        self._tokens = AdminTokens(client, keys)
        self._applier = ChildApplier(client, caches.record)
        self._store = StateStore(client, self._applier)
        self._drafts = DraftStore(client, self._applier)
        self._jobs = JobWriter(client)
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
                drafts=self._drafts,
                tokens=self._tokens,
                jobs=self._jobs,
                plan=lambda key: self.planning.add(key, changed=True),
                published=self._scraper.nudge,
                unconfirmed=self._check_later,
                gone=self._gone,
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

    def workers_changed(self, key: Key) -> None:
        """Queue a deployment whose pods or workload changed."""
        self.planning.add(key)

    def child_changed(self, key: Key) -> None:
        """Queue a deployment of which another child changed, unless the change is the operator's own.

        No decision depends on these children. The check waits for the answer to the operator's write, because the
        watch event may come before it.
        """
        if key not in self._unchecked:
            self._unchecked.add(key)
            asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check_children, key)

    def _check_later(self, key: Key) -> None:
        """Check the children once the informers should show what was just applied, in case no event comes."""
        asyncio.get_running_loop().call_later(CACHE_LAG_SECONDS, self._check_children, key)

    def _check_children(self, key: Key) -> None:
        self._unchecked.discard(key)
        if self._table.get(key) is not None and not self._applier.is_settled(key, manifests.child_names(key[1])):
            self.reconciling.add(key)

    def forget(self, key: Key, uid: str) -> None:
        """Drop all records of a deleted deployment."""
        self._store.forget(uid)
        self._drafts.forget(uid)
        self._tokens.forget(uid)
        self._jobs.forget(key)
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

    def _gone(self, key: Key) -> None:
        """Drop a deployment that was deleted without a watch event."""
        uid = self._uid(key)
        self._table.remove(key)
        self.forget(key, uid)

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
        key = resource["metadata"]["namespace"], resource["metadata"]["name"]
        return WorkerAccess(tokens=self._tokens.tokens(key), tls="tlsSecretRef" in resource["spec"])
