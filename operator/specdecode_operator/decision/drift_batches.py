"""Batches of requests of one task: they teach its baseline, and then move its detector. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specdecode_operator.drafts.baseline import LearningBaseline
from specdecode_operator.drafts.chain_cost import CHAIN, ChainCounts, log_cost
from specdecode_operator.drafts.drift import BATCH_REQUESTS, DriftDetector, batches_between_alarms, excess_loss
from specdecode_operator.state.drift_state import TaskDrift
from specdecode_operator.telemetry.counters import NO_HITS, Hits

RECENT_BATCHES = 10
"""Batches over which the present loss is averaged: 200 requests, whose mean errs by one or two percent."""
MAX_LEARNING = 4
"""Times of learning after which a baseline that still has too few batches is dropped and learnt again, because its
first part is too old."""
_NO_BATCH: Mapping[str, object] = {"requests": 0.0, "hits": (), "totals": ()}
_NO_DETECTOR: Mapping[str, object] = {"logs": (), "batches": 0}
_NO_ENDING: Mapping[str, object] = {"ending_logs": (), "ending_batches": 0}


def chain_counts(acceptance: Mapping[tuple[str, int], Hits], task: str) -> ChainCounts:
    """Return the counts of one task on the main path. Deeper ones than the chain's are left out."""
    cells = [acceptance.get((task, depth), NO_HITS) for depth in range(1, CHAIN + 1)]
    return ChainCounts(tuple(float(cell.hits) for cell in cells), tuple(float(cell.total) for cell in cells))


def collected(known: TaskDrift, requests: float, counts: ChainCounts) -> TaskDrift:
    """Return the record with finished requests and counts added to its batch."""
    total = known.counted.plus(counts)
    return known.model_copy(
        update={"requests": known.requests + requests, "hits": total.hits, "totals": total.totals},
    )


def is_full(known: TaskDrift) -> bool:
    """Return whether the batch may be judged. Requests that nothing was drafted for fill no batch by themselves."""
    return known.requests >= BATCH_REQUESTS and known.counted.is_enough


@dataclass(frozen=True, slots=True)
class Judging:
    """Settings by which batches are judged.

    ``min_loss`` is the accepted loss of speed as a share, ``baseline`` the time over which a baseline is learnt, in
    seconds.
    """

    min_loss: float
    baseline: float


def judged(known: TaskDrift, settings: Judging, *, tasks: int, may_alarm: bool, now: float) -> TaskDrift:
    """Return the record after its full batch: with more of a baseline, or with more evidence.

    Args:
        known: Record of the task.
        settings: Settings of the deployment.
        tasks: Number of tasks that share the rate of false alarms.
        may_alarm: Whether an alarm may be raised now.
        now: Time of the batch, in seconds since the epoch.
    """
    counts = known.counted
    emptied = known.model_copy(update=_NO_BATCH)
    if known.is_learning:
        if not known.learning.is_complete(now, settings.baseline):
            return _learnt(emptied, counts, settings.baseline, now)
        emptied = emptied.frozen(now)
    return _watched(emptied, log_cost(counts, known.known), tasks, settings.min_loss, may_alarm, now)


def _learnt(known: TaskDrift, counts: ChainCounts, seconds: float, now: float) -> TaskDrift:
    """Return the record with one batch more in its baseline."""
    learning, total = known.learning, known.known.plus(counts)
    if learning.began is not None and now - learning.began >= MAX_LEARNING * seconds:
        learning, total = LearningBaseline(), counts
    taught = known.with_learning(learning.add(now, log_cost(counts, total), seconds))
    return taught.model_copy(update={"known_hits": total.hits, "known_totals": total.totals})


def _watched(known: TaskDrift, cost: float, tasks: int, min_loss: float, may_alarm: bool, now: float) -> TaskDrift:
    """Return the record after a batch that is compared with the frozen baseline."""
    baseline = known.baseline
    excess, keep = excess_loss(baseline, now, cost, min_loss), 1 - 1 / RECENT_BATCHES
    threshold = batches_between_alarms(baseline, tasks)
    known = known.model_copy(
        update={
            "recent": known.recent * keep + cost - baseline.expected(now),
            "recent_weight": known.recent_weight * keep + 1,
            "threshold": threshold,
        }
    )
    if known.since:
        ending = known.ending.add(-excess)
        if ending.alarms(threshold):
            return known.model_copy(update={**_NO_DETECTOR, **_NO_ENDING, "since": 0.0})
        return known.model_copy(update={"ending_logs": ending.logs, "ending_batches": ending.batches})
    detector: DriftDetector = known.detector.add(excess)
    alarms = may_alarm and detector.alarms(threshold)
    return known.model_copy(
        update={"logs": detector.logs, "batches": detector.batches, "since": now if alarms else 0.0}
    )
