"""Policies that the router's placement is compared with. They choose among the same workers as ``place`` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count

from specdecode_router.placement.affinity import Affinity
from specdecode_router.placement.choose import Placement, PlacementOutcome, eligible_workers, load_of, place
from specdecode_router.workers.worker import WorkerView


class RoundRobin:
    """One worker after the other, in the order of their names."""

    def __init__(self) -> None:
        self._turns = count()

    def __call__(
        self,
        workers: Sequence[WorkerView],
        affinity: Affinity,
        *,
        compatibility_key: str,
        exclude: frozenset[str],
        expected: Mapping[str, float],
    ) -> Placement | None:
        """Choose the next worker."""
        eligible = sorted(eligible_workers(workers, compatibility_key, exclude), key=lambda one: one.endpoint.name)
        if not eligible:
            return None
        return Placement(eligible[next(self._turns) % len(eligible)], PlacementOutcome.spill)


class LeastLoaded:
    """The worker with the fewest requests. Among equals, the one that was chosen the longest time ago."""

    def __init__(self) -> None:
        self._turns = count()
        self._last: dict[str, int] = {}

    def __call__(
        self,
        workers: Sequence[WorkerView],
        affinity: Affinity,
        *,
        compatibility_key: str,
        exclude: frozenset[str],
        expected: Mapping[str, float],
    ) -> Placement | None:
        """Choose the worker with the fewest requests."""
        eligible = eligible_workers(workers, compatibility_key, exclude)
        if not eligible:
            return None
        chosen = min(eligible, key=lambda one: (load_of(one), self._last.get(one.endpoint.name, -1), one.endpoint.name))
        self._last[chosen.endpoint.name] = next(self._turns)
        return Placement(chosen, PlacementOutcome.spill)


def policy_of(name: str) -> Callable[..., Placement | None]:
    """Return a new policy of this name."""
    return {"affinity": lambda: place, "round-robin": RoundRobin, "least-loaded": LeastLoaded}[name]()


POLICIES = ("affinity", "round-robin", "least-loaded")
