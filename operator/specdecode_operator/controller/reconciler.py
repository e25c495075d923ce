"""The reconciler loop: makes the children equal to the decision and writes status. Level-triggered.

It reads informer caches. It asks the API server only for the stored state of a new deployment, for Events of pods that
do not start, and for each deployment once in five minutes as a check. It sends no requests to workers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specdecode_operator import manifests, metrics
from specdecode_operator.api.v1alpha1 import Status
from specdecode_operator.controller.admin_tokens import AdminTokens
from specdecode_operator.controller.caches import Caches
from specdecode_operator.controller.event_recorder import record_events
from specdecode_operator.controller.events import event_notices
from specdecode_operator.controller.mount_problems import add_mount_problems
from specdecode_operator.controller.observation import observe
from specdecode_operator.controller.resource import deployment_of, identity_of, status_of_resource
from specdecode_operator.controller.state_loading import load_session
from specdecode_operator.controller.status import failed_status, status_of
from specdecode_operator.errors import ClusterError, EvictionBlocked, Refused
from specdecode_operator.kube.apply import ChildApplier
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import DEPLOYMENTS, NETWORK_POLICIES
from specdecode_operator.state.deployment_state import DeploymentState, Failure, Pending, Published, StateTable
from specdecode_operator.state.draft_store import DraftStore
from specdecode_operator.state.packed import Packed
from specdecode_operator.state.session import PackedSession
from specdecode_operator.state.store import StateStore
from specdecode_operator.training_jobs.job_writer import JobWriter
from specdecode_operator.types import ChildProblem, Decision, Deployment, Key, Observation, Outcome

VERIFY_SECONDS = 300.0
"""Time between two comparisons of a deployment with the API server, which detect lost watch events."""
PROBLEM_SECONDS = 2.0
"""Time between two attempts while a child has a problem. The applier has a longer back-off for each child."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Parts:
    """Clients, caches and stores that the reconciler uses."""

    client: KubeClient
    caches: Caches
    table: StateTable
    applier: ChildApplier
    store: StateStore
    drafts: DraftStore
    tokens: AdminTokens
    jobs: JobWriter
    plan: Callable[[Key], None]
    """Function that requests a decision of the planner."""
    published: Callable[[Key], None]
    """Function that makes the telemetry loop push a published plan."""
    unconfirmed: Callable[[Key], None]
    """Function that checks the children a little later, when the informers should show what was applied."""
    gone: Callable[[Key], None]
    """Function that drops all records of a deleted deployment."""
    clock: Callable[[], float] = time.time


class Reconciler:
    """Handler of the reconcile queue."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._verified: dict[Key, float] = {}
        """Time of the last comparison with the API server."""

    async def handle(self, key: Key) -> float | None:
        """Reconcile one deployment.

        Returns:
            Seconds until the next reconcile if no event comes before. None if the deployment was deleted.

        Raises:
            ClusterError: A request failed. The queue retries this deployment with back-off.
        """
        with metrics.RECONCILE_SECONDS.time():
            try:
                return await self._reconcile(key)
            except Exception:
                metrics.RECONCILES.labels("error").inc()
                raise

    async def _reconcile(self, key: Key) -> float | None:
        state = await self._verify(key)
        if state is None:
            return None
        if state.session is None:
            uid = state.resource.value["metadata"]["uid"]
            session = await load_session(self._parts.store, self._parts.drafts, self._parts.client, key, uid)
            self._parts.table.update(key, session=PackedSession.of(session))
            self._parts.plan(key)
            return VERIFY_SECONDS
        resource = state.resource.value
        if state.failure is not None and state.failure.generation == state.generation:
            await self._write_failure(key, state, state.failure)
            return VERIFY_SECONDS
        if state.decision is None or state.decided != identity_of(resource["metadata"]):
            self._parts.plan(key)
            return VERIFY_SECONDS
        decision = state.decision.value
        outcome = await self._carry_out(key, state, resource, decision)
        metrics.RECONCILES.labels("success").inc()
        if not self._parts.applier.is_confirmed(decision.children):
            self._parts.unconfirmed(key)
        retry = self._parts.applier.retry_seconds(decision.children)
        waits = [VERIFY_SECONDS, *([PROBLEM_SECONDS] if outcome.problems else []), *([retry] if retry else [])]
        return min(waits)

    async def _verify(self, key: Key) -> DeploymentState | None:
        """Return the state, or None if the deployment was deleted. The resource is read again every VERIFY_SECONDS."""
        parts, state = self._parts, self._parts.table.get(key)
        if state is None:
            self._verified.pop(key, None)
            return None
        if parts.clock() - self._verified.setdefault(key, parts.clock()) < VERIFY_SECONDS:
            return state
        resource = await parts.client.get(DEPLOYMENTS, *key)
        self._verified[key] = parts.clock()
        if resource is None or "deletionTimestamp" in resource["metadata"]:
            parts.gone(key)
            return None
        generation = resource["metadata"]["generation"]
        return parts.table.update(key, resource=Packed.of(resource), generation=generation)

    async def _carry_out(
        self, key: Key, state: DeploymentState, resource: Mapping[str, Any], decision: Decision
    ) -> Outcome:
        parts, now = self._parts, self._parts.clock()
        assert state.session is not None, "a decision needs the loaded state"
        deployment = deployment_of(resource)
        observed = observe(key, parts.caches, state.readings, state.session.session)
        pending = state.pending
        outcome = await self._apply(deployment, observed, decision, pending, now)
        observed = await add_mount_problems(parts.client, deployment.namespace, observed, now)
        status = status_of(deployment, observed, decision, outcome, now=now)
        metrics.record(deployment, observed, decision, status)
        await self._write_status(key, resource, status)
        if not deployment.spec.paused:
            new_events = event_notices(deployment.status, status, pending.changes)
            await record_events(parts.client, key, deployment.uid, new_events, now)
        known = parts.table.get(key)
        if known is not None and not deployment.spec.paused:
            parts.table.update(key, pending=known.pending.after(pending, is_saved=outcome.is_saved))
        return outcome

    # --- children ---------------------------------------------------------------------------------------------------

    async def _apply(
        self, deployment: Deployment, observed: Observation, decision: Decision, pending: Pending, now: float
    ) -> Outcome:
        """Save the state of the decision, apply the children in order, publish the plans, and evict pods."""
        if deployment.spec.paused:
            return Outcome()
        session = observed.session
        unsaved = await self._parts.drafts.save(deployment, session.drafts) or await self._parts.store.save(
            deployment, session.learned, urgent=pending.urgent, learnt=pending.learnt, now=now
        )
        problems = [problem for problem in (unsaved, await self._ensure_tokens(deployment, observed)) if problem]
        # A pod that starts reads the assignment of its draft from the plan's ConfigMap, so this is written first.
        is_assignable = unsaved is None or not session.drafts.is_used
        for manifest in decision.children if is_assignable else decision.children[1:]:
            problem = await self._parts.applier.apply(manifest, deployment.uid)
            if problem is not None:
                problems.append(problem)
        job_problem = ""
        if unsaved is None:  # Neither a plan nor a Job may exist that a restart of the operator would not know of.
            self._publish(deployment, decision)
            job_problem = await self._parts.jobs.carry_out(deployment.key, decision.job, decision.ended_jobs)
        await self._delete_policy(deployment, decision)
        await self._evict(deployment, observed, decision)
        return Outcome(problems=tuple(problems), is_saved=unsaved is None, job_problem=job_problem)

    async def _ensure_tokens(self, deployment: Deployment, observed: Observation) -> ChildProblem | None:
        workers = [worker for worker in observed.workers if not worker.leaving]
        suspicious = any(not worker.ready for worker in workers)
        try:
            await self._parts.tokens.ensure(deployment, suspicious=suspicious, mounted=bool(workers) and not suspicious)
        except ClusterError as error:
            return _problem("Secret", manifests.tokens_name(deployment.name), error)
        return None

    def _publish(self, deployment: Deployment, decision: Decision) -> None:
        """Hand the plans to the telemetry loop, which pushes them."""
        known = self._parts.table.get(deployment.key)
        before = known.published if known else None
        version, own = decision.plan.version, decision.own_plans
        # Plans of one version are equal, and so are the plans of excluded workers, which are made of it.
        wanted = deployment.uid, version, own.keys(), decision.excluded
        if before and (before.uid, before.version, before.own.keys(), before.excluded) == wanted:
            return
        published = Published(
            uid=deployment.uid,
            version=version,
            plan=Packed.of(decision.plan),
            own={address: Packed.of(plan) for address, plan in own.items()},
            excluded=decision.excluded,
        )
        self._parts.table.update(deployment.key, published=published)
        # After a start, the next round of reports pushes what is needed. Rounds of all deployments at once would delay
        # the first reconciles.
        if before is not None:
            self._parts.published(deployment.key)

    async def _delete_policy(self, deployment: Deployment, decision: Decision) -> None:
        """Delete the NetworkPolicy once none is wanted: it would go on to restrict the pods."""
        child = NETWORK_POLICIES.kind, deployment.namespace, manifests.policy_name(deployment.name)
        record = self._parts.caches.record(child)
        if record is None or record.controller_uid != deployment.uid or record.deleting:
            return
        if any(manifest["kind"] == NETWORK_POLICIES.kind for manifest in decision.children):
            return
        try:
            await self._parts.client.delete(NETWORK_POLICIES, *child[1:], uid=record.uid)
        except ClusterError as error:
            log.warning("%s/%s: %s", *deployment.key, error)

    async def _evict(self, deployment: Deployment, observed: Observation, decision: Decision) -> None:
        """Evict workers to be replaced. Failures are logged; a later run repeats them."""
        try:
            for worker in observed.workers:
                if worker.name in decision.recycle and not worker.leaving:
                    log.warning("%s/%s: evicting pod %s: its acceptance collapsed", *deployment.key, worker.name)
                    await self._parts.client.evict(deployment.namespace, worker.name, worker.uid)
        except EvictionBlocked as error:
            log.info("%s/%s: %s", *deployment.key, error)
        except ClusterError as error:
            log.warning("%s/%s: %s", *deployment.key, error)

    # --- status -----------------------------------------------------------------------------------------------------

    async def _write_failure(self, key: Key, state: DeploymentState, failure: Failure) -> None:
        assert state.session is not None, "a failed decision needs the loaded state"
        now, resource = self._parts.clock(), state.resource.value
        before = status_of_resource(resource)
        observed = observe(key, self._parts.caches, state.readings, state.session.session)
        status = failed_status(before, failure.generation, failure.reason, failure.message, now=now, observed=observed)
        metrics.record_failure(key, status)
        await self._write_status(key, resource, status)
        await record_events(
            self._parts.client, key, resource["metadata"]["uid"], event_notices(before, status, ()), now
        )
        metrics.RECONCILES.labels("refused").inc()

    async def _write_status(self, key: Key, resource: Mapping[str, Any], status: Status) -> None:
        """Write the status if it differs, and store the result, so that later reconciles compare with it."""
        dumped = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        written = self._parts.client.status_fields.declared(dumped)
        if written == resource.get("status"):
            return
        after = await self._parts.client.apply_status(*key, written)
        state = self._parts.table.get(key)
        if state is not None and after["metadata"]["generation"] >= state.generation:
            self._parts.table.update(key, resource=Packed.of(after), generation=after["metadata"]["generation"])


def _problem(kind: str, name: str, error: ClusterError) -> ChildProblem:
    return ChildProblem(kind, name, "Refused" if isinstance(error, Refused) else "Unavailable", str(error))
