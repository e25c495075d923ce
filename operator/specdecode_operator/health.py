"""Acceptance and step times of each pod, compared with its own past and its peers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from statistics import median
from typing import NamedTuple

from specdecode_operator.planning.acceptance import bounds_of, effect_of, follows, names
from specdecode_operator.state.learned import LearnedState, PodState, PodTaskState
from specdecode_operator.telemetry.counters import NO_REQUESTS, CellKey, Delta, Hits, Moments, RequestSums
from specdecode_operator.types import Deployment, Observation, Remediation, UnhealthyWorker, Worker
from specdecode_worker.contract import Plan, TreeShape

# Thresholds for outliers among the workers, with unit and reason.


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Policy constants of worker health."""

    # Acceptance of the first drafted token.
    recent_half_life_drafts: float = 100.0
    """Half-life of a worker's recent acceptance, in drafts; a collapse shows within one or two polls."""
    past_half_life_drafts: float = 5000.0
    """Half-life of a worker's past acceptance, in drafts; much longer than it takes to detect a collapse."""
    request_half_life: float = 50.0
    """Half-life of the request sums that give the variance between requests, in requests."""
    min_past_drafts: float = 200.0
    """Drafts before a worker's past is used as its expectation; the standard error is then below 0.04."""
    min_recent_drafts: float = 30.0
    """Drafts before a worker's recent acceptance is compared; fewer drafts rarely reach ``outlier_errors``."""
    collapsed_ratio: float = 0.5
    """Ratio to the expectation below which acceptance has collapsed; tasks differ less (0.45 to 0.88 in the guides)."""
    recovered_ratio: float = 0.75
    """Ratio to the expectation above which a worker has recovered; well above ``collapsed_ratio``, as hysteresis."""
    common_ratio: float = 0.7
    """Ratio to the peers above which a fall is common to all workers, so the traffic or the draft is its cause."""
    outlier_errors: float = 4.0
    """Standard errors below the expectation that make an outlier; workers are compared every few seconds for months."""
    freeze_errors: float = 2.0
    """Standard errors below the expectation at which the past is frozen, so that a collapse does not lower it."""
    outlier_polls: int = 2
    """Polls with drafts in a row that find an outlier before it is a collapse; one may be an odd batch of requests."""
    min_peers: int = 2
    """Peers needed to judge a worker without a past."""

    # Step time.
    slow_ratio: float = 1.5
    """Ratio of step times to the median peer above which a worker is slow; below it devices just differ."""
    slow_seconds: float = 60.0
    """Seconds that a worker must be slow before it is reported; neighbours may be noisy for a while."""
    step_time_half_life_seconds: float = 20.0
    """Half-life of a worker's relative step time, in seconds; about four polls."""
    max_log_step_time: float = math.log(8)
    """Bound on the logarithm of the correction of step times; devices of one deployment differ less."""

    # State and replacement.
    forget_seconds: float = 900.0
    """Seconds after which the state of an absent pod is dropped; a pod does not come back later."""
    replace_after_seconds: float = 60.0
    """Seconds that a collapse must last without speculation before the worker is replaced; some recover."""
    replace_interval_seconds: float = 600.0
    """Seconds between two replacements of serving workers; if new pods collapse too, pods are not the cause."""


TUNING = Tuning()


# Detection of outliers among the workers: collapsed acceptance, and slow steps.
#
# Acceptance is that of the first drafted token, by task, so that a different mix of tasks is no collapse. A worker is
# compared with its own past, which is frozen while the worker looks unhealthy, and with its peers at present. A fall
# that all workers share comes from the traffic or the draft, and the planner handles it. A worker without peers is
# therefore never an outlier.

WorkerDelta = tuple[str, str, Delta]
"""Uid and boot id of a worker, and the differences of its reports since the previous poll."""


class _Comparison(NamedTuple):
    """Recent acceptance of a worker against an expectation."""

    ratio: float
    """Accepted first tokens over the expected ones."""
    errors: float
    """Standard errors below the expectation."""


def learn_pods(
    learned: LearnedState, deltas: Sequence[WorkerDelta], *, present: Collection[str] = (), now: float
) -> tuple[PodState, ...]:
    """Return the states of all pods after one poll. Differences from another draft are ignored.

    Args:
        learned: State of the deployment before the poll.
        deltas: Differences of each worker with a new reading.
        present: Uids of the existing pods; their state is not dropped, however long they are idle. Others are no peers.
        now: Present time, in seconds since the epoch.
    """
    pods = {pod.uid: pod for pod in learned.pods if pod.uid in present or now - pod.at < TUNING.forget_seconds}
    drafted = {uid for uid, _, delta in deltas if any(hits.total for hits in delta.acceptance.values())}
    for uid, boot, delta in deltas:
        if delta.draft == learned.draft:
            known = pods.get(uid, PodState(uid=uid, draft=learned.draft))
            pods[uid] = _updated(_for_boot(known, boot, learned.draft), delta, learned, now)
    peers = {uid: pod for uid, pod in pods.items() if not present or uid in present}
    return tuple(
        _judged(pods[uid], [peers[other] for other in peers if other != uid], now, has_drafted=uid in drafted)
        for uid in sorted(pods)
    )


def suspected(learned: LearnedState) -> frozenset[str]:
    """Return the uids of the workers whose acceptance collapsed."""
    return frozenset(pod.uid for pod in learned.pods if pod.collapsed_since is not None)


def relative_pace(pod: PodState, pods: Iterable[PodState]) -> float | None:
    """Return the step time of ``pod`` over that of its median peer, for steps of the same kinds.

    Return None if the pod or every peer was never timed.
    """
    peers = [peer.pace for peer in pods if peer.uid != pod.uid and peer.pace is not None]
    return None if pod.pace is None or not peers else math.exp(pod.pace - median(peers))


def evened(pods: Iterable[PodState], deltas: Iterable[WorkerDelta]) -> list[WorkerDelta]:
    """Return ``deltas`` with the step times that the median worker would have had.

    All workers together determine the step times of the deployment. Without this correction shapes would depend on
    which of several different devices ran them.
    """
    logs = {pod.uid: pod.pace for pod in pods if pod.pace is not None}
    deltas = list(deltas)
    timed = [logs[uid] for uid, _, _ in deltas if uid in logs]
    middle = median(timed) if timed else 0.0
    bound = TUNING.max_log_step_time
    factors = {uid: math.exp(max(-bound, min(bound, middle - log))) for uid, log in logs.items()}
    return [(uid, boot, delta.taking(factors[uid]) if uid in factors else delta) for uid, boot, delta in deltas]


def _for_boot(pod: PodState, boot: str, draft: str) -> PodState:
    """Return the state for this boot and draft: a new draft resets it, a new boot resets the recent acceptance."""
    if pod.draft != draft:
        return PodState(uid=pod.uid, boot=boot, draft=draft)
    if pod.boot == boot:
        return pod
    tasks = tuple(task.model_copy(update={"hits": 0.0, "total": 0.0}) for task in pod.tasks)
    return pod.model_copy(update={"boot": boot, "tasks": tasks, "collapsed_since": None, "doubts": 0})


def _updated(pod: PodState, delta: Delta, learned: LearnedState, now: float) -> PodState:
    """Return the state after one poll, without a new verdict."""
    tasks = {task.task: task for task in pod.tasks}
    is_past_frozen = pod.collapsed_since is not None or pod.noticed
    for (name, depth), hits in delta.acceptance.items():
        if depth == 1 and hits.total > 0:
            tasks[name] = _updated_task(tasks.get(name, PodTaskState(task=name)), hits, is_past_frozen=is_past_frozen)
    log = _log_step_time(delta.steps, learned)
    if log is not None and pod.pace is not None:
        weight = 1 - 0.5 ** (delta.seconds / TUNING.step_time_half_life_seconds)
        log = pod.pace + weight * (log - pod.pace)
    return pod.model_copy(
        update={
            "tasks": tuple(tasks[name] for name in sorted(tasks)),
            "requests": _updated_requests(RequestSums(*pod.requests), delta),
            "pace": pod.pace if log is None else _rounded(log),
            "at": now,
        }
    )


def _updated_task(task: PodTaskState, hits: Hits, *, is_past_frozen: bool) -> PodTaskState:
    """Return the task with new drafts. Drafts become the past only when they are no longer recent.

    This delay leaves time to detect a collapse before it lowers the past.
    """
    remaining = 0.5 ** (hits.total / TUNING.recent_half_life_drafts)
    update = {
        "hits": _rounded(task.hits * remaining + hits.hits),
        "total": _rounded(task.total * remaining + hits.total),
    }
    if not is_past_frozen:
        old_hits, old_total = task.hits * (1 - remaining), task.total * (1 - remaining)
        decay = 0.5 ** (old_total / TUNING.past_half_life_drafts)
        update["past_hits"] = _rounded(task.past_hits * decay + old_hits)
        update["past_total"] = _rounded(task.past_total * decay + old_total)
    return task.model_copy(update=update)


def _updated_requests(sums: RequestSums, delta: Delta) -> tuple[float, ...]:
    fresh = reduce(RequestSums.plus, delta.requests.values(), NO_REQUESTS)
    return tuple(map(_rounded, sums.times(0.5 ** (fresh.n / TUNING.request_half_life)).plus(fresh)))


def _log_step_time(steps: Mapping[CellKey, Moments], learned: LearnedState) -> float | None:
    """Return log(step time over the deployment's step time), for steps of the same kinds. Return None without any."""
    usual = {
        (cell.tokens_bucket, cell.draft_passes, cell.context_bucket): Moments(cell.values) for cell in learned.costs
    }
    measured = expected = 0.0
    for key, moments in steps.items():
        kind = usual.get((key.tokens_bucket, key.draft_passes, key.context_bucket))
        if not key.prefill and kind is not None and kind.count > 0:
            measured += moments.seconds
            expected += moments.count * kind.mean_seconds
    return math.log(measured / expected) if measured > 0 and expected > 0 else None


# --- verdicts -----------------------------------------------------------------------------------------------------


def _judged(pod: PodState, peers: Sequence[PodState], now: float, *, has_drafted: bool) -> PodState:
    """Return the state with a new verdict, if this poll had a reading of the pod.

    The variance between requests comes from the healthy peers. The requests of a collapsing worker differ from its
    earlier ones, and the larger variance would hide the collapse. Without new drafts (``has_drafted``) the evidence is
    that of an earlier poll, and is not counted as another outlier.
    """
    if pod.at != now:
        return pod
    healthy = [peer for peer in peers if peer.collapsed_since is None]
    effect = effect_of(RequestSums(*peer.requests) for peer in healthy)
    own, others = _against_past(pod, effect), _against_peers(pod, healthy, effect)
    collapsed = pod.collapsed_since
    polls = pod.doubts + has_drafted if _is_outlier(own, others, len(healthy)) else 0
    if collapsed is None and polls >= TUNING.outlier_polls:
        collapsed = now
    elif collapsed is not None and _has_recovered(own, others):
        collapsed, polls = None, 0
    relative = relative_pace(pod, peers)
    is_slow = relative is not None and relative >= TUNING.slow_ratio
    return pod.model_copy(
        update={
            "collapsed_since": collapsed,
            "noticed": min(_errors(own), _errors(others)) > TUNING.freeze_errors,
            "doubts": polls,
            "slow_since": (pod.slow_since or now) if is_slow else None,
        }
    )


def _is_outlier(own: _Comparison | None, others: _Comparison | None, peers: int) -> bool:
    """Return whether acceptance is far below the worker's own past and below its peers.

    A worker without a past is compared with its peers alone, if there are enough of them.
    """
    if others is None or others.errors < TUNING.outlier_errors:
        return False
    if own is not None:
        is_below_past = own.ratio < TUNING.collapsed_ratio and own.errors > TUNING.outlier_errors
        return is_below_past and others.ratio < TUNING.common_ratio
    return peers >= TUNING.min_peers and others.ratio < TUNING.collapsed_ratio


def _errors(comparison: _Comparison | None) -> float:
    return comparison.errors if comparison else 0.0


def _has_recovered(own: _Comparison | None, others: _Comparison | None) -> bool:
    """Return whether acceptance is near the worker's own past, or near its peers."""
    return any(one is not None and one.ratio > TUNING.recovered_ratio for one in (own, others))


def _against_past(pod: PodState, effect: float) -> _Comparison | None:
    tasks = [task for task in pod.tasks if task.past_total >= TUNING.min_past_drafts]
    return _compare(pod, {task.task: task.past_hits / task.past_total for task in tasks}, effect)


def _against_peers(pod: PodState, peers: Iterable[PodState], effect: float) -> _Comparison | None:
    sums: dict[str, Hits] = {}
    for peer in peers:
        for task in peer.tasks:
            sums[task.task] = sums.get(task.task, Hits(0, 0)).plus(Hits(task.hits, task.total))
    rates = {name: hits.hits / hits.total for name, hits in sums.items() if hits.total >= TUNING.min_recent_drafts}
    return _compare(pod, rates, effect)


def _compare(pod: PodState, rates: Mapping[str, float], effect: float) -> _Comparison | None:
    """Compare recent acceptance with the expected ``rates`` by task. Return None if there are too few drafts.

    ``effect`` is the factor on the variance of independent drafts, since drafts of one request are similar.
    """
    tasks = [task for task in pod.tasks if task.task in rates]
    total, expected = sum(task.total for task in tasks), sum(task.total * rates[task.task] for task in tasks)
    if total < TUNING.min_recent_drafts or expected <= 0:
        return None
    hits = sum(task.hits for task in tasks)
    rate = min(0.99, expected / total)
    error = math.sqrt(max(1e-9, expected * (1 - rate) * effect))
    return _Comparison(hits / expected, (expected - hits) / error)


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


# Remediation of unhealthy workers: they are reported, run without speculation, and are replaced if the spec allows.


def heal(
    deployment: Deployment,
    observed: Observation,
    learned: LearnedState,
    plan: Plan,
    *,
    is_complete: bool,
    now: float,
) -> Remediation:
    """Choose the actions on unhealthy workers.

    Args:
        deployment: The deployment.
        observed: The workers.
        learned: Health of the workers, and the last replacement.
        plan: Plan of the healthy workers.
        is_complete: Every placed worker is ready and has reported, and no rollout is under way.
        now: Present time, in seconds since the epoch.
    """
    spec, workers = deployment.spec, observed.workers
    states = {pod.uid: pod for pod in learned.pods}
    known = [(worker, states[worker.uid]) for worker in workers if worker.uid in states and not worker.leaving]
    peers = [pod for _, pod in known]  # a worker that has left is nobody's peer
    collapsed = [(worker, pod) for worker, pod in known if pod.collapsed_since is not None]
    may_be_plain = all(bounds_of(spec.speculation, name).least == 0 for name in names(spec.speculation))
    can_disable = follows(spec.speculation) and not spec.paused and may_be_plain
    disabled = [worker for worker, _ in collapsed if worker.address] if can_disable else []
    recycled_at = now if _is_replaced(learned.recycling, workers) else learned.recycled_at
    is_early = recycled_at is not None and now - recycled_at < TUNING.replace_interval_seconds
    serving = sum(worker.placed and not worker.leaving for worker in workers)
    evicted = None
    if spec.workers.recycle == "OnCollapse" and not spec.paused:
        evicted = _to_evict(collapsed, now, may_be_ready=is_complete and serving > 1 and not is_early)
    is_expected = any(worker.uid == learned.recycling for worker, _ in collapsed)
    plan = plain_plan(plan)
    return Remediation(
        unhealthy=tuple(one for worker, pod in known for one in _unhealthy(worker, pod, peers, now)),
        own=frozenset(worker.address for worker in disabled if worker.address),
        own_plans={worker.address: plan for worker in disabled if worker.address and not _runs(worker, plan)},
        recycle=(evicted.name,) if evicted else (),
        # The eviction that was proposed before may still be under way.
        recycling=evicted.uid if evicted else learned.recycling if is_expected else "",
        recycled_at=recycled_at,
    )


def plain_plan(plan: Plan) -> Plan:
    """Return ``plan`` without speculation, for one worker. Shadow drafts continue, so that a recovery shows."""
    return plan.model_copy(update={"rows": (), "initial": TreeShape(()), "quiet": True})


def _runs(worker: Worker, plan: Plan) -> bool:
    """Return whether the worker runs the plain plan. A worker without a report is not asked to."""
    report = worker.report
    return report is None or (report.plan.quiet and report.plan.version == plan.version)


def _is_replaced(recycling: str, workers: Iterable[Worker]) -> bool:
    """Return whether the pod of the previous proposal terminates or is gone."""
    return bool(recycling) and all(worker.leaving for worker in workers if worker.uid == recycling)


def _to_evict(collapsed: Iterable[tuple[Worker, PodState]], now: float, *, may_be_ready: bool) -> Worker | None:
    """Return the worker to evict: the one that collapsed first.

    A worker that is not ready serves nothing, so it goes first and may go at any time. One that is ready goes only
    while all others serve, and not soon after another replacement.
    """
    lasting = [
        (worker.ready, pod.collapsed_since, worker.name, worker)
        for worker, pod in collapsed
        if pod.collapsed_since is not None and now - pod.collapsed_since >= TUNING.replace_after_seconds
    ]
    worker = min(lasting, key=lambda candidate: candidate[:3])[3] if lasting else None
    return worker if worker is None or may_be_ready or not worker.ready else None


def _unhealthy(worker: Worker, pod: PodState, peers: list[PodState], now: float) -> Iterator[UnhealthyWorker]:
    """Yield the findings on one worker, for the condition."""
    if pod.collapsed_since is not None:
        yield UnhealthyWorker(worker.name, "AcceptanceCollapsed", f"{_fall_message(pod)}; its peers are well")
    step_time = relative_pace(pod, peers)
    if pod.slow_since is not None and step_time is not None and now - pod.slow_since >= TUNING.slow_seconds:
        message = f"its steps take {step_time:.1f} times as long as those of its peers"
        yield UnhealthyWorker(worker.name, "SlowSteps", message)


def _fall_message(pod: PodState) -> str:
    """Return the recent acceptance of the first token, and the past one for the same tasks."""
    tasks = [task for task in pod.tasks if task.past_total >= TUNING.min_past_drafts]
    total = sum(task.total for task in tasks)
    if total <= 0:
        return "acceptance far below its peers"
    expected = sum(task.total * task.past_hits / task.past_total for task in tasks)
    return f"first token accepted {sum(task.hits for task in tasks) / total:.2f}, usually {expected / total:.2f}"
