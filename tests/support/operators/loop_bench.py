"""The loop of one deployment over an API server, caches and workers that are made up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from specdecode_operator.api.draft import SpecDecodeDraft
from specdecode_operator.controller.children import JobWriter
from specdecode_operator.controller.deployment_loop import DeploymentLoop, Shared
from specdecode_operator.errors import ClusterError, Unavailable
from specdecode_operator.kube.kinds import CONFIG_MAPS, DEPLOYMENTS, Kind
from specdecode_operator.manifests import Role
from specdecode_operator.state.store import StateStore
from specdecode_operator.telemetry.polling import Reading, WorkerAccess, WorkerPoll
from specdecode_operator.types import ChildProblem, Key, Worker
from specdecode_worker.contract import Plan, Report
from support.operators.fleet import DEFAULTS, SPEC, deep

KEY = ("ns", "demo")
POD = Worker(name="p", uid="p", address="10.0.0.1", ready=True)


class Cluster:
    """A cluster that lists what is written, and refuses the children in ``down``."""

    def __init__(self, **spec: Any) -> None:
        self.writes: list[str] = []
        self.down: set[str] = set()
        self.refusal: ClusterError = Unavailable("no answer")
        """Raised by updates of what is down."""
        self.stored: dict[str, Mapping[str, Any]] = {}
        """ConfigMaps by name."""
        metadata = {"namespace": KEY[0], "name": KEY[1], "uid": "u1", "generation": 1, "resourceVersion": "1"}
        self.resources: dict[Key, Any] = {KEY: {"metadata": metadata, "spec": deep(SPEC, spec)}}
        self.is_deleted = False
        self.error: ClusterError | None = None
        """Raised by each write of status."""
        self.status_fields = SimpleNamespace(declared=lambda status: status)

    def edit(self, **spec: Any) -> None:
        """Change the spec as a user does."""
        resource = self.resources[KEY]
        metadata = {**resource["metadata"], "generation": resource["metadata"]["generation"] + 1}
        self.resources[KEY] = {**resource, "metadata": metadata, "spec": deep(resource["spec"], spec)}

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.resources[KEY]["status"]
        return status

    def condition(self, kind: str) -> dict[str, Any]:
        return next(one for one in self.status["conditions"] if one["type"] == kind)

    # As ChildApplier.

    async def apply(self, manifest: Mapping[str, Any], owner_uid: str) -> ChildProblem | None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if name in self.down:
            return ChildProblem(kind, name, "Unavailable", "no answer")
        if kind == "ConfigMap":
            self.stored[name] = manifest
        self.writes.append(f"{kind}/{name}")
        return None

    def is_confirmed(self, manifests: object) -> bool:
        return True

    def retry_seconds(self, manifests: object) -> None:
        return None

    # As KubeClient.

    def guard(self) -> None:
        return None

    async def get(self, kind: Kind, namespace: str, name: str) -> Any:
        if kind == DEPLOYMENTS:
            return None if self.is_deleted else self.resources[KEY]
        return self.stored.get(name) if kind == CONFIG_MAPS else None

    async def create(self, kind: Kind, manifest: Mapping[str, Any]) -> Any:
        if kind.kind != "Event":
            self.writes.append(f"{kind.kind}/{manifest['metadata']['name']}")
        return manifest

    async def update(self, kind: Kind, manifest: Mapping[str, Any], *, subresource: str | None = None) -> Any:
        name = manifest["metadata"]["name"]
        if name in self.down:
            raise self.refusal
        self.writes.append("/".join(filter(None, (kind.kind, name, subresource))))
        return manifest

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None = None) -> None:
        self.writes.append(f"deleted {kind.kind}/{name} {uid}")

    async def apply_status(self, namespace: str, name: str, status: Mapping[str, Any]) -> Any:
        if self.error is not None:
            raise self.error
        self.writes.append("status")
        return {**self.resources[KEY], "status": status}

    # As AdminTokens.

    def tokens(self, key: Key) -> tuple[str, ...]:
        return ("secret",)

    async def ensure(self, deployment: object, *, suspicious: bool, mounted: bool) -> None: ...

    def suspect(self, uid: str) -> None: ...


class Calls:
    """Calls to one worker, which answers with ``report`` once ``answers`` is set."""

    def __init__(self, period: float = 3600.0) -> None:
        self.period = period
        self.client = SimpleNamespace(forget=lambda address: None)
        self.answers = asyncio.Event()
        self.answers.set()
        self.report: Report | None = None
        self.tag = ""
        """ETag of the report; without one each round brings news."""
        self.access: list[WorkerAccess] = []
        self.pushed: list[dict[str, Plan]] = []

    def clock(self) -> float:
        return asyncio.get_running_loop().time()

    async def read(self, key: Key, polls: Iterable[WorkerPoll], access: WorkerAccess) -> list[WorkerPoll]:
        self.access.append(access)
        await self.answers.wait()
        report = self.report
        return [
            poll if report is None else poll.answered(Reading(report, self.tag), started=self.clock()) for poll in polls
        ]

    async def push(self, key: Key, plans: dict[str, Plan], access: WorkerAccess, *, limit: float | None = None) -> None:
        self.pushed.append(plans)


class Bench:
    """A loop that does not run by itself, with its surroundings."""

    def __init__(
        self, cluster: Cluster | None = None, *, period: float = 3600.0, pods: tuple[Worker, ...] = ()
    ) -> None:
        self.cluster, self.calls, self.pods, self.now = cluster or Cluster(), Calls(period), pods, 1e6
        self.records: dict[Any, Any] = {}
        self.drafts: tuple[SpecDecodeDraft, ...] = ()
        self.gone: list[Key] = []
        caches = SimpleNamespace(
            workers=lambda key, role=Role.worker: self.pods if role is Role.worker else (),
            workload=lambda key, role=Role.worker: None,
            routers=lambda key: None,
            demand=lambda key: {},
            drafts=lambda key: self.drafts,
            jobs=lambda key: (),
            jobs_problem=lambda key: "",
            record=self.records.get,
        )
        client: Any = self.cluster
        self.shared = Shared(
            client=client,
            calls=cast("Any", self.calls),
            caches=cast("Any", caches),
            resources=self.cluster.resources,
            update=self.update,
            gone=self.gone.append,
            applier=client,
            store=StateStore(client, client, lambda manifest: None),
            tokens=client,
            jobs=JobWriter(client),
            defaults=DEFAULTS,
            writers=asyncio.Semaphore(1),
            clock=lambda: self.now,
        )
        self.loop = DeploymentLoop(KEY, self.shared)

    def update(self, resource: Mapping[str, Any]) -> None:
        self.cluster.resources[KEY] = resource

    async def step(self, seconds: float = 5.0) -> float:
        """Make one step, some seconds after the last one. Return the pause that it asks for."""
        self.now += seconds
        return await self.loop._step()

    async def read(self, report: Report) -> None:
        """Make a round of reports."""
        self.calls.report = report
        await self.loop._poller.read(self.pods, WorkerAccess())

    def restart(self) -> Bench:
        """Return the bench of a new process over the same cluster."""
        return Bench(self.cluster, pods=tuple(replace(pod) for pod in self.pods))
