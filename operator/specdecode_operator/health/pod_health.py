"""Workers held against themselves and each other: whose acceptance collapsed, and who is slow.

Acceptance is that of the first drafted token, by task, so that another mix of tasks is no collapse. A worker is held
against its own past, frozen while it is under suspicion, and against its peers now: what all of them lose is the
traffic's or the draft's doing, and the plan's business. A worker without peers is therefore never suspected.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from statistics import median

from specdecode_operator.planning.acceptance import effect_of
from specdecode_operator.state.learned import LearnedState, PodState, PodTaskState
from specdecode_operator.telemetry.counters import NO_REQUESTS, CellKey, Hits, Moments, RequestSums
from specdecode_operator.telemetry.deltas import Delta

HALF_LIFE_FRESH_DRAFTS, HALF_LIFE_PAST_DRAFTS = 100.0, 5000.0
"""What a worker does now, and what it used to do: a collapse is found long before it has become the past."""
HALF_LIFE_REQUESTS = 50.0
LEAST_PAST_DRAFTS, LEAST_FRESH_DRAFTS = 200.0, 30.0
COLLAPSED, HEALED = 0.5, 0.75
"""Shares of the expected acceptance below which a worker is suspected, and above which it is no more. Half is more
than any task in the guides differs from another (0.45 to 0.88)."""
COMMON = 0.7
"""Peers that are expected to do no better than this have fallen as well."""
SURPRISE = 4.0
"""Standard errors; workers are looked at every few seconds for months."""
NOTICED = 2.0
"""Standard errors from which on a worker's past waits: a collapse must not pull down what it is held against."""
DOUBTS = 2
"""Polls in a row, so that one odd batch of requests is no collapse."""
LEAST_PEERS = 2
"""To hold a worker without a past against the others alone."""
SLOW = 1.5
"""Times the pace of the peers."""
SLOW_SECONDS = 60.0
HALF_LIFE_PACE_SECONDS = 20.0
MOST_PACE = math.log(8)
"""No device is held to be faster or slower than the others by more."""
FORGET_SECONDS = 900.0
"""A pod that was not seen for so long does not come back."""

WorkerDelta = tuple[str, str, Delta]
"""(uid, boot id, what it did since the last poll)."""


def learn_pods(
    learned: LearnedState, found: Iterable[WorkerDelta], *, present: Collection[str] = (), now: float
) -> tuple[PodState, ...]:
    """What is known of every pod, moved by one poll. What was done with another draft is not looked at.

    Those that are ``present`` are not forgotten, however long they were idle.
    """
    pods = {pod.uid: pod for pod in learned.pods if pod.uid in present or now - pod.at < FORGET_SECONDS}
    for uid, boot, delta in found:
        if delta.draft == learned.draft:
            known = pods.get(uid, PodState(uid=uid, draft=learned.draft))
            pods[uid] = _learnt(_of_boot(known, boot, learned.draft), delta, learned, now)
    return tuple(_judged(pods[uid], [pods[other] for other in pods if other != uid], now) for uid in sorted(pods))


def suspected(learned: LearnedState) -> frozenset[str]:
    """Uids of the pods whose acceptance collapsed."""
    return frozenset(pod.uid for pod in learned.pods if pod.collapsed_since is not None)


def expectation(pod: PodState) -> tuple[float, float] | None:
    """(acceptance of the first token now, what it used to be for the same tasks); None before both are known."""
    fresh = [task for task in pod.tasks if task.past_total >= LEAST_PAST_DRAFTS]
    total = sum(task.total for task in fresh)
    if total <= 0:
        return None
    usual = sum(task.total * task.past_hits / task.past_total for task in fresh)
    return sum(task.hits for task in fresh) / total, usual / total


def relative_pace(pod: PodState, pods: Iterable[PodState]) -> float | None:
    """Seconds of this pod's steps over those of its peers' median, for steps of the same kind; None without peers."""
    others = [other.pace for other in pods if other.uid != pod.uid and other.pace is not None]
    return None if pod.pace is None or not others else math.exp(pod.pace - median(others))


def evened(pods: Iterable[PodState], found: Iterable[WorkerDelta]) -> list[WorkerDelta]:
    """``found`` with steps as long as the median pod would have taken for them. What a step costs is told by several
    pods together: were they of different devices, or had one a noisy neighbour, shapes would differ by who ran them."""
    paces = {pod.uid: pod.pace for pod in pods if pod.pace is not None}
    deltas = list(found)
    here = [paces[uid] for uid, _, _ in deltas if uid in paces]
    middle = median(here) if here else 0.0
    factors = {uid: math.exp(max(-MOST_PACE, min(MOST_PACE, middle - pace))) for uid, pace in paces.items()}
    return [(uid, boot, delta.taking(factors[uid]) if uid in factors else delta) for uid, boot, delta in deltas]


def _of_boot(pod: PodState, boot: str, draft: str) -> PodState:
    """Another draft makes another pod of it; another boot a fresh start with the same past."""
    if pod.draft != draft:
        return PodState(uid=pod.uid, boot=boot, draft=draft)
    if pod.boot == boot:
        return pod
    tasks = tuple(task.model_copy(update={"hits": 0.0, "total": 0.0}) for task in pod.tasks)
    return pod.model_copy(update={"boot": boot, "tasks": tasks, "collapsed_since": None, "doubts": 0})


def _learnt(pod: PodState, delta: Delta, learned: LearnedState, now: float) -> PodState:
    tasks = {task.task: task for task in pod.tasks}
    for (name, depth), hits in delta.acceptance.items():
        if depth == 1 and hits.total > 0:
            trusted = pod.collapsed_since is None and not pod.noticed
            tasks[name] = _task(tasks.get(name, PodTaskState(task=name)), hits, trusted)
    pace = _pace(delta.steps, learned)
    if pace is not None and pod.pace is not None:
        pace = pod.pace + (1 - 0.5 ** (delta.seconds / HALF_LIFE_PACE_SECONDS)) * (pace - pod.pace)
    return pod.model_copy(
        update={
            "tasks": tuple(tasks[name] for name in sorted(tasks)),
            "requests": _requests(RequestSums(*pod.requests), delta),
            "pace": pod.pace if pace is None else _short(pace),
            "at": now,
        }
    )


def _task(known: PodTaskState, fresh: Hits, trusted: bool) -> PodTaskState:
    """What is fresh no more becomes the past, and not sooner: it takes some drafts to notice a collapse."""
    keep = 0.5 ** (fresh.total / HALF_LIFE_FRESH_DRAFTS)
    update = {"hits": _short(known.hits * keep + fresh.hits), "total": _short(known.total * keep + fresh.total)}
    if trusted:
        hits, total = known.hits * (1 - keep), known.total * (1 - keep)
        past = 0.5 ** (total / HALF_LIFE_PAST_DRAFTS)
        update["past_hits"] = _short(known.past_hits * past + hits)
        update["past_total"] = _short(known.past_total * past + total)
    return known.model_copy(update=update)


def _requests(known: RequestSums, delta: Delta) -> tuple[float, ...]:
    fresh = reduce(RequestSums.plus, delta.requests.values(), NO_REQUESTS)
    learned = known.times(0.5 ** (fresh.n / HALF_LIFE_REQUESTS)).plus(fresh)
    return tuple(map(_short, learned))


def _pace(steps: Mapping[CellKey, Moments], learned: LearnedState) -> float | None:
    """Logarithm of the time that steps took, over what the fleet takes for steps of the same kinds."""
    known = {
        (cell.tokens_bucket, cell.draft_passes, cell.context_bucket): Moments(cell.values) for cell in learned.costs
    }
    took = usual = 0.0
    for key, moments in steps.items():
        kind = known.get((key.tokens_bucket, key.draft_passes, key.context_bucket))
        if not key.prefill and kind is not None and kind.count > 0:
            took += moments.seconds
            usual += moments.count * kind.mean_seconds
    return math.log(took / usual) if took > 0 and usual > 0 else None


# --- verdicts -----------------------------------------------------------------------------------------------------


def _judged(pod: PodState, peers: Sequence[PodState], now: float) -> PodState:
    """By the peers' requests one knows how much requests differ: those of a worker that collapses differ from what
    they were, and would excuse it."""
    if pod.at != now:
        return pod
    healthy = [peer for peer in peers if peer.collapsed_since is None]
    effect = effect_of(RequestSums(*peer.requests) for peer in healthy)
    own, others = _own(pod, effect), _by_peers(pod, healthy, effect)
    collapsed, noticed = pod.collapsed_since, min(_surprise(own), _surprise(others)) > NOTICED
    doubts = pod.doubts + 1 if _fell(own, others, len(healthy)) else 0
    if collapsed is None and doubts >= DOUBTS:
        collapsed = now
    elif collapsed is not None and _well(own, others):
        collapsed, doubts = None, 0
    relative = relative_pace(pod, peers)
    slow = None if relative is None or relative < SLOW else (pod.slow_since or now)
    return pod.model_copy(
        update={"collapsed_since": collapsed, "noticed": noticed, "doubts": doubts, "slow_since": slow}
    )


def _fell(own: tuple[float, float] | None, others: tuple[float, float] | None, peers: int) -> bool:
    """Far below its own past, where the peers are not; without a past, far below enough peers."""
    if others is None or others[1] < SURPRISE:
        return False
    if own is not None:
        return own[0] < COLLAPSED and own[1] > SURPRISE and others[0] < COMMON
    return peers >= LEAST_PEERS and others[0] < COLLAPSED


def _surprise(found: tuple[float, float] | None) -> float:
    return found[1] if found else 0.0


def _well(own: tuple[float, float] | None, others: tuple[float, float] | None) -> bool:
    """As good as it used to be, or as the others are now."""
    return any(found is not None and found[0] > HEALED for found in (own, others))


def _own(pod: PodState, effect: float) -> tuple[float, float] | None:
    rates = {task.task: task.past_hits / task.past_total for task in pod.tasks if task.past_total >= LEAST_PAST_DRAFTS}
    return _against(pod, rates, effect)


def _by_peers(pod: PodState, peers: Iterable[PodState], effect: float) -> tuple[float, float] | None:
    sums: dict[str, Hits] = {}
    for peer in peers:
        for task in peer.tasks:
            sums[task.task] = sums.get(task.task, Hits(0, 0)).plus(Hits(task.hits, task.total))
    rates = {name: hits.hits / hits.total for name, hits in sums.items() if hits.total >= LEAST_FRESH_DRAFTS}
    return _against(pod, rates, effect)


def _against(pod: PodState, rates: Mapping[str, float], effect: float) -> tuple[float, float] | None:
    """(hits over those that ``rates`` let expect, standard errors that are missing); None when too little was seen."""
    seen = [task for task in pod.tasks if task.task in rates]
    total, expected = sum(task.total for task in seen), sum(task.total * rates[task.task] for task in seen)
    if total < LEAST_FRESH_DRAFTS or expected <= 0:
        return None
    hits = sum(task.hits for task in seen)
    rate = min(0.99, expected / total)
    error = math.sqrt(max(1e-9, expected * (1 - rate) * effect))
    return hits / expected, (expected - hits) / error


def _short(value: float) -> float:
    return float(f"{value:.5g}")
