"""Choice of the worker of one request's attempts: placement with the affinity of the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdecode_router.placement.affinity import Affinity, affinity_of
from specdecode_router.placement.draft_homes import plan_tasks_of
from specdecode_router.placement.placement_state import PlacementState
from specdecode_router.placement.task_labels import task_of
from specdecode_router.telemetry.metrics import RouterMetrics
from specdecode_router.workers.worker import WorkerView
from specdecode_worker.contract.internal_stream import End


class WorkerChoice:
    """Placement for one request."""

    def __init__(
        self,
        placement: PlacementState,
        metrics: RouterMetrics,
        route: str,
        fields: Mapping[str, Any],
        *,
        tenant: str,
        task: str | None,
    ) -> None:
        """Prepare the choice for a request.

        Args:
            placement: Memory of the placement.
            metrics: Metrics that count the outcomes.
            route: Public path.
            fields: Body of the request; empty if it is no object.
            tenant: Name of the client.
            task: Task of the request's header; None without one.
        """
        self._state, self._metrics = placement, metrics
        self._route, self._fields, self._tenant, self._header = route, fields, tenant, task
        self._affinity: Affinity | None = None
        self._draft = ""
        self.deployment = ""
        """Deployment of the last attempt; empty before the first one."""

    def choose(self, views: Sequence[WorkerView], key: str, exclude: frozenset[str]) -> WorkerView | None:
        """Return a worker with the compatibility key (empty for any) that is not excluded; None without one."""
        affinity = self._affinity = self._affinity or self._affinity_of(views)
        split = self._state.split
        views = split.workers_for(views, affinity, key=key, exclude=exclude, current=self.deployment)
        placement = self._state.policy(
            self._state.homes.assign(views),
            affinity,
            compatibility_key=key,
            exclude=exclude,
            expected=self._state.prefixes.expected(affinity),
        )
        if placement is None:
            return None
        self._metrics.count_placement(placement.outcome)
        self.deployment = placement.worker.endpoint.deployment or split.own
        return placement.worker

    def record_end(self, worker: str, end: End) -> None:
        """Record the draft of a finished request, and what its worker had cached."""
        if self._affinity is None:
            return
        self._state.homes.record(self._draft)
        self._state.prefixes.record(
            self._affinity,
            worker,
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            completion_tokens=end.completion_tokens,
        )

    def _affinity_of(self, views: Sequence[WorkerView]) -> Affinity:
        """Return the affinity of the request. A task that has a draft of its own is part of it: so are its prefixes."""
        task, name = task_of(plan_tasks_of(views), self._header, self._fields, self._tenant), self._header
        if task is not None and task.draft:
            name, self._draft = task.name, task.draft
        affinity = affinity_of(self._route, self._fields, tenant=self._tenant, task=name)
        self._fields = {}  # a prompt of token ids takes many times its bytes while the request runs
        return affinity
