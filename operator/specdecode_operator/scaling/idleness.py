"""Scaling to zero and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specdecode_operator.api.v1alpha1 import ScalingSpec
from specdecode_operator.scaling.capacity import arrivals
from specdecode_operator.scaling.replicas import Demand, Placement, ScaleResult, scale
from specdecode_operator.scaling.tuning import TUNING
from specdecode_operator.state.learned import ScalingState
from specdecode_operator.telemetry.deltas import Delta
from specdecode_operator.types import Worker

# Scaling to zero and back: no workers after a time without requests, and one again for requests that routers hold.
#
# A deployment rests only if every serving worker has reported and none has a request. A worker that was given a request
# meanwhile drains, and its routers hold what it could not finish, which starts a worker again.


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Requests of a deployment, at its routers and its workers."""

    held: int = 0
    """Requests that routers hold because no worker is ready."""
    is_quiet: bool | None = None
    """No worker has or had a request since the previous poll. None if some worker did not say."""


def activity_of(workers: Sequence[Worker], delta: Delta | None, held: int) -> Activity:
    """Return the activity. While the first workers start it is unknown: they were asked for and may serve soon."""
    reports = [worker.report for worker in workers if worker.ready and not worker.leaving]
    known = [report for report in reports if report is not None]
    if held or any(report.running or report.waiting for report in known):
        return Activity(held=held, is_quiet=False)
    if delta is not None and (delta.running or delta.waiting or arrivals([delta])):
        return Activity(held=held, is_quiet=False)
    return Activity(held=held, is_quiet=True if reports and len(known) == len(reports) else None)


def scale_to_activity(
    spec: ScalingSpec,
    state: ScalingState,
    demand: Demand,
    activity: Activity,
    *,
    now: float,
    placement: Placement | None = None,
) -> ScaleResult:
    """Return the replicas for ``demand``, where minReplicas may be 0. The other arguments are those of ``scale``."""
    if spec.min_replicas > 0:
        return scale(spec, state, demand, now=now, placement=placement)
    if state.replicas == 0:
        return _wake(spec, state, demand, activity)
    result = scale(spec.model_copy(update={"min_replicas": 1}), state, demand, now=now, placement=placement)
    return _rest(spec, result, activity, now)


def _wake(spec: ScalingSpec, state: ScalingState, demand: Demand, activity: Activity) -> ScaleResult:
    """Start workers for held requests. The rate of arrivals before the rest says nothing about now."""
    slots = max(1.0, TUNING.usable_slots * demand.max_num_seqs)
    wanted = math.ceil(activity.held / slots)
    replicas = min(spec.max_replicas, wanted)
    update = {
        "replicas": replicas,
        "wanted": wanted,
        "above_polls": 0,
        "below_since": None,
        "low_needs": (),
        "idle_since": None,
    }
    return ScaleResult(
        replicas=replicas,
        wanted=wanted,
        state=state.model_copy(update=update),
        reason="routers hold a request" if activity.held == 1 else f"routers hold {activity.held} requests",
    )


def _rest(spec: ScalingSpec, result: ScaleResult, activity: Activity, now: float) -> ScaleResult:
    """Remove all workers after ``idleAfter`` without requests. A poll that says nothing only delays it."""
    since = result.state.idle_since if activity.is_quiet is not False else None
    if activity.is_quiet and since is None:
        since = now
    if not activity.is_quiet or since is None or now - since < spec.idle_seconds:
        state = result.state.model_copy(update={"idle_since": since})
        return ScaleResult(replicas=result.replicas, wanted=result.wanted, state=state, reason=result.reason)
    update = {"replicas": 0, "wanted": 0, "above_polls": 0, "below_since": None, "low_needs": (), "idle_since": None}
    return ScaleResult(
        replicas=0,
        wanted=0,
        state=result.state.model_copy(update=update),
        reason=f"no requests for {spec.idle_seconds} s",
    )
