"""Stage 2, watch drift: batches of acceptance against the baseline of the draft. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from specdecode_operator.api.draft import Phase
from specdecode_operator.api.v1alpha1 import Cause as RecordedCause
from specdecode_operator.api.v1alpha1 import Decision as DecisionRecord
from specdecode_operator.api.v1alpha1 import SpeculationSpec
from specdecode_operator.drafts.drift import (
    ACCEPTED_LOSS,
    BATCH_REQUESTS,
    CHAIN,
    DAY_SECONDS,
    Baseline,
    ChainCounts,
    DriftDetector,
    LearningBaseline,
    batches_between_alarms,
    excess_loss,
    log_cost,
)
from specdecode_operator.state.learned import ALL_TASKS, DraftRecord, DriftState, LearnedState, TaskDrift
from specdecode_operator.telemetry.counters import NO_HITS, Delta, Hits
from specdecode_operator.times import iso, seconds_of
from specdecode_operator.types import Deployment
from specdecode_worker.contract import DRAFT_FREE, OTHER_TASK

# Batches of requests of one task: they teach its baseline, and then move its detector. Pure.

RECENT_BATCHES = 10
"""Batches over which the present loss is averaged: 200 requests, whose mean errs by one or two percent."""
MAX_LEARNING = 4
"""Times of learning after which a baseline that still has too few batches is dropped and learnt again, because its
first part is too old."""


def chain_counts(acceptance: Mapping[tuple[str, int], Hits], task: str) -> ChainCounts:
    """Return the counts of one task on the main path. Deeper ones than the chain's are left out."""
    cells = [acceptance.get((task, depth), NO_HITS) for depth in range(1, CHAIN + 1)]
    return ChainCounts(tuple(float(cell.hits) for cell in cells), tuple(float(cell.total) for cell in cells))


def collected(known: TaskDrift, requests: float, counts: ChainCounts) -> TaskDrift:
    """Return the record with finished requests and counts added to its batch."""
    update = {"requests": known.requests + requests, "batch": known.batch.plus(counts)}
    return known.model_copy(update=update)


def is_full(known: TaskDrift) -> bool:
    """Return whether the batch may be judged. Requests that nothing was drafted for fill no batch by themselves."""
    return known.requests >= BATCH_REQUESTS and known.batch.is_enough


def judged(known: TaskDrift, *, seconds: float, tasks: int, may_alarm: bool, now: float) -> TaskDrift:
    """Return the record after its full batch: with more of a baseline, or with more evidence.

    Args:
        known: Record of the task.
        seconds: Time over which a baseline is learnt.
        tasks: Number of tasks that share the rate of false alarms.
        may_alarm: Whether an alarm may be raised now.
        now: Time of the batch, in seconds since the epoch.
    """
    counts, learning, baseline = known.batch, known.learning or LearningBaseline(), known.baseline
    emptied = known.model_copy(update={"requests": 0.0, "batch": ChainCounts()})
    if baseline is None:
        if not learning.is_complete(now, seconds):
            return _learnt(emptied, learning, counts, seconds, now)
        baseline = learning.freeze(now - (learning.began or 0.0))
        emptied = emptied.model_copy(update={"learning": None, "baseline": baseline})
    return _watched(emptied, baseline, log_cost(counts, known.known), tasks, may_alarm, now)


def _learnt(known: TaskDrift, learning: LearningBaseline, counts: ChainCounts, seconds: float, now: float) -> TaskDrift:
    """Return the record with one batch more in its baseline."""
    total = known.known.plus(counts)
    if learning.began is not None and now - learning.began >= MAX_LEARNING * seconds:
        learning, total = LearningBaseline(), counts
    return known.model_copy(update={"learning": learning.add(now, log_cost(counts, total), seconds), "known": total})


def _watched(known: TaskDrift, baseline: Baseline, cost: float, tasks: int, may_alarm: bool, now: float) -> TaskDrift:
    """Return the record after a batch that is compared with the frozen baseline."""
    excess, keep = excess_loss(baseline, now, cost), 1 - 1 / RECENT_BATCHES
    threshold = batches_between_alarms(baseline, tasks)
    update: dict[str, Any] = {
        "recent": known.recent * keep + cost - baseline.expected(now),
        "recent_weight": known.recent_weight * keep + 1,
        "threshold": threshold,
    }
    if known.since:
        ending = (known.ending or DriftDetector()).add(-excess)
        is_over = ending.alarms(threshold)
        update |= {"detector": None, "ending": None, "since": 0.0} if is_over else {"ending": ending}
    else:
        detector = (known.detector or DriftDetector()).add(excess)
        update |= {"detector": detector, "since": now if may_alarm and detector.alarms(threshold) else 0.0}
    return known.model_copy(update=update)


# Stage drift: finished requests move the baselines and the detectors of the draft in use. Pure.
#
# Counts are those of all workers that run the draft. Workers that try a candidate or run another draft add nothing (see
# `learn_stage`), and neither does the acceptance of an unhealthy worker.

_MOVING = (Phase.PROMOTING, Phase.ROLLING_BACK)
"""Phases in which workers change their draft. A promotion that fails keeps the baseline of the draft before."""
USAGE_HALF_LIFE_DAYS = 3.0
"""Half-life of the decode time a day and of the tasks' shares of it: a week has weight, a month has none."""


@dataclass(frozen=True, slots=True)
class DriftStep:
    """Result of the stage."""

    learned: LearnedState
    changes: tuple[DecisionRecord, ...] = ()
    """Drifts that began or ended, oldest first."""


def watch_drift(
    deployment: Deployment, record: DraftRecord, learned: LearnedState, delta: Delta | None, *, now: float
) -> DriftStep:
    """Move the drift of the draft by one poll.

    Args:
        deployment: The deployment.
        record: Rollout of drafts, after its step.
        learned: State after the stage learn.
        delta: Difference of all workers. None if no worker has a new reading.
        now: Operator's clock, in seconds since the epoch.
    """
    if deployment.spec.speculation.method in DRAFT_FREE:
        is_watched = bool(learned.drift.draft)
        return DriftStep(learned.model_copy(update={"drift": DriftState()}) if is_watched else learned)
    if not learned.draft or record.phase in _MOVING:
        return DriftStep(learned)
    before = _with_last_run(learned.drift, record)
    state = _with_identity(before, deployment, learned, now)
    changes = [] if state.tasks else [_ended(task, state.renewed, now) for task in before.stale]
    if delta is not None and not delta.idle:
        used = _with_usage(state, delta, now)
        state = _with_batches(used, deployment, delta, now)
        changes += _changes(used, state, now)
    if state is learned.drift or state == learned.drift:
        return DriftStep(learned)
    return DriftStep(learned.model_copy(update={"drift": state}), tuple(changes))


def watched_tasks(speculation: SpeculationSpec) -> tuple[str, ...]:
    """Return the tasks that run the draft of the deployment. Those with a draft of their own are not watched."""
    return (*(task.name for task in speculation.tasks if task.draft is None), OTHER_TASK)


# --- last run and identity --------------------------------------------------------------------------------------


def _with_last_run(state: DriftState, record: DraftRecord) -> DriftState:
    """Return the state with the figures of the last training run."""
    update = {"run_seconds": record.run_device_seconds, "recovery": record.recovery}
    return (
        state
        if all(getattr(state, name) == value for name, value in update.items())
        else state.model_copy(update=update)
    )


def _with_identity(state: DriftState, deployment: Deployment, learned: LearnedState, now: float) -> DriftState:
    """Return the state of this draft, target and image. Another one of them begins a new baseline."""
    target = deployment.spec.model.target
    # The image is known after the first decision, which makes the pod template.
    image = (learned.template.image if learned.template else "") or state.image
    present = {"draft": learned.draft, "target": target, "image": image}
    if (state.draft, state.target, state.image) == (learned.draft, target, image):
        return state
    if not state.draft:
        return state.model_copy(update={**present, "began": now})
    if state.target != target:
        renewed = "the target changed (TargetChanged)"
    elif image != state.image != "":
        renewed = "the workers' image changed (ImageChanged)"
    elif state.draft != learned.draft:
        renewed = f"the draft changed to {learned.draft[:12]}"
    else:
        return state.model_copy(update=present)
    return state.model_copy(update={**present, "tasks": (), "began": now, "renewed": renewed})


# --- measurements -------------------------------------------------------------------------------------------------


def _with_usage(state: DriftState, delta: Delta, now: float) -> DriftState:
    """Return the state with the decode time of this poll, and with the steps of each task."""
    days = max(0.0, now - state.at) / DAY_SECONDS if state.at else 0.0
    keep = 0.5 ** (days / USAGE_HALF_LIFE_DAYS)
    seconds = sum(moments.seconds for key, moments in delta.steps.items() if not key.prefill)
    steps = {name: sums.decode_steps for name, sums in delta.tasks.items()}
    return state.model_copy(
        update={
            "decode_seconds": state.decode_seconds * keep + seconds,
            "decode_days": state.decode_days * keep + days,
            "at": now,
            "tasks": tuple(
                task.model_copy(update={"steps": task.steps * keep + steps.get(task.task, 0.0)}) for task in state.tasks
            ),
        }
    )


def _with_batches(state: DriftState, deployment: Deployment, delta: Delta, now: float) -> DriftState:
    """Return the state with the requests of this poll in the batches of their tasks, and with full batches judged."""
    names = watched_tasks(deployment.spec.speculation)
    judge = partial(judged, seconds=seconds_of(deployment.spec.distillation.trigger.baseline), now=now)
    tasks: list[TaskDrift] = []
    total, requests = ChainCounts(), 0.0
    for name in names:
        known, counts = state.task(name), chain_counts(delta.acceptance, name)
        finished = delta.requests[name].n if name in delta.requests else 0.0
        total, requests = total.plus(counts), requests + finished
        if finished or any(counts.totals):
            known = collected(known, finished, counts)
            if is_full(known):
                known = judge(known, tasks=len(names), may_alarm=True)
        if known != TaskDrift(task=name):
            tasks.append(known)
    whole = state.task(ALL_TASKS)
    if len(names) > 1 and (requests or any(total.totals)):
        whole = collected(whole, requests, total)
        if is_full(whole):
            # As long as a task looks slower itself, its own detector decides.
            may_alarm = all(task.loss < ACCEPTED_LOSS for task in tasks)
            whole = judge(whole, tasks=1, may_alarm=may_alarm)
    if len(names) > 1 and whole != TaskDrift(task=ALL_TASKS):
        tasks.append(whole)
    return state.model_copy(update={"tasks": tuple(tasks)})


# --- history ------------------------------------------------------------------------------------------------------


def _changes(before: DriftState, after: DriftState, now: float) -> list[DecisionRecord]:
    """Return the drifts that began or ended with this poll."""
    old, new = _shown(before), _shown(after)
    ended = [_ended(old[name], "", now) for name in old if name not in new]
    return ended + [_begun(new[name], now) for name in new if name not in old]


def _shown(state: DriftState) -> dict[str, TaskDrift]:
    """Return the records with a drift. That of all tasks counts only while no task has one."""
    mix = state.mix
    return {task.task: task for task in (*state.stale, *([mix] if mix else []))}


def _begun(task: TaskDrift, now: float) -> DecisionRecord:
    usual, present = task.tokens(now)
    evidence = f"{task.evidence:.1f} times the evidence needed"
    cause: RecordedCause = "mix" if task.task == ALL_TASKS else "drift"
    what = "no task is slower, so the mix of tasks changed" if cause == "mix" else "the draft is stale"
    return _record(
        task,
        now,
        before=f"{usual:.2f} tokens a step",
        after=f"{present:.2f} tokens a step",
        measured=f"{task.detector.batches if task.detector else 0} batches of {BATCH_REQUESTS} requests",
        cause=cause,
        reason=f"{100 * task.loss:.0f} % slower than its baseline, with {evidence}: {what}",
    )


def _ended(task: TaskDrift, reason: str, now: float) -> DecisionRecord:
    return _record(
        task,
        now,
        before="slower than its baseline",
        after="the drift is over",
        cause="over",
        reason=reason or "the requests are within the accepted loss of the baseline again",
    )


def _record(task: TaskDrift, now: float, **fields: str) -> DecisionRecord:
    load = "all tasks" if task.task == ALL_TASKS else f"task {task.task}"
    return DecisionRecord.model_validate({"time": iso(now), "kind": "Drift", "load": load, **fields})
