"""Choice of the worker of one request's attempts: placement with the affinity of the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdecode_router.placement.affinity import affinity_of
from specdecode_router.placement.choose import Policy, place
from specdecode_router.placement.prefix_table import PrefixTable
from specdecode_router.telemetry.metrics import RouterMetrics
from specdecode_router.workers.worker import WorkerView
from specdecode_worker.contract.internal_stream import End


class WorkerChoice:
    """Placement for one request."""

    def __init__(
        self,
        prefixes: PrefixTable,
        metrics: RouterMetrics,
        route: str,
        fields: Mapping[str, Any],
        *,
        tenant: str,
        task: str | None,
        policy: Policy = place,
    ) -> None:
        """Prepare the choice for a request.

        Args:
            prefixes: Prefixes that the workers are expected to have cached.
            metrics: Metrics that count the outcomes.
            route: Public path.
            fields: Body of the request; empty if it is no object.
            tenant: Name of the client.
            task: Task of the request's header; None without one.
            policy: Way of choosing among the workers.
        """
        self._prefixes, self._metrics, self._policy = prefixes, metrics, policy
        self._affinity = affinity_of(route, fields, tenant=tenant, task=task)

    def choose(self, views: Sequence[WorkerView], key: str, exclude: frozenset[str]) -> WorkerView | None:
        """Return a worker with the compatibility key (empty for any) that is not excluded; None without one."""
        expected = self._prefixes.expected(self._affinity)
        placement = self._policy(views, self._affinity, compatibility_key=key, exclude=exclude, expected=expected)
        if placement is None:
            return None
        self._metrics.count_placement(placement.outcome)
        return placement.worker

    def record_end(self, worker: str, end: End) -> None:
        """Record what a worker had cached of a finished request."""
        self._prefixes.record(
            self._affinity,
            worker,
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            completion_tokens=end.completion_tokens,
        )
