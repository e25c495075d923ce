"""Order in which records are left out of a state that is too long. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdecode_operator.state.cells import DraftEstimates, PodState, StepTimeCell

MAX_SHARE = 0.9
"""Largest share of the step times that stays in one step, so that each step brings the state closer to its bound."""
MAX_UNHEALTHY_PODS = 64


@dataclass(frozen=True, slots=True)
class Trimming:
    """One step: the records that stay in one field of LearnedState."""

    field: str
    records: tuple[Any, ...]
    dropped: int
    what: str


def next_step(
    parked: tuple[DraftEstimates, ...],
    pods: tuple[PodState, ...],
    costs: tuple[StepTimeCell, ...],
    share: float,
) -> Trimming | None:
    """Return the next step, or None if nothing is left that may go.

    Args:
        parked: Estimates of parked drafts, the most recently used first.
        pods: Figures of pods.
        costs: Step times of the current draft and plain ones.
        share: Share of step times that may stay, at most MAX_SHARE.
    """
    share = min(MAX_SHARE, max(0.0, share))
    if any(estimates.costs for estimates in parked):
        fewer = _with_most_visited(parked, share)
        return Trimming("parked", fewer, _count(parked) - _count(fewer), "step times of parked drafts")
    unhealthy = tuple(pod for pod in pods if pod.collapsed_since is not None)[:MAX_UNHEALTHY_PODS]
    if len(unhealthy) < len(pods):
        return Trimming("pods", unhealthy, len(pods) - len(unhealthy), "pods")
    if parked:
        return Trimming("parked", parked[:-1], 1, "parked drafts")
    if costs:
        most = tuple(_most_visited(costs, share))
        return Trimming("costs", most, len(costs) - len(most), "step times of the current draft")
    return None


def _count(parked: Sequence[DraftEstimates]) -> int:
    return sum(len(estimates.costs) for estimates in parked)


def _with_most_visited(parked: tuple[DraftEstimates, ...], share: float) -> tuple[DraftEstimates, ...]:
    stay = {id(cell) for cell in _most_visited([cell for estimates in parked for cell in estimates.costs], share)}
    return tuple(
        estimates.model_copy(update={"costs": tuple(cell for cell in estimates.costs if id(cell) in stay)})
        for estimates in parked
    )


def _most_visited(costs: Sequence[StepTimeCell], share: float) -> list[StepTimeCell]:
    """Return this share of the cells in their order; those with the fewest steps are left out."""
    by_visits = sorted(range(len(costs)), key=lambda index: -costs[index].values[0])
    return [costs[index] for index in sorted(by_visits[: int(len(costs) * share)])]
