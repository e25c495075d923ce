"""How many workers, from what was observed and remembered: where planning's pace meets scaling's rules. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from specdecode_operator import planning, scaling
from specdecode_operator.health import pod_health
from specdecode_operator.state.learned import LearnedState, ScalingState
from specdecode_operator.state.session import WINDOW_SECONDS, Session
from specdecode_operator.telemetry.deltas import Delta, over
from specdecode_operator.types import Capacity, Deployment, Observation, ScalingLimit

DOUBT = 1.28
"""Standard errors of a lower bound: nine times in ten a worker carries more, and more requests come in."""
MARK_SECONDS = 15.0
"""Before the window ends pods are marked: earlier marks would be old, and a write each."""
STARTUP_SECONDS = 60.0
"""Of a worker, until one was seen starting."""
LAST_START_SHARE = 0.5
"""Weight of the start-up that was seen last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDecision:
    """``replicas`` is what is set, ``desired`` what should be: they differ where somebody else owns the replicas."""

    replicas: int
    desired: int
    wanted: int | None
    arrivals: float | None
    """Requests a second, whole fleet, over the last minute; None while they are not known."""
    capacity: Capacity | None
    limited: ScalingLimit | None
    deletion_costs: dict[str, int]


def size(
    deployment: Deployment,
    observed: Observation,
    learned: LearnedState,
    memory: Session,
    delta: Delta | None,
    *,
    now: float,
) -> tuple[ReplicaDecision, LearnedState]:
    """The replicas, and the memory with demand's recent past."""
    spec = deployment.spec.scaling
    learned = _learnt(learned, observed, delta, now)
    if spec is None:
        count = deployment.spec.replicas
        nothing = ReplicaDecision(
            replicas=count, desired=count, wanted=None, arrivals=None, capacity=None, limited=None, deletion_costs={}
        )
        return nothing, learned.model_copy(update={"scaling": ScalingState()})
    ours = spec.owner == "Operator"
    carried = _carried(deployment, observed, learned, memory, now) if delta is not None else None
    before = learned.scaling if ours else learned.scaling.model_copy(update={"replicas": deployment.spec.replicas})
    start = observed.workload.wanted if observed.workload else deployment.spec.replicas
    scaled = scaling.scale(spec, before, _demand(deployment, observed, memory, delta, carried), start=start, now=now)
    capacity = carried.mean if carried else None
    sized = ReplicaDecision(
        replicas=scaled.replicas if ours else deployment.spec.replicas,
        desired=scaled.replicas,
        wanted=scaled.wanted,
        arrivals=carried.recent_rate if carried else None,
        capacity=capacity,
        limited=scaling.limited(spec, scaled.wanted, _troubles(observed), capacity) if ours else None,
        deletion_costs=_deletion_costs(deployment, observed, learned, scaled.memory, now),
    )
    return sized, learned.model_copy(update={"scaling": scaled.memory})


def max_num_seqs(deployment: Deployment, observed: Observation) -> int:
    """What one worker runs at most: by its report, else by the spec."""
    return min((report.max_num_seqs for report in observed.reports), default=deployment.spec.workers.max_num_seqs)


def kv_tokens(observed: Observation) -> float | None:
    """What the smallest cache of all workers holds; None while none says."""
    found = [float(report.kv_tokens_total) for report in observed.last_reports if report.kv_tokens_total > 0]
    return min(found, default=None)


def _learnt(learned: LearnedState, observed: Observation, delta: Delta | None, now: float) -> LearnedState:
    """Arrivals for the forecast, and how long a worker takes to start."""
    forecast = learned.forecast
    if delta is not None:
        forecast = scaling.observed(forecast, scaling.arrivals([delta]), delta.seconds, now=now)
    started = [worker.startup_seconds for worker in observed.workers if worker.startup_seconds is not None]
    startup = learned.startup_seconds
    if started:
        # The quickest of those that stand: a readiness that was lost and came back looks like a slow start.
        seen = min(started)
        startup = seen if startup is None else startup + LAST_START_SHARE * (seen - startup)
    return learned.model_copy(update={"forecast": forecast, "startup_seconds": startup and float(f"{startup:.3g}")})


def _carried(
    deployment: Deployment, observed: Observation, learned: LearnedState, memory: Session, now: float
) -> scaling.Carried | None:
    """What one worker carries of the mix that comes in; None while requests or steps are not known."""
    request = planning.request_of(learned)
    if request is None:
        return None
    speculation = deployment.spec.speculation
    most, cache = max_num_seqs(deployment, observed), kv_tokens(observed)
    found = planning.buckets(deployment.spec.workers.max_num_seqs)
    pace = planning.pace(speculation, learned, found, request, kv_tokens=cache)
    if pace is None:
        return None
    prompt = planning.prompt_of(learned)
    mix = scaling.Mix(
        prompt_tokens=request.prompt,
        output_tokens=request.output,
        context_tokens=request.context,
        prompt_steps=prompt.steps,
        prompt_seconds=prompt.seconds,
    )
    objective = speculation.objective
    limits = scaling.Limits(
        max_sequences=most,
        cache_tokens=cache,
        itl_seconds=None if objective.itl_milliseconds is None else objective.itl_milliseconds / 1000,
        ttft_seconds=None if objective.ttft_milliseconds is None else objective.ttft_milliseconds / 1000,
    )
    ahead = learned.startup_seconds or STARTUP_SECONDS
    lately = partial(scaling.arrival_rate, memory.window, now=now, within=scaling.RECENT_SECONDS)
    return scaling.Carried(
        mean=scaling.capacity(mix, pace, limits),
        least=scaling.capacity(mix, pace, limits, doubt=DOUBT),
        rate=lately(),
        least_rate=lately(doubt=DOUBT),
        recent_rate=scaling.arrival_rate(memory.window, now=now, within=WINDOW_SECONDS),
        forecast_rate=scaling.expected_rate(learned.forecast, now=now, ahead_seconds=ahead),
        ttft_seconds=limits.ttft_seconds,
    )


def _demand(
    deployment: Deployment,
    observed: Observation,
    memory: Session,
    delta: Delta | None,
    carried: scaling.Carried | None,
) -> scaling.Demand:
    recent = over(memory.window)
    demand = scaling.Demand(
        now=delta.running + delta.waiting if delta and not deployment.paused else None,
        recent=recent.running + recent.waiting,
        max_num_seqs=max_num_seqs(deployment, observed),
        seconds=delta.seconds if delta else 0.0,
        trusted=trusted(observed),
        carried=carried,
    )
    # What waits is no work that lasts: once a worker's rate is known, a backlog has a term of its own.
    return replace(demand, recent=recent.running, waiting=delta.waiting if delta else 0.0) if carried else demand


def trusted(observed: Observation) -> bool:
    """Every worker is ready and reported, and no rollout is under way."""
    workload = observed.workload
    return (
        workload is not None
        and workload.settled
        and all(worker.ready and worker.report is not None for worker in observed.workers if not worker.leaving)
    )


def _troubles(observed: Observation) -> list[str]:
    return [worker.trouble for worker in observed.workers if worker.trouble and not worker.leaving]


def _deletion_costs(
    deployment: Deployment, observed: Observation, learned: LearnedState, memory: ScalingState, now: float
) -> dict[str, int]:
    """Shortly before a worker goes: who has least to lose goes first. At other times nobody needs to know."""
    spec = deployment.spec.scaling
    if spec is None or memory.below_since is None or deployment.paused:
        return {}
    if now - memory.below_since < spec.scale_down_window_seconds - MARK_SECONDS:
        return {}
    staying = [worker for worker in observed.workers if worker.report and not worker.leaving]
    running = {worker.name: float(worker.report.running + worker.report.waiting) for worker in staying if worker.report}
    strange = pod_health.suspected(learned)
    costs = scaling.deletion_costs(running, (worker.name for worker in staying if worker.uid in strange))
    return {worker.name: costs[worker.name] for worker in staying if worker.deletion_cost != costs[worker.name]}
