"""Homes of drafts: the workers at which requests of tasks with a draft of their own are gathered.

A worker runs every draft that its batch uses, one after the other. Requests of one draft therefore cost fewer draft
passes on a few workers than spread over all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from specdecode_router.placement.rendezvous import rendezvous_score
from specdecode_router.workers.worker import WorkerView
from specdecode_worker.contract.internal_stream import PlanTask

MIN_REQUESTS = 20
"""Requests before a draft gets homes: with fewer, its share is not known."""
FORGETTING_FACTOR = 0.995
"""Factor of all counts at each request, so that about the last 200 decide."""
MIN_HOMES = 0.5
"""Homes that a draft's share asks for, below which it gets none: a worker of its own would be idle too often."""
HYSTERESIS = 0.75
"""Homes by which the share differs from the number in use before that changes, because a change costs prefixes."""


class DraftHomes:
    """Share of each draft among the requests of this router, and the homes that follow from it."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._homes: dict[str, int] = {}

    def record(self, draft: str) -> None:
        """Count a request of a draft; the name is empty for the first draft."""
        counts = {name: count * FORGETTING_FACTOR for name, count in self._counts.items()}
        counts[draft] = counts.get(draft, 0.0) + 1
        self._counts = counts

    def assign(self, workers: Sequence[WorkerView]) -> Sequence[WorkerView]:
        """Return the workers with the tasks that are gathered at them. Without drafts by task they stay as they are."""
        if not any(task.draft for worker in workers for task in worker.plan_tasks):
            return workers
        homes = dict(self._homes_of(workers))
        return [replace(w, tasks=frozenset(homes[w.endpoint.name])) if w.endpoint.name in homes else w for w in workers]

    def _homes_of(self, workers: Sequence[WorkerView]) -> Iterator[tuple[str, list[str]]]:
        """Yield workers that are homes, each with the tasks of its draft."""
        drafts = sorted({task.draft for worker in workers for task in worker.plan_tasks if task.draft})
        free = {worker.endpoint.name: worker for worker in workers if not worker.endpoint.terminating}
        count = len(free)
        for draft in drafts:
            able = [worker for worker in free.values() if _tasks_of(draft, worker.plan_tasks)]
            able.sort(key=lambda worker: -_score(draft, worker))
            for worker in able[: self._number(draft, count)]:
                del free[worker.endpoint.name]
                yield worker.endpoint.name, _tasks_of(draft, worker.plan_tasks)

    def _number(self, draft: str, workers: int) -> int:
        """Return the number of homes of a draft among so many workers."""
        total = sum(self._counts.values())
        if total < MIN_REQUESTS:
            return 0
        asked = workers * self._counts.get(draft, 0.0) / total
        current = self._homes.get(draft, 0)
        if abs(asked - current) > HYSTERESIS or (current == 0 and asked >= MIN_HOMES):
            self._homes[draft] = math.floor(asked + 0.5)
        return self._homes.get(draft, 0)


def plan_tasks_of(workers: Sequence[WorkerView]) -> tuple[PlanTask, ...]:
    """Return the tasks of the plan. During a change of the plan, those of the first worker that reports any."""
    return next((worker.plan_tasks for worker in workers if worker.plan_tasks), ())


def _tasks_of(draft: str, tasks: Sequence[PlanTask]) -> list[str]:
    return [task.name for task in tasks if task.draft == draft]


def _score(draft: str, worker: WorkerView) -> float:
    return rendezvous_score(draft.encode().ljust(16, b"\0"), worker.endpoint.name, 1.0)
