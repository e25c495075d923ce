"""Order in which records are left out of a state that is too long. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specdecode_operator.state.cells import DraftEstimates, PodState, StepTimeCell

KEPT_SHARE = 0.75
"""Share of the step times that one step of trimming keeps. A trade between texts made and estimates lost."""
MAX_UNHEALTHY_PODS = 64


@dataclass(frozen=True, slots=True)
class Trimming:
    """One step: the records that stay in one field of LearnedState."""

    field: str
    records: tuple[Any, ...]
    dropped: int
    what: str


def steps(
    parked: tuple[DraftEstimates, ...], pods: tuple[PodState, ...], costs: tuple[StepTimeCell, ...]
) -> Iterator[Trimming]:
    """Yield steps until nothing is left that may go."""
    while any(estimates.costs for estimates in parked):
        shorter = _without_least_visited(parked)
        yield Trimming("parked", shorter, _count(parked) - _count(shorter), "step times of parked drafts")
        parked = shorter
    unhealthy = tuple(pod for pod in pods if pod.collapsed_since is not None)[:MAX_UNHEALTHY_PODS]
    if len(unhealthy) < len(pods):
        yield Trimming("pods", unhealthy, len(pods) - len(unhealthy), "pods")
    while parked:
        yield Trimming("parked", parked[:-1], 1, "parked drafts")
        parked = parked[:-1]
    while costs:
        most = tuple(_most_visited(costs))
        yield Trimming("costs", most, len(costs) - len(most), "step times of the current draft")
        costs = most


def _count(parked: Sequence[DraftEstimates]) -> int:
    return sum(len(estimates.costs) for estimates in parked)


def _without_least_visited(parked: tuple[DraftEstimates, ...]) -> tuple[DraftEstimates, ...]:
    stay = {id(cell) for cell in _most_visited([cell for estimates in parked for cell in estimates.costs])}
    return tuple(
        estimates.model_copy(update={"costs": tuple(cell for cell in estimates.costs if id(cell) in stay)})
        for estimates in parked
    )


def _most_visited(costs: Sequence[StepTimeCell]) -> list[StepTimeCell]:
    """Return KEPT_SHARE of the cells in their order; those with the fewest steps are left out."""
    by_visits = sorted(range(len(costs)), key=lambda index: -costs[index].values[0])
    return [costs[index] for index in sorted(by_visits[: int(len(costs) * KEPT_SHARE)])]
