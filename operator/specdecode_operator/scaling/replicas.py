"""Replicas that follow demand.

Demand in workers is the arrival rate over the capacity of one worker, plus the backlog over the time in which it is to
drain, and at least the running requests over those that one worker runs at its capacity. While the capacity is unknown,
demand is the running and waiting requests over 0.8 of the sequences that one worker may run.

Workers are added after two polls with more demand than workers, or at once if requests wait too long. The arrival rate
counts with its lower confidence bound, so a burst adds no worker; if it lasts, requests run or wait soon, which does.
Workers are removed one at a time, after demand with headroom was below the workers for the whole scale-down window, and
only down to its highest value within that window. In it polls without a report of every placed worker, and polls during
rollouts, do not count. A forecast of the
arrival rate may raise the lower bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdecode_operator.api.v1alpha1 import ScalingSpec
from specdecode_operator.scaling.placement import Placement, follow_placement, upper_bound
from specdecode_operator.scaling.tuning import TUNING
from specdecode_operator.state.learned import ScalingState
from specdecode_operator.types import Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLoad:
    """Arrival rates of the deployment, and the capacity of one worker. Rates are requests per second."""

    capacity: Capacity
    capacity_bound: Capacity
    """Lower confidence bound of ``capacity``."""
    arrival_rate: float
    """Mean over the last polls."""
    arrival_rate_bound: float
    """Lower confidence bound of ``arrival_rate``: four users that come at once do not come every five seconds."""
    window_arrival_rate: float
    """Mean over the last minute."""
    forecast_rate: float = 0
    ttft_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Measured demand of one poll."""

    requests: float | None
    """Running and waiting requests over the last poll. None if no worker has a new reading."""
    window_requests: float = 0
    """The same over the last minute; without the waiting ones if ``load`` is known."""
    waiting: float = 0
    """Waiting requests among ``requests``, if ``load`` is known."""
    max_num_seqs: int = 1
    """Sequences that one worker runs at most."""
    seconds: float = 0
    """Seconds that the last poll covers."""
    is_complete: bool = False
    """Every placed worker is ready and has reported, and no rollout is under way."""
    load: ServiceLoad | None = None
    """None while the capacity of a worker is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleResult:
    """Replicas to set."""

    replicas: int
    wanted: int
    """Workers that demand asks for, without bounds."""
    state: ScalingState
    reason: str = ""
    """Reason for a change, as the decision history shows it."""


@dataclass(frozen=True, slots=True)
class _Need:
    """Demand in workers."""

    wanted: int
    """Workers to add up to."""
    lasting: int
    """Workers to remove down to: with headroom, and over a longer time."""
    floor: int = 0
    """Workers for the forecast."""
    is_urgent: bool = False
    """Requests wait too long."""


def scale(
    spec: ScalingSpec, state: ScalingState, demand: Demand, *, now: float, placement: Placement | None = None
) -> ScaleResult:
    """Return the replicas for ``demand``.

    Args:
        spec: Bounds of the replicas, and the scale-down window.
        state: State after the previous decision. Its ``replicas`` are what is set at present.
        demand: Measured demand.
        now: Present time, in seconds since the epoch.
        placement: Workers with and without a node. None if nothing is to be withdrawn.
    """
    placement = placement or Placement()
    set_replicas = max(spec.min_replicas, min(spec.max_replicas, state.replicas or 0))
    state = follow_placement(spec, state, placement, replicas=set_replicas, now=now)
    replicas = state.replicas or 0
    if replicas < set_replicas:
        reason = f"no node for {placement.unplaced} of {set_replicas} workers"
        return ScaleResult(replicas=replicas, wanted=state.wanted or 0, state=state, reason=reason)
    if demand.requests is None:
        return ScaleResult(replicas=replicas, wanted=state.wanted or 0, state=state)
    are_all_placed = placement.unplaced == 0
    need = _need(demand, demand.requests, replicas, can_serve_all=demand.is_complete and are_all_placed)
    if max(need.wanted, need.floor) > replicas:
        return _rise(spec, state, replicas, need, now)
    # Waiting requests may be demand for the workers that have no node yet.
    is_measured = demand.is_complete and (are_all_placed or demand.waiting == 0)
    return _fall(spec, state, replicas, need, now, seconds=demand.seconds, is_measured=is_measured)


def _need(demand: Demand, requests: float, replicas: int, *, can_serve_all: bool) -> _Need:
    if demand.load is None:
        slots = TUNING.usable_slots * demand.max_num_seqs
        wanted = _workers(requests, slots)
        return _Need(wanted, max(wanted, _workers(demand.window_requests, slots)))
    load = demand.load
    running = max(0.0, requests - demand.waiting)
    rate = load.arrival_rate_bound + demand.waiting / TUNING.drain_seconds
    wanted = max(_workers(rate, load.capacity.rate), _workers(running, load.capacity.sequences))
    is_urgent = _is_urgent(load, demand.waiting)
    if is_urgent and can_serve_all:
        # Requests wait although every worker serves, so the estimated capacity is too high.
        wanted = max(wanted, replicas + 1)
    lasting = max(
        wanted,
        _workers(TUNING.headroom * load.window_arrival_rate, load.capacity_bound.rate),
        _workers(TUNING.headroom * demand.window_requests, load.capacity_bound.sequences),
    )
    floor = _workers(load.forecast_rate, load.capacity.rate)
    return _Need(wanted, max(lasting, floor), floor, is_urgent)


def _is_urgent(load: ServiceLoad, waiting: float) -> bool:
    """Return whether requests wait too long for the TTFT objective.

    By Little's law the mean wait is the number of waiting requests over the arrival rate.
    """
    if load.ttft_seconds is None:
        return False
    rate = max(load.arrival_rate, load.window_arrival_rate, 1e-9)
    return waiting > TUNING.urgent_wait_share * load.ttft_seconds * rate and waiting >= 1


def _rise(spec: ScalingSpec, state: ScalingState, replicas: int, need: _Need, now: float) -> ScaleResult:
    """Add workers, if demand was above the workers for enough polls. A forecast is not counted as demand."""
    polls = state.above_polls + 1
    if polls >= TUNING.polls_to_rise or need.is_urgent:
        replicas = max(replicas, min(upper_bound(spec, state, now), max(need.wanted, need.floor)))
    return _result(state, replicas, need.wanted, above_polls=polls, below_since=None)


def _fall(
    spec: ScalingSpec,
    state: ScalingState,
    replicas: int,
    need: _Need,
    now: float,
    *,
    seconds: float,
    is_measured: bool,
) -> ScaleResult:
    """Remove a worker, if demand was below the workers for the whole window, and is not higher within it.

    A poll of ``seconds`` that was not measured completely extends the window: while all ready workers are busy,
    requests may wait for workers that are still starting.
    """
    if need.lasting >= replicas:
        return _result(state, replicas, need.wanted, above_polls=0, below_since=None)
    window = spec.scale_down_window_seconds
    pause = 0 if is_measured else seconds
    since = now if state.below_since is None else min(now, state.below_since + pause)
    earlier = [(min(now, at + pause), lasting) for at, lasting in state.low_needs if lasting > need.lasting]
    needs = tuple((at, lasting) for at, lasting in (*earlier, (now, need.lasting)) if now - at <= window)
    if is_measured and now - since >= window:
        replicas = max(spec.min_replicas, min(replicas, max(replicas - 1, needs[0][1])))
    return _result(state, replicas, need.wanted, above_polls=0, below_since=since, low_needs=needs)


def _result(
    state: ScalingState,
    replicas: int,
    wanted: int,
    *,
    above_polls: int,
    below_since: float | None,
    low_needs: tuple[tuple[float, int], ...] = (),
) -> ScaleResult:
    update = {"replicas": replicas, "wanted": wanted, "above_polls": above_polls}
    state = state.model_copy(update={**update, "below_since": below_since, "low_needs": low_needs})
    return ScaleResult(replicas=replicas, wanted=wanted, state=state, reason=f"demand asks for {wanted} workers")


def _workers(demand: float, capacity: float) -> int:
    """Return how many workers of ``capacity`` carry ``demand``."""
    if demand <= 0:
        return 0
    return TUNING.max_wanted if demand > capacity * TUNING.max_wanted else math.ceil(demand / capacity - 1e-9)
