"""What the workers did since the last look: their reports as differences, one by one and together. Pure; of decide."""

from __future__ import annotations

from dataclasses import replace

from specdecode_operator.health import pod_health
from specdecode_operator.state.learned import LearnedState
from specdecode_operator.state.session import WINDOW_SECONDS, Baseline, Session
from specdecode_operator.telemetry import staleness as silence
from specdecode_operator.telemetry.deltas import Delta, difference, fleet
from specdecode_operator.types import Observation, Worker
from specdecode_worker.contract import Buckets, Report

LEAST_READING_SECONDS = 2.0
"""Readings closer together than this wait for the next: events cause looks at any time."""


def read(observed: Observation, found: Buckets, now: float) -> tuple[Session, list[pod_health.WorkerDelta]]:
    """Moves the baselines; a worker without a new reading has no delta."""
    memory = observed.session
    baselines: dict[str, Baseline] = {}
    deltas: list[pod_health.WorkerDelta] = []
    for worker in observed.workers:
        baseline, delta = _one(memory.baselines.get(worker.uid), worker, found, now)
        if baseline is not None:
            baselines[worker.uid] = baseline
            if delta is not None and worker.report is not None:
                deltas.append((worker.uid, worker.report.boot_id, delta))
    return replace(memory, baselines=baselines), deltas


def met(observed: Observation, memory: Session) -> tuple[Report, ...]:
    """Reports of workers of which none was read before; ``memory`` as it was before this look."""
    return tuple(
        worker.report
        for worker in observed.workers
        if worker.report and not worker.leaving and worker.uid not in memory.baselines
    )


def together(
    observed: Observation, memory: Session, deltas: list[pod_health.WorkerDelta], now: float
) -> tuple[Session, Delta | None]:
    """The fleet's delta, None when nobody has a new reading, and the window with it; steps are those of the median
    pod. What drafts of a suspected pod bring says nothing about the others'."""
    strange = pod_health.suspected(memory.learned)
    evened = pod_health.evened(memory.learned.pods, deltas)
    counted = [delta.without_acceptance() if uid in strange else delta for uid, _, delta in evened]
    total = fleet(counted, at=now, draft=draft_of(observed, memory.learned)) if counted else None
    window = (*memory.window, *([total] if total else []))
    recent = tuple(delta for delta in window if delta.at > now - WINDOW_SECONDS)
    return replace(memory, window=recent, silent=silence.counted(observed, now)), total


def _one(known: Baseline | None, worker: Worker, found: Buckets, now: float) -> tuple[Baseline | None, Delta | None]:
    """The next baseline of one worker, and what it did since the last."""
    after = worker.report
    if after is None:
        return known, None
    if known is None:
        return Baseline.of(after, worker.report_tag), None
    before = known.report
    if before.boot_id == after.boot_id and 0 <= after.clock_seconds - before.clock_seconds < LEAST_READING_SECONDS:
        return known, None
    same = worker.report_tag and worker.report_tag == known.tag
    baseline = known.at(after.clock_seconds) if same else Baseline.of(after, worker.report_tag)
    return baseline, difference(before, after, at=now, buckets=found)


def draft_of(observed: Observation, learned: LearnedState) -> str:
    """Hash of the draft that most workers run; the remembered one while none says."""
    hashes = [report.draft.hash for report in observed.reports if report.draft.hash]
    return max(sorted(set(hashes)), key=hashes.count, default=learned.draft)
