"""Replicas under ``scaling.owner: Operator``.

Demand is running and waiting requests, as request-seconds per second. One worker carries 0.8 of the sequences that it
may run. Up when demand exceeds the workers on two polls; down one worker at a time, once demand has stayed below for
the whole window, and never with stale reports, unready pods or a rollout under way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdecode_operator.api.v1alpha1 import ScalingSpec
from specdecode_operator.memory import ScalingMemory

USABLE = 0.8
"""Share of a worker's sequences that is planned for; the rest is for bursts."""
POLLS_TO_RISE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What was measured, and whether it can be trusted."""

    now: float | None
    """Running and waiting requests over the last poll; None when this look brought no new reading."""
    recent: float = 0
    """The same over the last minute."""
    max_num_seqs: int = 1
    trusted: bool = False
    """Every worker is ready and reported, and no rollout is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    replicas: int
    wanted: int
    """What demand asks for, whatever the bounds."""
    memory: ScalingMemory


def scale(spec: ScalingSpec, memory: ScalingMemory, demand: Demand, *, start: int, now: float) -> Scaled:
    """``start`` is where a deployment begins that the operator has not scaled before."""
    replicas = _within(spec, start if memory.replicas is None else memory.replicas)
    if demand.now is None:
        return Scaled(
            replicas=replicas, wanted=memory.wanted or 0, memory=memory.model_copy(update={"replicas": replicas})
        )
    wanted = _workers(demand.now, demand.max_num_seqs)
    lasting = max(wanted, _workers(demand.recent, demand.max_num_seqs))
    if wanted > replicas:
        return _rise(spec, memory, replicas, wanted)
    return _fall(spec, memory, replicas, wanted, lasting, demand.trusted, now)


def _rise(spec: ScalingSpec, memory: ScalingMemory, replicas: int, wanted: int) -> Scaled:
    polls = memory.above_polls + 1
    enough = polls >= POLLS_TO_RISE
    return Scaled(
        replicas=_within(spec, wanted) if enough else replicas,
        wanted=wanted,
        memory=ScalingMemory(replicas=_within(spec, wanted) if enough else replicas, wanted=wanted, above_polls=polls),
    )


def _fall(
    spec: ScalingSpec, memory: ScalingMemory, replicas: int, wanted: int, lasting: int, trusted: bool, now: float
) -> Scaled:
    if lasting >= replicas:
        return Scaled(replicas=replicas, wanted=wanted, memory=ScalingMemory(replicas=replicas, wanted=wanted))
    since = now if memory.below_since is None else memory.below_since
    if trusted and now - since >= spec.scale_down_window_seconds:
        replicas = _within(spec, replicas - 1)
    after = ScalingMemory(replicas=replicas, wanted=wanted, below_since=since)
    return Scaled(replicas=replicas, wanted=wanted, memory=after)


def _workers(demand: float, max_num_seqs: int) -> int:
    return math.ceil(demand / (USABLE * max_num_seqs) - 1e-9)


def _within(spec: ScalingSpec, replicas: int) -> int:
    return max(spec.min_replicas, min(spec.max_replicas, replicas))
