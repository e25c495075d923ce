"""Observe -> decide -> apply -> status, for one deployment. The file to read first."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from specdecode_operator import manifests, metrics
from specdecode_operator.api.v1alpha1 import KIND, Status
from specdecode_operator.controller.events import EventNotice, event_notices
from specdecode_operator.controller.observation import deployment_of, find, observe, status_of_resource
from specdecode_operator.controller.status import failed_status, iso, status_of
from specdecode_operator.decision.decide import decide
from specdecode_operator.errors import ClusterError, Refused, SpecError, WorkerError
from specdecode_operator.kube.client import DEPLOYMENTS, EVENTS, PODS, KubeClient
from specdecode_operator.kube.pod_cache import PodCache
from specdecode_operator.state.session import Session
from specdecode_operator.state.store import StateStore
from specdecode_operator.telemetry.worker_client import WorkerClient
from specdecode_operator.types import ChildProblem, Decision, Defaults, Deployment, Key, Outcome
from specdecode_worker.contract import Plan

SPEC_ERROR_SECONDS = 300.0
"""A spec that cannot be carried out is looked at when it changes, and now and then in case the world did."""

log = logging.getLogger(__name__)


class Reconciler:
    """What every reconcile needs, and the way from a key to a written status."""

    def __init__(
        self,
        cluster: KubeClient,
        workers: WorkerClient,
        memories: StateStore,
        defaults: Defaults,
        *,
        poll_seconds: float,
        pods: PodCache | None = None,
    ) -> None:
        self.cluster = cluster
        self.workers = workers
        self.memories = memories
        self.defaults = defaults
        self.poll_seconds = poll_seconds
        self.pods = pods or PodCache()
        self._uids: dict[Key, str] = {}

    async def handle(self, key: Key) -> float | None:
        """Seconds until the next look; None when the deployment is gone. Raises ClusterError to be tried again."""
        with metrics.RECONCILE_SECONDS.time():
            try:
                return await self._look(key)
            except Exception:
                metrics.RECONCILES.labels("error").inc()
                raise

    async def _look(self, key: Key) -> float | None:
        resource = await find(self.cluster, *key)
        if resource is None:
            self._forget(key)
            return None
        if self._uids.get(key) != resource["metadata"]["uid"]:
            self._forget(key)
            self._uids[key] = resource["metadata"]["uid"]
        try:
            deployment = deployment_of(resource)
            status = await self.reconcile(deployment, now=time.time())
        except SpecError as error:
            before, generation = status_of_resource(resource), resource["metadata"]["generation"]
            status = failed_status(before, generation, "SpecRefused", str(error), now=time.time())
            metrics.record_failure(key, status)
            await self._write(key, resource, status)
            await self._tell(key, resource["metadata"]["uid"], event_notices(before, status, ()), time.time())
            metrics.RECONCILES.labels("refused").inc()
            return SPEC_ERROR_SECONDS
        await self._write(key, resource, status)
        metrics.RECONCILES.labels("success").inc()
        return self.poll_seconds

    async def reconcile(self, deployment: Deployment, *, now: float) -> Status:
        """The whole loop of one deployment. Raises SpecError, or ClusterError worth another try."""
        observed = await observe(deployment, self.cluster, self.workers, self.memories, self.pods)
        decision, memory = decide(deployment, observed, self.defaults, now=now)
        outcome = await self._apply(deployment, decision, memory, observed.token, now=now)
        status = status_of(deployment, observed, decision, outcome, now=now)
        metrics.record(deployment, observed, decision, status)
        if not deployment.paused:
            told = event_notices(deployment.status, status, decision.changes)
            await self._tell(deployment.key, deployment.uid, told, now)
        return status

    async def _apply(
        self, deployment: Deployment, decision: Decision, memory: Session, token: str, *, now: float
    ) -> Outcome:
        """The memory of a decision first, the plan before the pods that mount it, live workers last."""
        if deployment.paused:
            return Outcome()
        await self.memories.save(deployment, memory, urgent=decision.urgent, learnt=decision.learnt, now=now)
        problems = []
        for manifest in decision.children:
            try:
                await self.cluster.apply(manifest)
            except Refused as error:
                name = manifest["metadata"]["name"]
                problems.append(ChildProblem(manifest["kind"], name, "Refused", str(error)))
        plans = {**dict.fromkeys(decision.pushes, decision.plan), **decision.own_plans}
        await asyncio.gather(*(self._push(address, token, plan) for address, plan in plans.items()))
        await self._replace(deployment, decision)
        return Outcome(problems=tuple(problems))

    async def _push(self, address: str, token: str, plan: Plan) -> None:
        """Best effort: the next report tells whether it arrived, and it is pushed again if not."""
        try:
            await self.workers.push(address, token, plan)
        except WorkerError as error:
            log.info("plan %d was not taken: %s", plan.version, error)

    async def _replace(self, deployment: Deployment, decision: Decision) -> None:
        """Marks who goes first when workers go, and deletes those that shall be replaced. Best effort, as pushes."""
        try:
            for name, cost in decision.deletion_costs.items():
                change = {"metadata": {"annotations": {manifests.DELETION_COST_ANNOTATION: str(cost)}}}
                await self.cluster.patch(PODS, deployment.namespace, name, change)
            for name in decision.recycle:
                log.warning("%s/%s: pod %s is replaced: its acceptance collapsed", *deployment.key, name)
                await self.cluster.delete(PODS, deployment.namespace, name)
        except ClusterError as error:
            log.warning("%s/%s: %s", *deployment.key, error)

    async def _tell(self, key: Key, uid: str, found: Iterable[EventNotice], now: float) -> None:
        for index, notice in enumerate(found):
            try:
                await self.cluster.create(EVENTS, _event(key, uid, f"{int(now * 1000):x}{index:x}", notice, now))
            except ClusterError as error:
                log.warning("%s/%s: no event was written: %s", *key, error)

    async def _write(self, key: Key, resource: Mapping[str, Any], status: Status) -> None:
        written = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        if written != resource.get("status"):
            await self.cluster.apply_status(*key, written)

    def _forget(self, key: Key) -> None:
        uid = self._uids.pop(key, None)
        if uid is None:
            return
        self.memories.forget(uid)
        self.pods.changed(key)
        metrics.forget(*key)
        namespace, name = key
        for child in manifests.child_names(name):
            self.cluster.forget(namespace, child)


def _event(key: Key, uid: str, suffix: str, notice: EventNotice, now: float) -> dict[str, Any]:
    namespace, name = key
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{name}.{suffix}", "namespace": namespace},
        "involvedObject": {
            "apiVersion": DEPLOYMENTS.api_version,
            "kind": KIND,
            "namespace": namespace,
            "name": name,
            "uid": uid,
        },
        "type": notice.type,
        "reason": notice.reason,
        "message": notice.message[:1024],
        "source": {"component": "specdecode-operator"},
        "firstTimestamp": iso(now),
        "lastTimestamp": iso(now),
        "count": 1,
    }
