"""Choice of the worker for one request: prefix affinity, as far as the load permits.

The workers are ranked by weighted rendezvous hash of the request's affinity. The first one with a load below its bound
is chosen. The bound is ``LOAD_FACTOR`` times the worker's share, by speed, of all load. A worker at its bound passes
requests on to the next one in the rank of the same affinity, so a conversation has a stable second worker too. This is
consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, arXiv 1608.01350) with rendezvous hashing in
place of the ring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from specdecode_router.placement.affinity import Affinity
from specdecode_router.placement.rendezvous import rendezvous_score
from specdecode_router.workers.worker import WorkerView

LOAD_FACTOR = 1.25
"""Bound of a worker's load relative to the mean by speed. The 1 + epsilon of the paper."""
EVICTED_SHARE = 0.5
"""A worker expected to have less than this share of the longest cached prefix loses its rank to those with more."""

_NOTHING_EXPECTED: Mapping[str, float] = MappingProxyType({})


class PlacementOutcome(StrEnum):
    """Reason why a worker was chosen."""

    affinity = "affinity"
    """It is the first of the affinity's rank."""
    spill = "spill"
    """The first of the rank has as much load as its bound permits, and this is the next one with less."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A chosen worker, and the reason for the metric."""

    worker: WorkerView
    outcome: PlacementOutcome


def place(
    workers: Sequence[WorkerView],
    affinity: Affinity,
    *,
    compatibility_key: str = "",
    exclude: frozenset[str] = frozenset(),
    expected: Mapping[str, float] = _NOTHING_EXPECTED,
) -> Placement | None:
    """Choose the worker for a request. Equal arguments give an equal result, whatever the order of the workers.

    Args:
        workers: All known workers.
        affinity: Affinity of the request.
        compatibility_key: Key of the attempt that is to be continued. A worker with another key is never chosen, one
            whose key is not known yet only if there is none with this key.
        exclude: Names of workers that are not chosen, for example because they failed this request.
        expected: Tokens of the prefix that each worker is expected to have cached, by name (``PrefixTable``).
    """
    eligible = eligible_workers(workers, compatibility_key, exclude)
    if not eligible:
        return None
    tiers = _by_task(eligible, affinity.task)
    ranked = [worker for tier in tiers for worker in _rank(tier, affinity, expected)]
    # Never empty: the bounds add up to more than all load.
    below = _below_bound(ranked)
    # A further request would wait in a full batch, while another worker may have a free row.
    chosen = next((w for w in below if not w.max_num_seqs or load_of(w) < w.max_num_seqs), below[0])
    return Placement(chosen, PlacementOutcome.affinity if chosen is ranked[0] else PlacementOutcome.spill)


def load_of(worker: WorkerView) -> int:
    """Return the requests on a worker: those of all routers, and at least this router's streams."""
    return max(worker.in_flight, worker.requests)


def eligible_workers(workers: Sequence[WorkerView], key: str, exclude: frozenset[str]) -> list[WorkerView]:
    """Return the workers that may be chosen, without those that are a last resort while there are better ones."""
    allowed = [w for w in workers if not w.endpoint.terminating and w.endpoint.name not in exclude]
    if key:
        allowed = _preferred(
            [w for w in allowed if w.compatibility_key in ("", key)], lambda w: w.compatibility_key == key
        )
    return _preferred(allowed, lambda w: not w.suspect)


def _by_task(workers: list[WorkerView], task: str) -> list[list[WorkerView]]:
    """Return tiers of workers: those at which the task is gathered, those of all tasks, and those of other tasks."""
    labelled = [w for w in workers if task in w.tasks]
    general = [w for w in workers if not w.tasks]
    return [labelled, general, [w for w in workers if w.tasks and task not in w.tasks]]


def _rank(workers: list[WorkerView], affinity: Affinity, expected: Mapping[str, float]) -> list[WorkerView]:
    """Return the workers in the order of their rank for the affinity."""
    key = affinity.key
    enough = EVICTED_SHARE * max((expected.get(w.endpoint.name, 0.0) for w in workers), default=0.0)

    def rank(worker: WorkerView) -> tuple[bool, float, str]:
        name = worker.endpoint.name
        return expected.get(name, 0.0) < enough, -rendezvous_score(key, name, worker.speed), name

    return sorted(workers, key=rank)


def _below_bound(workers: list[WorkerView]) -> list[WorkerView]:
    """Return the workers that may take one more request within their share of all load."""
    requests = sum(map(load_of, workers)) + 1
    per_speed = LOAD_FACTOR * requests / sum(w.speed for w in workers)
    return [w for w in workers if load_of(w) < math.ceil(per_speed * w.speed)]


def _preferred(workers: list[WorkerView], wanted: Callable[[WorkerView], bool]) -> list[WorkerView]:
    """Return the wanted workers, or all if none is wanted."""
    return [worker for worker in workers if wanted(worker)] or workers
