"""Size stage: the number of workers, from measured demand and the capacity of one worker. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from specdecode_operator import scaling
from specdecode_operator.api.v1alpha1 import ScalingSpec
from specdecode_operator.planning import loads, step_pace, workload
from specdecode_operator.scaling import TUNING
from specdecode_operator.state.learned import LearnedState, ScalingState
from specdecode_operator.state.session import WINDOW_SECONDS
from specdecode_operator.telemetry.counters import Delta, over
from specdecode_operator.types import Deployment, Observation, ReplicaDecision
from specdecode_worker.contract.demand import held_requests

PREFILL_BUSY = 0.7
PREFILL_IDLE = 0.5
"""Shares of the time in which prefill workers compute: the largest, and that below which one of them is taken away."""


def size(
    deployment: Deployment,
    observed: Observation,
    learned: LearnedState,
    delta: Delta | None,
    window: tuple[Delta, ...],
    now: float,
) -> tuple[ReplicaDecision, ScalingState]:
    """Return the replicas, and the state with the latest demand.

    Args:
        deployment: The deployment.
        observed: Workloads, and workers with their reports.
        learned: Estimates, and the state of the previous decision.
        delta: Differences of the reports since the previous poll. None if no worker has a new reading.
        window: Differences of the last minute, oldest first.
        now: Present time, in seconds since the epoch.
    """
    spec = deployment.spec
    is_scaling_known = delta is not None and (spec.scaling is not None or spec.prefill.max_replicas is not None)
    worker = _worker_model(deployment, observed, learned) if is_scaling_known else None
    state = scaling.take_over(
        learned.scaling,
        spec_replicas=spec.replicas,
        running=observed.workload.wanted if observed.workload else None,
        is_owner=spec.scaling is not None and spec.scaling.owner == "Operator",
        is_spec_observed=deployment.status.observed_generation == deployment.generation,
    )
    running = spec.replicas if state.replicas is None else state.replicas
    if spec.scaling is None:
        decision = ReplicaDecision(replicas=running, desired=running)
    else:
        problem = scaling.placement_problem(observed.workload, observed.workers)
        load = _service_load(worker, window, now) if worker else None
        demand = _demand(deployment, observed, delta, window, load, are_all_placed=problem is None)
        activity = scaling.Activity()
        if not spec.paused:
            activity = scaling.activity_of(observed.workers, delta, held_requests(observed.demand, now))
        after, reason = scaling.scale_to_activity(spec.scaling, state, demand, activity, now=now)
        decision = _decision(deployment, spec.scaling, running, after, reason, load, problem)
        state = after.model_copy(update={"replicas": decision.replicas})
    return replace(decision, prefill=prefill_replicas(deployment, observed, worker, window, now)), state


def prefill_replicas(
    deployment: Deployment,
    observed: Observation,
    worker: scaling.WorkerModel | None,
    window: tuple[Delta, ...],
    now: float,
) -> int:
    """Return the prefill workers that compute all prompt tokens that no cache has, within the bounds of the spec.

    They are busy for PREFILL_BUSY of the time at most, because a prompt that has to wait is better computed at once.
    One is taken away only if the others would be busy for less than PREFILL_IDLE.
    """
    spec, running = deployment.spec.prefill, observed.prefill_workload.wanted if observed.prefill_workload else 0
    if spec.max_replicas is None:
        return spec.replicas
    wanted = running
    if worker is not None and not deployment.spec.paused:
        rate = scaling.arrival_rate(window, now=now, within=WINDOW_SECONDS)
        busy = rate * worker.mix.prompt_busy_seconds
        wanted = max(math.ceil(busy / PREFILL_BUSY), min(running, math.ceil(busy / PREFILL_IDLE)))
    return max(spec.replicas, min(spec.max_replicas, wanted))


def max_num_seqs(deployment: Deployment, observed: Observation) -> int:
    """Return the sequences that one worker runs at most: by its report, or by the spec before there is one."""
    return min((report.max_num_seqs for report in observed.reports), default=deployment.spec.engine.max_num_seqs)


def kv_tokens(observed: Observation) -> float | None:
    """Return the size of the smallest KV cache in tokens. Return None if no worker reports one."""
    sizes = [float(report.kv_tokens_total) for report in observed.last_reports if report.kv_tokens_total > 0]
    return min(sizes, default=None)


def is_complete(observed: Observation) -> bool:
    """Return whether every placed worker is ready and has reported, and no rollout is under way."""
    return scaling.is_complete(observed.workload, observed.workers)


def _worker_model(deployment: Deployment, observed: Observation, learned: LearnedState) -> scaling.WorkerModel | None:
    """Return one worker under the present mix of requests. Return None while requests or step times are unknown."""
    request = workload.request_of(learned)
    if request is None:
        return None
    speculation = deployment.spec.speculation
    cache = kv_tokens(observed)
    buckets = loads.buckets(deployment.spec.engine.max_num_seqs)
    objective = workload.objective_of(
        speculation.objective, learned, observed.last_reports, deployment.spec.step_tokens
    )
    step_model = step_pace.pace(speculation, learned, buckets, request, objective, kv_tokens=cache)
    if step_model is None:
        return None
    is_apart = bool(observed.prefill_addresses)
    mix = scaling.Mix(
        prompt_busy_seconds=objective.prompt.steps * objective.prompt.seconds,
        prompt_tokens=0.0 if is_apart else request.prompt,
        output_tokens=request.output,
        context_tokens=request.context,
        prompt_steps=1 if is_apart else objective.prompt.steps,
        prompt_seconds=0.0 if is_apart else objective.prompt.seconds,
    )
    itl, ttft = objective.asked.itl_seconds, objective.asked.ttft_seconds
    limits = scaling.Limits(
        max_sequences=max_num_seqs(deployment, observed),
        cache_tokens=cache,
        itl_seconds=None if itl is None else itl / objective.itl_ratio,
        # With prefill workers, these are sized for first tokens, and workers for inter-token latencies.
        ttft_seconds=None if ttft is None or is_apart else ttft / objective.ttft_ratio,
    )
    return scaling.WorkerModel(mix=mix, step_model=step_model, limits=limits)


def _service_load(worker: scaling.WorkerModel, window: tuple[Delta, ...], now: float) -> scaling.ServiceLoad:
    """Return arrival rates and the capacity of one worker."""
    rate = partial(scaling.arrival_rate, window, now=now)
    return scaling.ServiceLoad(
        capacity=worker.capacity(),
        capacity_bound=replace(worker, standard_errors=TUNING.confidence_errors).capacity(),
        arrival_rate=rate(within=TUNING.recent_seconds),
        arrival_rate_bound=rate(within=TUNING.recent_seconds, standard_errors=TUNING.confidence_errors),
        window_arrival_rate=rate(within=WINDOW_SECONDS),
        ttft_seconds=worker.limits.ttft_seconds,
    )


def _decision(
    deployment: Deployment,
    spec: ScalingSpec,
    running: int,
    after: ScalingState,
    reason: str,
    load: scaling.ServiceLoad | None,
    problem: str | None,
) -> ReplicaDecision:
    """Return the replicas for the measured demand; with an external owner or in mode Advisory only report them."""
    is_owner, desired, wanted = spec.owner == "Operator", after.replicas or 0, after.wanted or 0
    if not is_owner:
        replicas = running
    elif deployment.spec.speculation.mode == "Advisory":
        replicas = max(spec.min_replicas, min(spec.max_replicas, running))
    else:
        replicas = desired
    capacity = load.capacity if load else None
    return ReplicaDecision(
        replicas=replicas,
        desired=desired,
        wanted=wanted,
        arrivals=load.window_arrival_rate if load else None,
        capacity=capacity,
        limited=scaling.scaling_limit(spec, wanted, capacity, placement_problem=problem) if is_owner else None,
        reason=reason,
    )


def _demand(
    deployment: Deployment,
    observed: Observation,
    delta: Delta | None,
    window: tuple[Delta, ...],
    load: scaling.ServiceLoad | None,
    *,
    are_all_placed: bool,
) -> scaling.Demand:
    """Return the measured demand.

    While the capacity of a worker is unknown, waiting requests count as running ones. Afterwards they are a backlog,
    which needs workers only until it has drained.
    """
    last_minute = over(window)
    return scaling.Demand(
        requests=delta.running + delta.waiting if delta and not deployment.spec.paused else None,
        window_requests=last_minute.running if load else last_minute.running + last_minute.waiting,
        waiting=delta.waiting if delta and load else 0.0,
        max_num_seqs=max_num_seqs(deployment, observed),
        seconds=delta.seconds if delta else 0.0,
        is_complete=is_complete(observed),
        are_all_placed=are_all_placed,
        load=load,
    )
