"""Choice of the worker of one request's attempts: placement with the affinity of the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from specdecode_router.relay.stand_ins import Affinity, affinity_of, choose
from specdecode_router.workers.worker import WorkerView


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """Placement for one request."""

    affinity: Affinity

    @classmethod
    def of_request(cls, route: str, fields: Mapping[str, Any], *, tenant: str, task: str | None) -> Self:
        """Return the choice for a request, from its body and the header for its task."""
        return cls(affinity_of(route, fields, tenant=tenant, task=task))

    def __call__(self, views: Sequence[WorkerView], key: str, exclude: frozenset[str]) -> WorkerView | None:
        """Return a worker with the compatibility key (empty for any) that is not excluded; None without one."""
        return choose(views, self.affinity, compatibility_key=key, exclude=exclude)
