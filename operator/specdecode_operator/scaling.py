"""The number of workers: capacity of one worker, demand, bounds, and the reasons that hold a change back. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

from specdecode_operator.api.speculation import Pin, read_pin
from specdecode_operator.api.v1alpha1 import DepthSpec, ScalingSpec, SpeculationSpec, TaskDepthSpec
from specdecode_operator.planning.acceptance import (
    AcceptanceModel,
    Objective,
    Request,
    bounds_of,
    follows,
    objective_of,
    prompt_token_seconds,
    request_of,
    tasks_at,
)
from specdecode_operator.planning.estimates import Batch, Load, StepTimeModel, bucket_of, buckets_for
from specdecode_operator.planning.search import RANK, ShapeSearch, rows_of
from specdecode_operator.state.learned import WINDOW_SECONDS, LearnedState, ScalingState
from specdecode_operator.telemetry.counters import Delta, over
from specdecode_operator.types import (
    Capacity,
    Deployment,
    Observation,
    ReplicaDecision,
    ScalingLimit,
    StepEstimate,
    StepModel,
    Worker,
    Workload,
)
from specdecode_worker.contract import Buckets, TreeShape
from specdecode_worker.contract.demand import held_requests


def drafting_share(
    speculation: SpeculationSpec, learned: LearnedState, found: Buckets, shape: TreeShape, max_num_seqs: int
) -> float | None:
    """Return the share of a step at the present load that draft passes surely take. None where nothing was timed."""
    times, at = StepTimeModel.fit(learned.costs, learned.wander), learned.load.row(found)
    if times is None or not shape.nodes:
        return None
    load = times.typical(found, *at, max_num_seqs)
    passes = bounds_of(speculation, learned.load.task).passes(shape.depth)
    return times.drafting_share(load, Batch(passes, 1 + shape.nodes)) if times.near(load) else None


def as_pinned(speculation: SpeculationSpec, pin: Pin | None) -> SpeculationSpec:
    """Return the spec with pinned tasks static at the depth of their pin, which they run. A tree counts as a chain."""
    if pin is None:
        return speculation
    tasks = tuple(
        task
        if (shape := pin.shape_of(task.name)) is None
        else task.model_copy(update={"mode": "Static", "depth": TaskDepthSpec(**_depth_of(shape))})
        for task in speculation.tasks
    )
    update: dict[str, Any] = {"tasks": tasks}
    if pin.every is not None:
        update |= {"mode": "Static", "depth": DepthSpec(**_depth_of(pin.every))}
    return speculation.model_copy(update=update)


def _depth_of(shape: TreeShape) -> dict[str, int]:
    return dict.fromkeys(("min", "max", "initial"), shape.depth)


def step_pace(
    speculation: SpeculationSpec,
    learned: LearnedState,
    found: Buckets,
    request: Request,
    objective: Objective,
    *,
    kv_tokens: float | None,
) -> StepModel | None:
    """Return the step model, or None while no step was timed."""
    times, model = StepTimeModel.fit(learned.costs, learned.wander), AcceptanceModel(learned, speculation)
    if times is None:
        return None
    per_prompt_token, context = prompt_token_seconds(learned, times), bucket_of(found.context, request.context)
    rows = [
        row.running(bounds_of(speculation, row.task).nearest(row.shape))
        for row in rows_of(speculation, learned, found)
        if row.context == context
    ]

    @cache
    def decoding(sequences: float) -> StepEstimate:
        here = [row for row in rows if row.concurrency == bucket_of(found.concurrency, round(sequences))]
        load = Load(sequences, request.context, context)
        tasks = tasks_at(model, here, load, kv_tokens)
        search = ShapeSearch(times, load, tasks, objective)
        free = [row.task for row in here] if follows(speculation) else []
        _, plain, fast = search.best(tuple((row.task, row.shape) for row in here), free)
        best = min(fast, key=RANK, default=plain)
        error = math.sqrt(best.seconds.relative_variance + search.tokens_variance(best))
        return StepEstimate(best.seconds.mean, best.tokens, min(best.by_task.values()), error)

    def step(sequences: float, prompt_tokens: float) -> StepEstimate:
        decoded = decoding(sequences)
        seconds = decoded.seconds + prompt_tokens * per_prompt_token
        return decoded._replace(seconds=seconds, error=decoded.error * decoded.seconds / seconds)

    return step


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Policy constants of the replica decision."""

    # Capacity of one worker.
    usable_slots: float = 0.8
    """Share of a worker's sequences to plan for without a TTFT objective; the rest absorbs bursts."""
    usable_cache: float = 0.9
    """Share of the KV cache to plan for; contexts differ in length, and cached prefixes take room."""
    bisections: int = 6
    """Halvings of the last interval of sequences; its ends differ by a factor of 2 at most, so 1 % remains."""
    max_log_error: float = 5.0
    """Bound on log(step time) above its mean; a step that may take 150 times as long is unknown anyway."""
    confidence_errors: float = 1.28
    """Standard errors of a lower confidence bound; the true value is above it in nine of ten cases."""

    # Demand.
    recent_seconds: float = 15.0
    """Window of the arrival rate that adds workers, in seconds; three polls, since fewer arrivals say little."""
    drain_seconds: float = 60.0
    """Time in which a backlog is to drain, in seconds; a new worker takes about as long to start."""
    urgent_wait_share: float = 0.5
    """Share of the TTFT objective; a longer mean wait adds a worker without waiting for a second poll."""
    max_wanted: int = 100_000
    """Upper bound on wanted workers; the measured capacity that demand is divided by may be next to zero."""

    # Changes of the replicas.
    polls_to_rise: int = 2
    """Consecutive polls with more demand than workers before workers are added; one poll may be a burst."""
    headroom: float = 1.1
    """Factor on demand before a worker is removed; the others must carry a tenth more than was measured."""
    watched_seconds: float = 120.0
    """Longest time between two polls of one scale-down window: the state is stored once a minute, and a new operator
    takes some time to start."""


TUNING = Tuning()


# Arrivals and arrival rates from the report differences of the last minute.


def arrival_rate(window: Iterable[Delta], *, now: float, within: float, standard_errors: float = 0) -> float:
    """Return the requests per second that arrived within the last ``within`` seconds.

    Args:
        window: Differences of the reports, one for each poll.
        now: Present time, in seconds since the epoch.
        within: Length of the period, in seconds.
        standard_errors: Distance of a lower confidence bound from the mean, for Poisson arrivals: n arrivals have a
            standard error of sqrt(n). With 0 the mean is returned.
    """
    recent = [delta for delta in window if delta.at > now - within]
    seconds, count = sum(delta.seconds for delta in recent), arrivals(recent)
    return max(0.0, count - standard_errors * math.sqrt(count)) / seconds if seconds > 0 else 0.0


def arrivals(window: Iterable[Delta]) -> float:
    """Return the number of requests that arrived in ``window``."""
    return sum(max(0.0, sums.arrivals) for delta in window for sums in delta.traffic.values())


# Capacity of one worker: the largest arrival rate of the observed mix at which every objective is met.
#
# At an arrival rate the number of running sequences b settles where b = rate * output * t(b) / E, with t(b) the step
# time and E the expected tokens per step; each step also reads rate * prompt * t(b) prompt tokens. Rate and prompt
# tokens both follow from b, since a step ends b * E / output requests and as many start. The search therefore goes over
# b. The draft shape is chosen again for each b, so shapes grow shallower before workers are added.

Limit = Literal["slots", "itl", "ttft", "cache"]
"""The limit that a worker reaches first, as in types.Capacity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The mean request."""

    prompt_tokens: float
    """Prompt tokens to compute, without those that the prefix cache has."""
    output_tokens: float
    context_tokens: float
    """Mean number of cached tokens while the request runs."""
    prompt_steps: int = 1
    """Steps that read the prompt."""
    prompt_seconds: float = 0
    """Seconds that reading the prompt adds to each of these steps."""
    prompt_busy_seconds: float = 0
    """Time for which a prompt keeps the worker busy that computes it, which may be another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one worker, and objectives of the deployment."""

    max_sequences: int
    cache_tokens: float | None = None
    itl_seconds: float | None = None
    ttft_seconds: float | None = None


def waiting_seconds(offered: float, slots: int, service_seconds: float) -> float:
    """Return the mean wait for a slot in seconds, by Erlang C.

    Args:
        offered: Mean number of busy slots.
        slots: Number of slots.
        service_seconds: Mean time that a request occupies its slot.

    Returns:
        Infinity if all slots are always busy.
    """
    if offered >= slots:
        return math.inf
    blocked = 1.0
    for slot in range(1, slots + 1):
        blocked = offered * blocked / (slot + offered * blocked)
    waits = blocked / (1 - offered / slots * (1 - blocked))
    return waits * service_seconds / (slots - offered)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    """The mean request, and one worker that serves it."""

    mix: Mix
    step_model: StepModel
    """Step times of the worker."""
    limits: Limits
    standard_errors: float = 0
    """Number of standard errors by which steps are assumed to be slower than their mean."""

    def capacity(self) -> Capacity:
        """Return the capacity of the worker: the mean, or with standard errors a lower confidence bound."""
        within: list[Capacity] = []
        most, last = self._most_sequences()
        for sequences in _grid(most):
            point, missed = self._point(sequences)
            if missed is not None:
                return self._bisect(within, point, missed)
            within.append(point)
        return replace(_fastest(within), limited_by=last)

    def _most_sequences(self) -> tuple[float, Limit]:
        """Return the sequences that slots and cache have room for, at least one, and the smaller of the two limits."""
        share = TUNING.usable_slots if self.limits.ttft_seconds is None else 1.0
        slots = share * self.limits.max_sequences
        cache_tokens = self.limits.cache_tokens
        cache = TUNING.usable_cache * cache_tokens / self.mix.context_tokens if cache_tokens else math.inf
        return (max(1.0, cache), "cache") if cache < slots else (max(1.0, slots), "slots")

    def _bisect(self, within: list[Capacity], outside: Capacity, limit: Limit) -> Capacity:
        """Search between the last point that meets the objectives and the first that misses one."""
        if not within:
            return replace(outside, limited_by=limit, attainable=False)
        low, high = within[-1].sequences, outside.sequences
        for _ in range(TUNING.bisections):
            point, missed = self._point((low + high) / 2)
            if missed is None:
                low = point.sequences
                within.append(point)
            else:
                high, limit = point.sequences, missed
        return replace(_fastest(within), limited_by=limit)

    def _point(self, sequences: float) -> tuple[Capacity, Limit | None]:
        """Return the steady state with ``sequences`` running, and the objective that it misses."""
        without_prompts = self.step_model(sequences, 0.0)
        ended = sequences * without_prompts.tokens / self.mix.output_tokens
        step = self.step_model(sequences, ended * self.mix.prompt_tokens)
        seconds = step.seconds * math.exp(min(TUNING.max_log_error, self.standard_errors * step.error))
        rate = sequences * step.tokens / (self.mix.output_tokens * seconds)
        point = Capacity(rate=rate, sequences=sequences, step_seconds=seconds, limited_by="slots")
        return point, _missed(sequences, seconds, step, self.mix, self.limits)


def _fastest(points: list[Capacity]) -> Capacity:
    return max(points, key=lambda point: point.rate)


def _grid(most: float) -> Iterator[float]:
    """Return the numbers of sequences to try: 1, 2, 3, 4, 6, 8, 12, ... and ``most``."""
    edge = 1.0
    while edge < most:
        yield edge
        if edge >= 2 and edge * 1.5 < most:
            yield edge * 1.5
        edge *= 2
    yield most


def _missed(sequences: float, seconds: float, step: StepEstimate, mix: Mix, limits: Limits) -> Limit | None:
    """Return the objective that is missed with ``sequences`` running. Return None if all are met."""
    if limits.itl_seconds is not None and seconds / step.least_tokens > limits.itl_seconds:
        return "itl"
    if limits.ttft_seconds is None:
        return None
    service = mix.output_tokens * seconds / step.tokens
    first = 0.5 * seconds + mix.prompt_steps * (seconds + mix.prompt_seconds)
    if first > limits.ttft_seconds:
        return "ttft"
    wait = waiting_seconds(sequences, limits.max_sequences, service)
    return "slots" if first + wait > limits.ttft_seconds else None


# Hand-over of the replicas between the operator and spec.replicas, without a change of the running number.


def take_over(
    state: ScalingState,
    *,
    spec_replicas: int,
    running: int | None,
    is_owner: bool,
    is_spec_observed: bool,
) -> ScalingState:
    """Return ``state`` with the replicas that the next decision starts from.

    The running number stays until the owner changes it. With an external owner, or without ``spec.scaling``, that is
    a change of spec.replicas: a value that was written before the operator scaled is not followed. A deployment that
    the operator leaves at rest follows it at once, because nobody else would wake the workers.

    Args:
        state: State after the previous decision; its defaults if there was none or it was lost.
        spec_replicas: spec.replicas of the deployment.
        running: Replicas of the child Deployment. None if there is none yet.
        is_owner: The operator sets the replicas.
        is_spec_observed: Status was written for this spec, so spec.replicas has not changed since.
    """
    if state.replicas is None or state.spec_replicas is None:
        replicas = _without_state(state, spec_replicas, running, is_owner=is_owner, is_spec_observed=is_spec_observed)
    elif not is_owner and (spec_replicas != state.spec_replicas or (state.owned and state.replicas == 0)):
        replicas = spec_replicas
    else:
        replicas = state.replicas
    if is_owner != state.owned:
        state = ScalingState()
    return state.model_copy(update={"replicas": replicas, "spec_replicas": spec_replicas, "owned": is_owner})


def _without_state(
    state: ScalingState, spec_replicas: int, running: int | None, *, is_owner: bool, is_spec_observed: bool
) -> int:
    """Return the replicas of a new deployment, or of one whose state was lost.

    A changed spec may be a scaling by its owner, so spec.replicas is followed then.
    """
    if is_owner:
        known = spec_replicas if state.replicas is None else state.replicas
        return known if running is None else running
    return spec_replicas if running is None or not is_spec_observed else running


# Reasons why replicas do not follow demand.

UNSCHEDULABLE = "Unschedulable"
"""Reason that the scheduler gives for a pod without a suitable node."""


def placement_problem(workload: Workload | None, workers: Iterable[Worker]) -> str | None:
    """Return why workers have no node, in the words of the scheduler or the ReplicaSet. Return None if all have one."""
    staying = [worker for worker in workers if worker.trouble and not worker.leaving]
    troubles = [(worker.placed, worker.trouble or "") for worker in staying]
    unplaced = [trouble for placed, trouble in troubles if not placed or trouble.startswith(UNSCHEDULABLE)]
    if unplaced:
        return f"{len(unplaced)} pods cannot be scheduled: {unplaced[0]}"
    if workload and workload.replica_failure and workload.replicas < workload.wanted:
        return f"{workload.wanted - workload.replicas} pods cannot be created: {workload.replica_failure}"
    return None


def scaling_limit(
    spec: ScalingSpec, wanted: int, capacity: Capacity | None, *, placement_problem: str | None = None
) -> ScalingLimit | None:
    """Return why replicas do not follow demand. Return None if they do.

    Args:
        spec: Bounds of the replicas.
        wanted: Workers that demand asks for.
        capacity: Capacity of one worker. None while it is unknown.
        placement_problem: Reason why workers have no node. None if all have one.
    """
    if placement_problem is not None:
        return ScalingLimit("Unschedulable", placement_problem)
    if wanted > spec.max_replicas:
        return ScalingLimit("AtMaximum", f"demand asks for {wanted} workers, maxReplicas is {spec.max_replicas}")
    if capacity is not None and not capacity.attainable:
        step = f"a step takes {1000 * capacity.step_seconds:.0f} ms"
        message = f"one sequence alone misses the objective ({capacity.limited_by}): {step}"
        return ScalingLimit("ObjectiveOutOfReach", message)
    return None


def is_complete(workload: Workload | None, workers: Sequence[Worker]) -> bool:
    """Return whether every placed worker is ready and has reported, and no rollout or scaling is under way.

    Workers without a node are not waited for.
    """
    if workload is None or workload.observed_generation < workload.generation:
        return False
    staying = [worker for worker in workers if not worker.leaving]
    pending = sum(not worker.placed for worker in staying)
    uncreated = max(0, workload.wanted - workload.replicas) if workload.replica_failure else 0
    return (
        workload.updated == workload.replicas == workload.wanted - uncreated
        and workload.available + pending == workload.replicas
        and all(worker.ready and worker.report is not None for worker in staying if worker.placed)
    )


# Replicas that follow demand.
#
# Demand in workers is the arrival rate over the capacity of one worker, plus the backlog over the time in which it is
# to drain, and at least the running requests over those that one worker runs at its capacity. While the capacity is
# unknown, demand is the running and waiting requests over 0.8 of the sequences that one worker may run.
#
# Workers are added after two polls with more demand than workers, or at once if requests wait too long. The arrival
# rate counts with its lower confidence bound, so a burst adds no worker; if it lasts, requests run or wait soon, which
# does. Workers are removed one at a time, after demand with headroom was below the workers for the whole scale-down
# window, and only down to its highest value within that window. In it polls without a report of every placed worker,
# and polls during rollouts, do not count.


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
    are_all_placed: bool = True
    """No worker waits for a node."""
    load: ServiceLoad | None = None
    """None while the capacity of a worker is unknown."""


Scaled = tuple[ScalingState, str]
"""State with the replicas to set, and the reason for a change, as the decision history shows it."""


@dataclass(frozen=True, slots=True)
class _Need:
    """Demand in workers."""

    wanted: int
    """Workers to add up to."""
    lasting: int
    """Workers to remove down to: with headroom, and over a longer time."""
    is_urgent: bool = False
    """Requests wait too long."""


def scale(spec: ScalingSpec, state: ScalingState, demand: Demand, *, now: float) -> Scaled:
    """Return the replicas for ``demand``.

    Args:
        spec: Bounds of the replicas, and the scale-down window.
        state: State after the previous decision. Its ``replicas`` are what is set at present.
        demand: Measured demand.
        now: Present time, in seconds since the epoch.
    """
    replicas = max(spec.min_replicas, min(spec.max_replicas, state.replicas or 0))
    if demand.requests is None:
        return state.model_copy(update={"replicas": replicas}), ""
    need = _need(demand, demand.requests, replicas)
    if need.wanted > replicas:
        return _rise(spec, state, replicas, need)
    # Waiting requests may be demand for the workers that have no node yet.
    is_measured = demand.is_complete and (demand.are_all_placed or demand.waiting == 0)
    return _fall(spec, state, replicas, need, now, seconds=demand.seconds, is_measured=is_measured)


def _need(demand: Demand, requests: float, replicas: int) -> _Need:
    if demand.load is None:
        slots = TUNING.usable_slots * demand.max_num_seqs
        wanted = _workers(requests, slots)
        return _Need(wanted, max(wanted, _workers(demand.window_requests, slots)))
    load = demand.load
    running = max(0.0, requests - demand.waiting)
    rate = load.arrival_rate_bound + demand.waiting / TUNING.drain_seconds
    wanted = max(_workers(rate, load.capacity.rate), _workers(running, load.capacity.sequences))
    is_urgent = _is_urgent(load, demand.waiting)
    if is_urgent and demand.is_complete and demand.are_all_placed:
        # Requests wait although every worker serves, so the estimated capacity is too high.
        wanted = max(wanted, replicas + 1)
    lasting = max(
        wanted,
        _workers(TUNING.headroom * load.window_arrival_rate, load.capacity_bound.rate),
        _workers(TUNING.headroom * demand.window_requests, load.capacity_bound.sequences),
    )
    return _Need(wanted, lasting, is_urgent)


def _is_urgent(load: ServiceLoad, waiting: float) -> bool:
    """Return whether requests wait too long for the TTFT objective.

    By Little's law the mean wait is the number of waiting requests over the arrival rate.
    """
    if load.ttft_seconds is None:
        return False
    rate = max(load.arrival_rate, load.window_arrival_rate, 1e-9)
    return waiting > TUNING.urgent_wait_share * load.ttft_seconds * rate and waiting >= 1


def _rise(spec: ScalingSpec, state: ScalingState, replicas: int, need: _Need) -> Scaled:
    """Add workers, if demand was above the workers for enough polls."""
    polls = state.above_polls + 1
    if polls >= TUNING.polls_to_rise or need.is_urgent:
        replicas = max(replicas, min(spec.max_replicas, need.wanted))
    return _result(state, replicas, need.wanted, above_polls=polls)


def _fall(
    spec: ScalingSpec,
    state: ScalingState,
    replicas: int,
    need: _Need,
    now: float,
    *,
    seconds: float,
    is_measured: bool,
) -> Scaled:
    """Remove a worker, if demand was below the workers for the whole window, and is not higher within it.

    A poll of ``seconds`` that was not measured completely extends the window: while all ready workers are busy,
    requests may wait for workers that are still starting.
    """
    if need.lasting >= replicas:
        return _result(state, replicas, need.wanted)
    window = spec.scale_down_window_seconds
    pause = 0 if is_measured else seconds
    # The last need is that of the poll before. What nobody watched, such as while the operator was away, is unknown.
    is_watched = not state.low_needs or now - state.low_needs[-1][0] <= TUNING.watched_seconds
    since = min(now, state.below_since + pause) if is_watched and state.below_since is not None else now
    earlier = [(min(now, at + pause), lasting) for at, lasting in state.low_needs if lasting > need.lasting]
    needs = tuple((at, lasting) for at, lasting in (*earlier, (now, need.lasting)) if now - at <= window)
    if is_measured and now - since >= window:
        replicas = max(spec.min_replicas, min(replicas, max(replicas - 1, needs[0][1])))
    return _result(state, replicas, need.wanted, below_since=since, low_needs=needs)


def _result(
    state: ScalingState,
    replicas: int,
    wanted: int,
    *,
    above_polls: int = 0,
    below_since: float | None = None,
    low_needs: tuple[tuple[float, int], ...] = (),
) -> Scaled:
    update = {"replicas": replicas, "wanted": wanted, "above_polls": above_polls}
    state = state.model_copy(update={**update, "below_since": below_since, "low_needs": low_needs})
    return state, f"demand asks for {wanted} workers"


def _workers(demand: float, capacity: float) -> int:
    """Return how many workers of ``capacity`` carry ``demand``."""
    if demand <= 0:
        return 0
    return TUNING.max_wanted if demand > capacity * TUNING.max_wanted else math.ceil(demand / capacity - 1e-9)


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
    spec: ScalingSpec, state: ScalingState, demand: Demand, activity: Activity, *, now: float
) -> Scaled:
    """Return the replicas for ``demand``, where minReplicas may be 0. The other arguments are those of ``scale``."""
    if spec.min_replicas > 0:
        return scale(spec, state, demand, now=now)
    if state.replicas == 0:
        return _wake(spec, state.model_copy(update={"idle_since": None}), demand, activity.held)
    state, reason = scale(spec.model_copy(update={"min_replicas": 1}), state, demand, now=now)
    since = state.idle_since if activity.is_quiet is not False else None
    if activity.is_quiet and since is None:
        since = now
    if not activity.is_quiet or since is None or now - since < spec.idle_seconds:
        return state.model_copy(update={"idle_since": since}), reason
    rests, _ = _result(state.model_copy(update={"idle_since": None}), 0, 0)
    return rests, f"no requests for {spec.idle_seconds} s"


def _wake(spec: ScalingSpec, state: ScalingState, demand: Demand, held: int) -> Scaled:
    """Start workers for held requests. The rate of arrivals before the rest says nothing about now."""
    wanted = math.ceil(held / max(1.0, TUNING.usable_slots * demand.max_num_seqs))
    reason = "routers hold a request" if held == 1 else f"routers hold {held} requests"
    return _result(state, min(spec.max_replicas, wanted), wanted)[0], reason


# Stage size: the decision for a deployment, from its reports.

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
    state = take_over(
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
        problem = placement_problem(observed.workload, observed.workers)
        load = _service_load(worker, window, now) if worker else None
        demand = _demand(deployment, observed, delta, window, load, are_all_placed=problem is None)
        activity = Activity()
        if spec.paused or (delta is None and not window):  # After a start nobody knows of the requests before it.
            state = state.model_copy(update={"idle_since": None})
        if not spec.paused:
            activity = activity_of(observed.workers, delta, held_requests(observed.demand, now))
        after, reason = scale_to_activity(spec.scaling, state, demand, activity, now=now)
        decision = _decision(deployment, spec.scaling, running, after, reason, load, problem)
        state = after.model_copy(update={"replicas": decision.replicas})
    return replace(decision, prefill=prefill_replicas(deployment, observed, worker, window, now)), state


def prefill_replicas(
    deployment: Deployment,
    observed: Observation,
    worker: WorkerModel | None,
    window: tuple[Delta, ...],
    now: float,
) -> int:
    """Return the prefill workers that compute all prompt tokens that no cache has, within the bounds of the spec.

    They are busy for PREFILL_BUSY of the time at most, because a prompt that has to wait is better computed at once.
    One is taken away only if all workers have reported, and the others would be busy for less than PREFILL_IDLE.
    """
    spec, running = deployment.spec.prefill, observed.prefill_workload.wanted if observed.prefill_workload else 0
    if spec.max_replicas is None:
        return spec.replicas
    wanted = running
    if worker is not None and not deployment.spec.paused:
        rate = arrival_rate(window, now=now, within=WINDOW_SECONDS)
        busy = rate * worker.mix.prompt_busy_seconds
        # Workers that did not report have prompts too.
        fewest = math.ceil(busy / PREFILL_IDLE) if is_complete(observed.workload, observed.workers) else running
        wanted = max(math.ceil(busy / PREFILL_BUSY), min(running, fewest))
    return max(spec.replicas, min(spec.max_replicas, wanted))


def max_num_seqs(deployment: Deployment, observed: Observation) -> int:
    """Return the sequences that one worker runs at most: by its report, or by the spec before there is one."""
    return min((report.max_num_seqs for report in observed.reports), default=deployment.spec.engine.max_num_seqs)


def kv_tokens(observed: Observation) -> float | None:
    """Return the size of the smallest KV cache in tokens. Return None if no worker reports one."""
    sizes = [float(report.kv_tokens_total) for report in observed.last_reports if report.kv_tokens_total > 0]
    return min(sizes, default=None)


def _worker_model(deployment: Deployment, observed: Observation, learned: LearnedState) -> WorkerModel | None:
    """Return one worker under the present mix of requests. Return None while requests or step times are unknown."""
    request = request_of(learned)
    if request is None:
        return None
    # A paused deployment keeps a pin that its spec may not have any more.
    pin = None if deployment.spec.paused else read_pin(learned.pin, deployment.spec.speculation)
    speculation = as_pinned(deployment.spec.speculation, pin)
    cache = kv_tokens(observed)
    buckets = buckets_for(deployment.spec.engine.max_num_seqs)
    objective = objective_of(speculation.objective, learned, observed.last_reports, deployment.spec.step_tokens)
    step_model = step_pace(speculation, learned, buckets, request, objective, kv_tokens=cache)
    if step_model is None:
        return None
    is_apart = bool(observed.prefill_addresses)
    mix = Mix(
        prompt_busy_seconds=objective.prompt.steps * objective.prompt.seconds,
        prompt_tokens=0.0 if is_apart else request.prompt,
        output_tokens=request.output,
        context_tokens=request.context,
        prompt_steps=1 if is_apart else objective.prompt.steps,
        prompt_seconds=0.0 if is_apart else objective.prompt.seconds,
    )
    itl, ttft = objective.asked.itl_seconds, objective.asked.ttft_seconds
    limits = Limits(
        max_sequences=max_num_seqs(deployment, observed),
        cache_tokens=cache,
        itl_seconds=None if itl is None else itl / objective.itl_ratio,
        # With prefill workers, these are sized for first tokens, and workers for inter-token latencies.
        ttft_seconds=None if ttft is None or is_apart else ttft / objective.ttft_ratio,
    )
    return WorkerModel(mix=mix, step_model=step_model, limits=limits)


def _service_load(worker: WorkerModel, window: tuple[Delta, ...], now: float) -> ServiceLoad:
    """Return arrival rates and the capacity of one worker."""
    rate = partial(arrival_rate, window, now=now)
    return ServiceLoad(
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
    load: ServiceLoad | None,
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
        limited=scaling_limit(spec, wanted, capacity, placement_problem=problem) if is_owner else None,
        reason=reason,
    )


def _demand(
    deployment: Deployment,
    observed: Observation,
    delta: Delta | None,
    window: tuple[Delta, ...],
    load: ServiceLoad | None,
    *,
    are_all_placed: bool,
) -> Demand:
    """Return the measured demand.

    While the capacity of a worker is unknown, waiting requests count as running ones. Afterwards they are a backlog,
    which needs workers only until it has drained.
    """
    last_minute = over(window)
    return Demand(
        requests=delta.running + delta.waiting if delta and not deployment.spec.paused else None,
        window_requests=last_minute.running if load else last_minute.running + last_minute.waiting,
        waiting=delta.waiting if delta and load else 0.0,
        max_num_seqs=max_num_seqs(deployment, observed),
        seconds=delta.seconds if delta else 0.0,
        is_complete=is_complete(observed.workload, observed.workers),
        are_all_placed=are_all_placed,
        load=load,
    )
