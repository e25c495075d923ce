"""The loop of one deployment: poll -> decide -> save -> apply -> status -> push.

Every deployment has a task of its own, so that one whose workers hang, or whose children are refused, delays only
itself. Two limits are shared: open calls to workers, and deployments that talk to the API server at the same time.

A step decides and carries the decision out from one view of the resource, the caches and the last reports. It follows
a round with new reports, a change by a user, of a pod or of a child, or a pause after which something is to be tried
again. Reports are read beside the steps, so that a change by a user never waits for a worker.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from specdecode_operator import manifests, metrics
from specdecode_operator.api.v1alpha1 import GROUP, KIND, VERSION, Condition, ConditionType, Status
from specdecode_operator.api.v1alpha1 import Decision as DecisionRecord
from specdecode_operator.controller.admin_tokens import AdminTokens
from specdecode_operator.controller.children import (
    Caches,
    JobWriter,
    add_mount_problems,
    deployment_of,
    status_of_resource,
    workload_of,
)
from specdecode_operator.controller.status import failed_status, named_pods, status_of
from specdecode_operator.decision.decide import decide, template_of
from specdecode_operator.errors import ClusterError, EvictionBlocked, Refused, SpecError
from specdecode_operator.kube.apply import CACHE_LAG_SECONDS, ChildApplier
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import DAEMON_SETS, DEPLOYMENTS, EVENTS, NETWORK_POLICIES, WORKLOADS
from specdecode_operator.state.learned import Session
from specdecode_operator.state.store import DraftWrite, StateStore, draft_writes, record_of, surplus, with_writes
from specdecode_operator.telemetry.polling import Poller, WorkerAccess, WorkerCalls
from specdecode_operator.times import back_off, iso
from specdecode_operator.types import ChildProblem, Decision, Defaults, Deployment, Key, Observation, Outcome
from specdecode_worker.contract import Plan

log = logging.getLogger(__name__)

VERIFY_SECONDS = 300.0
"""Time between two readings of the resource from the API server, which detect lost watch events."""
PROBLEM_SECONDS = 2.0
"""Time between two attempts while a child has a problem. The applier has a longer back-off for each child."""
REST_ROUNDS = 3
"""Rounds of reports without news after which a step is made all the same: what only time changes can wait so long."""
GAP_SECONDS = 0.2
"""Least time from the end of a step to the next one, however many events come."""
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 1.0, 60.0
"""Longest pauses after a failed step; they double from failure to failure. A round of reports that wakes the loop ends
one that is longer than FIRST_RETRY_SECONDS, and a change by a user any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Clients, caches and limits that the loops of all deployments share."""

    client: KubeClient
    calls: WorkerCalls
    caches: Caches
    resources: Mapping[Key, Mapping[str, Any]]
    """SpecDecodeDeployments as the API server has them."""
    update: Callable[[Mapping[str, Any]], None]
    """Takes a resource that the API server returned."""
    gone: Callable[[Key], None]
    """Ends the loop of a deployment that was deleted without a watch event."""
    applier: ChildApplier
    store: StateStore
    tokens: AdminTokens
    jobs: JobWriter
    defaults: Defaults
    writers: asyncio.Semaphore
    """Places of the deployments that talk to the API server at the same time."""
    clock: Callable[[], float] = time.time


_POLLED = (manifests.Role.worker, manifests.Role.prefill)
"""Roles of the pods that report and get plans."""


class DeploymentLoop:
    """State and steps of one deployment."""

    def __init__(self, key: Key, shared: Shared) -> None:
        self.key = key
        self._shared = shared
        self._poller = Poller(key, shared.calls)
        self._session: Session | None = None
        """State that was learned. None until it was loaded."""
        self._plans: dict[str, Plan] = {}
        """Saved plans to push, by address."""
        self._pushed: tuple[int, dict[str, Plan]] = 0, {}
        """Round of reports before the last push, and what was pushed."""
        self._is_unsaved = False
        """The session holds a decision that could not be saved."""
        self._unwritten: list[DraftWrite] = []
        """Drafts as that decision has them."""
        self._is_urgent = False
        """The session holds a decision that was made during a pause, or could not be saved: the next step saves it."""
        self._verified_at = shared.clock()
        self._woken = asyncio.Event()
        self._changed = asyncio.Event()

    def wake(self, *, changed: bool = False) -> None:
        """Have a step made soon; at once after a change by a user."""
        self._woken.set()
        if changed:
            self._changed.set()

    async def run(self) -> None:
        """Run until cancelled. A step that fails is repeated, with pauses."""
        reading = asyncio.create_task(self._read_reports(), name=f"reports of {'/'.join(self.key)}")
        failures = 0
        try:
            while True:
                self._woken.clear()
                self._changed.clear()
                try:
                    pause, failures = await self._step(), 0
                except Exception as error:
                    failures += 1
                    pause = back_off(failures, first=FIRST_RETRY_SECONDS, most=LAST_RETRY_SECONDS)
                    metrics.RECONCILES.labels("error").inc()
                    log.warning(
                        "%s/%s: again within %.0f s after %s: %s", *self.key, pause, type(error).__name__, error
                    )
                    await _wait(self._changed, FIRST_RETRY_SECONDS)
                    pause -= FIRST_RETRY_SECONDS
                await _wait(self._changed, GAP_SECONDS)
                await _wait(self._woken, pause)
        finally:
            reading.cancel()
            self._poller.forget()
            await asyncio.gather(reading, return_exceptions=True)

    # --- reports ----------------------------------------------------------------------------------------------------

    async def _read_reports(self) -> None:
        """Read the reports of all workers once a period, each deployment at a time of its own."""
        calls, quiet = self._shared.calls, 0
        due = next_turn(self.key, calls.period, calls.clock())
        while True:
            await asyncio.sleep(due - calls.clock())
            with metrics.SCRAPE_SECONDS.time():
                try:
                    pods = (pod for role in _POLLED for pod in self._shared.caches.workers(self.key, role))
                    await self._poller.read(pods, self._access())
                except Exception:
                    log.exception("%s/%s: a round of reports failed", *self.key)
            metrics.SCRAPE_ROUNDS.inc()
            if self._poller.is_unauthorized:
                self._shared.tokens.suspect(self._resource["metadata"]["uid"])
            quiet = 0 if self._poller.has_news else quiet + 1
            if quiet % REST_ROUNDS == 0:
                self.wake()
            due = max(due + calls.period, next_turn(self.key, calls.period, calls.clock() - calls.period / 2))

    def _access(self) -> WorkerAccess:
        return WorkerAccess(tokens=self._shared.tokens.tokens(self.key), tls="tlsSecretRef" in self._resource["spec"])

    @property
    def _resource(self) -> Mapping[str, Any]:
        return self._shared.resources[self.key]

    def _observe(self, session: Session) -> Observation:
        """Return workload, workers and session as they are now; from caches only."""
        caches = self._shared.caches
        drafts = with_writes(caches.drafts(self.key), self._unwritten)
        if not self._is_unsaved:
            session = replace(session, drafts=record_of(drafts, session.drafts))
        return Observation(
            workload=caches.workload(self.key),
            workers=tuple(map(self._poller.reported, caches.workers(self.key))),
            session=session,
            round=self._poller.round,
            routers=caches.workload(self.key, manifests.Role.router),
            prefill_workload=caches.workload(self.key, manifests.Role.prefill),
            prefill=tuple(map(self._poller.reported, caches.workers(self.key, manifests.Role.prefill))),
            demand=caches.demand(self.key),
            drafts=drafts,
            jobs=caches.jobs(self.key),
            jobs_problem=caches.jobs_problem(self.key),
        )

    # --- one step ---------------------------------------------------------------------------------------------------

    async def _step(self) -> float:
        """Decide and carry out. Return the seconds after which to do so again although nothing wakes the loop.

        Raises:
            ClusterError: A request failed.
        """
        with metrics.QUEUE_DEPTH.track_inprogress():
            await self._shared.writers.acquire()
        try:
            with metrics.RECONCILE_SECONDS.time():
                await self._verify()
                if self._session is None:
                    self._session = await self._load()
                pause = await self._decide_and_carry_out(self._session)
        finally:
            self._shared.writers.release()
        await self._push()
        return pause

    async def _verify(self) -> None:
        """Read the resource from the API server every VERIFY_SECONDS."""
        shared, now = self._shared, self._shared.clock()
        if now - self._verified_at < VERIFY_SECONDS:
            return
        resource = await shared.client.get(DEPLOYMENTS, *self.key)
        self._verified_at = now
        if resource is None or "deletionTimestamp" in resource["metadata"]:
            shared.gone(self.key)
            raise asyncio.CancelledError
        shared.update(resource)

    async def _load(self) -> Session:
        """Return the session with the stored state.

        If the state was lost, the pod template is read from the running workload, so that the loss replaces no pods.
        The API server is asked, because the caches have no templates.
        """
        session = await self._shared.store.load(self.key, self._resource["metadata"]["uid"])
        if session.stored:
            return session
        workload = await self._shared.client.get(WORKLOADS, self.key[0], manifests.worker_name(self.key[1]))
        template = template_of(workload_of(workload)) if workload else None
        return replace(session, learned=session.learned.model_copy(update={"template": template}))

    async def _decide_and_carry_out(self, session: Session) -> float:
        resource, now = self._resource, self._shared.clock()
        observed = self._observe(session)
        try:
            deployment = deployment_of(resource)
            decision, after = decide(deployment, observed, self._shared.defaults, now=now)
        except SpecError as error:
            return await self._show_failure(resource, observed, "SpecRefused", str(error))
        except Exception as error:
            log.exception("%s/%s: the decision failed", *self.key)
            message = f"{type(error).__name__}: {error}; please report this"
            return await self._show_failure(resource, observed, "InternalError", message)
        self._session = replace(after, stored=True)
        observed = replace(observed, session=self._session)
        if deployment.spec.paused:
            self._plans, outcome = {}, Outcome()
            self._is_urgent |= decision.urgent
        else:
            outcome = await self._apply(deployment, observed, decision, now)
        await self._show(resource, deployment, observed, decision, outcome)
        metrics.RECONCILES.labels("success").inc()
        applier = self._shared.applier
        retry = applier.retry_seconds(decision.children)
        pauses = [VERIFY_SECONDS, *([PROBLEM_SECONDS] if outcome.problems else []), *([retry] if retry else [])]
        return min([*pauses, *([] if applier.is_confirmed(decision.children) else [CACHE_LAG_SECONDS])])

    # --- children ---------------------------------------------------------------------------------------------------

    async def _apply(self, deployment: Deployment, observed: Observation, decision: Decision, now: float) -> Outcome:
        """Save the state of the decision, apply the children in order, and evict pods."""
        shared, session = self._shared, observed.session
        urgent = decision.urgent or self._is_urgent
        drafts = shared.caches.drafts(self.key)
        writes = draft_writes(deployment, session.drafts, drafts, now=now)
        unsaved = await shared.store.save_drafts(deployment, writes, surplus(drafts))
        if unsaved is None:
            unsaved = await shared.store.save(deployment, session, urgent=urgent, learnt=decision.learnt, now=now)
        self._is_unsaved = self._is_urgent = unsaved is not None
        self._unwritten = [] if unsaved is None else writes
        problems = [problem for problem in (unsaved, await self._ensure_tokens(deployment, observed)) if problem]
        # A pod that starts reads the assignment of its draft from the plan's ConfigMap, so this is written first.
        is_assignable = unsaved is None or not session.drafts.is_used
        for manifest in decision.children if is_assignable else decision.children[1:]:
            problem = await shared.applier.apply(manifest, deployment.uid)
            if problem is not None:
                problems.append(problem)
        job_problem, self._plans = "", {}
        if unsaved is None:  # Neither a plan nor a Job may exist that a restart of the operator would not know of.
            self._plans = {**dict.fromkeys(decision.pushes, decision.plan), **decision.health.own_plans}
            job_problem = await shared.jobs.carry_out(deployment.key, decision.job, decision.ended_jobs)
        await self._delete_unwanted(deployment, decision)
        await self._evict(deployment, observed, decision)
        return Outcome(problems=tuple(problems), job_problem=job_problem)

    async def _ensure_tokens(self, deployment: Deployment, observed: Observation) -> ChildProblem | None:
        workers = [worker for worker in observed.workers if not worker.leaving]
        suspicious = any(not worker.ready for worker in workers)
        try:
            await self._shared.tokens.ensure(
                deployment, suspicious=suspicious, mounted=bool(workers) and not suspicious
            )
        except ClusterError as error:
            name = manifests.tokens_name(deployment.name)
            return ChildProblem("Secret", name, "Refused" if isinstance(error, Refused) else "Unavailable", str(error))
        return None

    async def _delete_unwanted(self, deployment: Deployment, decision: Decision) -> None:
        """Delete the NetworkPolicy and the DaemonSet once none is wanted: they would go on to act."""
        wanted = {manifest["kind"] for manifest in decision.children}
        policy, prefetch = deployment.name, manifests.prefetch_name(deployment.name)
        for kind, name in ((NETWORK_POLICIES, policy), (DAEMON_SETS, prefetch)):
            record = self._shared.caches.record((kind.kind, deployment.namespace, name))
            if record is None or record.controller_uid != deployment.uid or record.deleting or kind.kind in wanted:
                continue
            try:
                await self._shared.client.delete(kind, deployment.namespace, name, uid=record.uid)
            except ClusterError as error:
                log.warning("%s/%s: %s", *deployment.key, error)

    async def _evict(self, deployment: Deployment, observed: Observation, decision: Decision) -> None:
        """Evict workers to be replaced. Failures are logged; a later step repeats them."""
        try:
            for worker in observed.workers:
                if worker.name in decision.health.recycle and not worker.leaving:
                    log.warning("%s/%s: evicting pod %s: its acceptance collapsed", *deployment.key, worker.name)
                    await self._shared.client.evict(deployment.namespace, worker.name, worker.uid)
        except EvictionBlocked as error:
            log.info("%s/%s: %s", *deployment.key, error)
        except ClusterError as error:
            log.warning("%s/%s: %s", *deployment.key, error)

    async def _push(self) -> None:
        """Push the plans to workers that run others, once after each round of reports and for each new plan."""
        pushed = self._poller.round, self._plans
        if self._plans and self._pushed != pushed:
            self._pushed = pushed
            limit = self._shared.client.guard()
            await self._shared.calls.push(self.key, self._plans, self._access(), limit=limit)

    # --- status -----------------------------------------------------------------------------------------------------

    async def _show(
        self,
        resource: Mapping[str, Any],
        deployment: Deployment,
        observed: Observation,
        decision: Decision,
        outcome: Outcome,
    ) -> None:
        """Write status, Events and metrics."""
        client, now = self._shared.client, self._shared.clock()
        observed = await add_mount_problems(client, deployment.namespace, observed, now)
        status = status_of(deployment, observed, decision, outcome, now=now)
        metrics.record(deployment, observed, decision, status)
        await self._write_status(resource, status)
        if not deployment.spec.paused:
            notices = event_notices(deployment.status, status, decision.changes)
            await record_events(client, self.key, deployment.uid, notices, now)

    async def _show_failure(
        self, resource: Mapping[str, Any], observed: Observation, reason: str, message: str
    ) -> float:
        """Show why there is no decision. The children stay as they are."""
        metadata, before, now = resource["metadata"], status_of_resource(resource), self._shared.clock()
        status = failed_status(before, metadata["generation"], reason, message, now=now, observed=observed)
        metrics.record_failure(self.key, status)
        await self._write_status(resource, status)
        await record_events(self._shared.client, self.key, metadata["uid"], event_notices(before, status, ()), now)
        metrics.RECONCILES.labels("refused").inc()
        return VERIFY_SECONDS

    async def _write_status(self, resource: Mapping[str, Any], status: Status) -> None:
        """Write the status if it differs, and take the result, so that later steps compare with it."""
        client = self._shared.client
        written = client.status_fields.declared(status.model_dump(mode="json", by_alias=True, exclude_none=True))
        if written != resource.get("status"):
            self._shared.update(await client.apply_status(*self.key, written))


def next_turn(key: Key, period: float, now: float) -> float:
    """Return the next time at which a deployment is polled: its own place within each period.

    The places are spread by a hash, because all deployments become known at once after a restart.
    """
    place = period * zlib.crc32("/".join(key).encode()) / 2**32
    return place + period * math.ceil((now - place) / period)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, at most for this time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


# Events of a deployment: one for each decision, and one for each condition that became bad or recovered. Pure.
#
# A lost Event does no harm, because status has the same history and conditions.

BAD = {
    ConditionType.stalled: "True",
    ConditionType.available: "False",
    ConditionType.draft_compatible: "False",
    ConditionType.scaling_limited: "True",
    ConditionType.reports_fresh: "False",
    ConditionType.pinned: "False",
    ConditionType.workers_healthy: "False",
}
"""Conditions that cause Events, each with the status that is bad. Kubernetes itself writes Events about pods."""
ON_LOSS_ONLY = (ConditionType.available,)
"""Conditions that are bad for every new deployment. They cause an Event only when a good status is lost."""
REPEATED_REASONS = ("ImageNotPulled", "WorkerFailing")
"""Reasons of retried actions, whose message changes with each retry."""
EXPECTED_REASONS = ("ScaledToZero",)
"""Reasons of a bad status that a user caused on purpose."""

_REASONS = {
    "Plan": "PlanChanged",
    "Replicas": "Scaled",
    "Steering": "SteeringChanged",
    "Draft": "DraftRollout",
    "Drift": "DraftDrift",
}


class EventNotice(NamedTuple):
    """Content of an Event."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def event_notices(before: Status, after: Status, changes: Iterable[DecisionRecord]) -> tuple[EventNotice, ...]:
    """Return the Events of one reconcile.

    Args:
        before: Status that the API server has. Events are written only for differences from it.
        after: Status that is written now.
        changes: Decisions made in this reconcile, oldest first.
    """
    return (*map(_decided, changes), *_transitions(before, after))


def _decided(change: DecisionRecord) -> EventNotice:
    message = f"{change.load}: {change.before} -> {change.after}: {change.reason}"
    return EventNotice("Normal", _REASONS[change.kind], message)


def _transitions(before: Status, after: Status) -> Iterator[EventNotice]:
    old_by_type = {condition.type: condition for condition in before.conditions}
    new_by_type = {condition.type: condition for condition in after.conditions}
    for kind, bad in BAD.items():
        old, new = old_by_type.get(kind), new_by_type.get(kind)
        if new is not None and new.status == bad:
            if _is_news(kind, old, new):
                yield EventNotice("Warning", new.reason, new.message)
        elif old is not None and old.status == bad:
            yield _recovery(kind, old, new)


def _is_news(kind: ConditionType, old: Condition | None, new: Condition) -> bool:
    """Return whether a bad condition needs an Event."""
    if new.reason in EXPECTED_REASONS:
        return False
    if kind in ON_LOSS_ONLY:
        return old is not None and old.status != new.status
    return not _is_same(old, new)


def _recovery(kind: ConditionType, old: Condition, new: Condition | None) -> EventNotice:
    if new is not None:
        return EventNotice("Normal", new.reason, new.message)
    return EventNotice("Normal", "Resolved", f"{kind} with reason {old.reason} is over")


def _is_same(old: Condition | None, new: Condition) -> bool:
    """Return whether two bad states of a condition report the same problem.

    Another message of the API server or another pod is a new problem. Other numbers or fewer pods are not.
    """
    if old is None or old.status != new.status or old.reason != new.reason:
        return False
    if old.message == new.message or new.type == ConditionType.scaling_limited:
        return True
    pods = named_pods(new.message)
    varies = new.type == ConditionType.workers_healthy or new.reason in REPEATED_REASONS
    return bool(pods) and varies and pods <= named_pods(old.message)


MAX_MESSAGE = 1024
"""Longest message of an Event, in characters."""


async def record_events(client: KubeClient, key: Key, uid: str, notices: Iterable[EventNotice], now: float) -> None:
    """Create one Event for each notice. An error of the API server is logged and not raised."""
    for index, notice in enumerate(notices):
        try:
            await client.create(EVENTS, _event(key, uid, f"{int(now * 1000):x}{index:x}", notice, now))
        except ClusterError as error:
            log.warning("%s/%s: no Event was written: %s", *key, error)


def _event(key: Key, uid: str, suffix: str, notice: EventNotice, now: float) -> dict[str, Any]:
    namespace, name = key
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{name}.{suffix}", "namespace": namespace},
        "involvedObject": {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "namespace": namespace,
            "name": name,
            "uid": uid,
        },
        "type": notice.type,
        "reason": notice.reason,
        "message": notice.message[:MAX_MESSAGE],
        "source": {"component": "specdecode-operator"},
        "firstTimestamp": iso(now),
        "lastTimestamp": iso(now),
        "count": 1,
    }
