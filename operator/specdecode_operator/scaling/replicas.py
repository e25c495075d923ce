"""Replicas under ``scaling.owner: Operator``, and what they should be under ``External``.

Need is arrivals over what one worker carries, plus the backlog over the time in which it shall drain, and no less
than the running requests over those that one worker runs well; while nothing is known of either, running and waiting
requests over 0.8 of the sequences that a worker may run. Few arrivals say little of the next, so they count by their
lower bound: where they were too many indeed, more run or wait soon. Up when the need exceeds the workers on two
polls, or at once when requests wait for too long; down one worker at a time, once the surer need, with spare, has
stayed below for the whole window, in which stale reports, unready pods and rollouts do not count. A forecast raises
the floor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdecode_operator.api.v1alpha1 import ScalingSpec
from specdecode_operator.scaling.capacity import SLOTS_USABLE
from specdecode_operator.state.learned import ScalingState
from specdecode_operator.types import Capacity

POLLS_TO_RISE = 2
DRAIN_SECONDS = 60.0
"""A backlog shall be gone after so long; a new worker takes about as long to come, so more would come too late."""
SPARE = 1.1
"""A worker goes only when those that stay could carry a tenth more."""
WAIT_SHARE = 0.5
"""Of the promised time to the first token: who waits longer than this is in a hurry."""
MOST_WANTED = 100_000
"""A number for 'more than anybody has': the need is divided by what was measured, which may be next to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What came in, and what one worker carries: the mean, and a lower bound."""

    mean: Capacity
    least: Capacity
    rate: float
    """Arrivals a second over the last polls."""
    least_rate: float
    """A lower bound of it: four users who come at once are no four requests in every five seconds."""
    recent_rate: float
    """The same over the window."""
    forecast_rate: float = 0
    ttft_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What was measured, and whether it can be trusted."""

    now: float | None
    """Running and waiting requests over the last poll; None when this look brought no new reading."""
    recent: float = 0
    """The same over the last minute."""
    max_num_seqs: int = 1
    seconds: float = 0
    """What the last poll covers."""
    trusted: bool = False
    """Every worker is ready and reported, and no rollout is under way."""
    waiting: float = 0
    """Of ``now``."""
    carried: Carried | None = None
    """None while it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    replicas: int
    wanted: int
    """What demand asks for, whatever the bounds."""
    memory: ScalingState


@dataclass(frozen=True, slots=True)
class _Need:
    """In workers. ``wanted`` counts for rising, ``lasting`` for falling, ``floor`` is the forecast's."""

    wanted: int
    lasting: int
    floor: int = 0
    hurry: bool = False


def scale(spec: ScalingSpec, memory: ScalingState, demand: Demand, *, start: int, now: float) -> Scaled:
    """``start`` is where a deployment begins that the operator has not scaled before."""
    replicas = _within(spec, start if memory.replicas is None else memory.replicas)
    if demand.now is None:
        return Scaled(
            replicas=replicas, wanted=memory.wanted or 0, memory=memory.model_copy(update={"replicas": replicas})
        )
    need = _need(demand, demand.now, replicas)
    if max(need.wanted, need.floor) > replicas:
        return _rise(spec, memory, replicas, need)
    return _fall(spec, memory, replicas, need, demand, now)


def _need(demand: Demand, present: float, replicas: int) -> _Need:
    if demand.carried is None:
        wanted = _workers(present, SLOTS_USABLE * demand.max_num_seqs)
        return _Need(wanted, max(wanted, _workers(demand.recent, SLOTS_USABLE * demand.max_num_seqs)))
    carried = demand.carried
    running = max(0.0, present - demand.waiting)
    rate = carried.least_rate + demand.waiting / DRAIN_SECONDS
    wanted = max(_workers(rate, carried.mean.rate), _workers(running, carried.mean.sequences))
    hurry = _in_hurry(carried, demand.waiting)
    if hurry and demand.trusted:
        # All workers are there and still requests wait: the estimate of what they carry was too good.
        wanted = max(wanted, replicas + 1)
    lasting = max(
        wanted,
        _workers(SPARE * carried.recent_rate, carried.least.rate),
        _workers(SPARE * demand.recent, carried.least.sequences),
    )
    floor = _workers(carried.forecast_rate, carried.mean.rate)
    return _Need(wanted, max(lasting, floor), floor, hurry)


def _in_hurry(carried: Carried, waiting: float) -> bool:
    """By Little's law the wait is the waiting over the rate; requests that never get in have no rate."""
    if carried.ttft_seconds is None:
        return False
    return waiting > WAIT_SHARE * carried.ttft_seconds * max(carried.rate, carried.recent_rate, 1e-9) and waiting >= 1


def _rise(spec: ScalingSpec, memory: ScalingState, replicas: int, need: _Need) -> Scaled:
    """``wanted`` is what demand asks for; a forecast raises the replicas, and is no demand."""
    polls = memory.above_polls + 1
    enough = polls >= POLLS_TO_RISE or need.hurry
    after = _within(spec, max(need.wanted, need.floor)) if enough else replicas
    return Scaled(
        replicas=after,
        wanted=need.wanted,
        memory=ScalingState(replicas=after, wanted=need.wanted, above_polls=polls),
    )


def _fall(spec: ScalingSpec, memory: ScalingState, replicas: int, need: _Need, demand: Demand, now: float) -> Scaled:
    """The window is of trusted polls: workers that are all busy hide a demand that those who are on their way will
    show, and a worker would go in the moment in which it comes."""
    wanted = need.wanted
    if need.lasting >= replicas:
        return Scaled(replicas=replicas, wanted=wanted, memory=ScalingState(replicas=replicas, wanted=wanted))
    since = now if memory.below_since is None else memory.below_since
    if not demand.trusted:
        since = min(now, since + demand.seconds)
    elif now - since >= spec.scale_down_window_seconds:
        replicas = _within(spec, replicas - 1)
    after = ScalingState(replicas=replicas, wanted=wanted, below_since=since)
    return Scaled(replicas=replicas, wanted=wanted, memory=after)


def _workers(demand: float, each: float) -> int:
    if demand <= 0:
        return 0
    return MOST_WANTED if demand > each * MOST_WANTED else math.ceil(demand / each - 1e-9)


def _within(spec: ScalingSpec, replicas: int) -> int:
    return max(spec.min_replicas, min(spec.max_replicas, replicas))
