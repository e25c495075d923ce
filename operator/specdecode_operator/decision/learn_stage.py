"""Stage 1, learn: reports become differences, and differences move the estimates. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specdecode_operator import health
from specdecode_operator.decision import history
from specdecode_operator.health import WorkerDelta
from specdecode_operator.planning import learning
from specdecode_operator.planning.figures import saved_seconds
from specdecode_operator.state.learned import (
    WINDOW_SECONDS,
    LastReport,
    LearnedState,
    Session,
    Silence,
    with_promoted_draft,
)
from specdecode_operator.telemetry.counters import Delta, difference, fleet
from specdecode_operator.types import Deployment, Observation, Worker
from specdecode_worker.contract import Buckets, Method, Report

# Ready workers without a report: counted by rounds of readings, stale after a while. Pure.

STALE_SECONDS, STALE_LOOKS = 30.0, 3
"""A worker is stale after this time and this many rounds without a report. One missed report means nothing."""


def count_silent(observed: Observation, now: float) -> Mapping[str, Silence]:
    """Count the ready workers without a report once for every round, however often the planner runs in between."""
    known = observed.session.silent
    silent = [worker for worker in observed.workers if worker.report is None]
    if 0 < observed.round == observed.session.round:
        return {worker.uid: known[worker.uid] for worker in silent if worker.uid in known}
    return {
        worker.uid: replace(known[worker.uid], looks=known[worker.uid].looks + 1)
        if worker.uid in known
        else Silence(since=now, looks=1, problem=worker.report_problem or "no report")
        for worker in silent
        if worker.ready and not worker.leaving
    }


def stale_workers(observed: Observation, session: Session, now: float) -> dict[str, str]:
    """Return the names of the workers whose reports are stale, with the reason."""
    return {
        worker.name: silence.problem
        for worker in observed.workers
        if (silence := session.silent.get(worker.uid)) is not None
        and silence.looks >= STALE_LOOKS
        and now - silence.since >= STALE_SECONDS
    }


# Stage 1, learn: reports become differences, and differences move the estimates. Pure.

MIN_INTERVAL_SECONDS = 2.0
"""Least time between two readings that are subtracted; a shorter interval is merged into the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """Result of the stage."""

    learned: LearnedState
    """Estimates after this poll."""
    delta: Delta | None
    """Difference of the whole fleet. None if no worker has a new reading."""
    baselines: Mapping[str, LastReport]
    """Latest reading by pod uid, subtracted from the next one."""
    window: tuple[Delta, ...]
    """Differences of the last minute, oldest first."""
    silent: Mapping[str, Silence]
    """Ready workers without a report, by pod uid."""


def learn(deployment: Deployment, observed: Observation, buckets: Buckets, *, now: float) -> Learnt:
    """Move all estimates by what the workers did since their last readings.

    Args:
        deployment: The deployment; its status supplies the history after a loss of state.
        observed: Workers with their reports, and the state before this poll.
        buckets: Buckets of concurrency and context that plan rows use.
        now: Operator's clock, in seconds.
    """
    recalled = _with_planned_draft(_recalled(deployment, observed.session.learned), observed)
    baselines, deltas = read_deltas(observed, buckets, now)
    present = {worker.uid for worker in observed.workers}
    judged = recalled.model_copy(
        update={"pods": health.learn_pods(recalled, deltas, present=present, now=now)},
    )
    delta, others = _fleet_deltas(judged, observed, deltas, now)
    window = (*observed.session.window, *([delta] if delta else []))
    return Learnt(
        learned=_moved(judged, observed, delta, others, buckets, deployment.spec.speculation.method, now),
        delta=delta,
        baselines=baselines,
        window=tuple(item for item in window if item.at > now - WINDOW_SECONDS),
        silent=count_silent(observed, now),
    )


def read_deltas(
    observed: Observation, buckets: Buckets, now: float
) -> tuple[Mapping[str, LastReport], Sequence[WorkerDelta]]:
    """Return the next baselines, and the difference of every worker that has a new reading."""
    baselines: dict[str, LastReport] = {}
    deltas: list[WorkerDelta] = []
    for worker in observed.workers:
        baseline, delta = _read(observed.session.baselines.get(worker.uid), worker, buckets, now)
        if baseline is not None:
            baselines[worker.uid] = baseline
            if delta is not None and worker.report is not None:
                deltas.append((worker.uid, worker.report.boot_id, delta))
    return baselines, deltas


def draft_of(observed: Observation, learned: LearnedState) -> str:
    """Return the hash of the draft that the plan is for.

    During a rollout it is the assigned one, whatever the reports say: of two workers, a canary would otherwise be a
    majority. Else it is the one that most workers run, or the last known one if no report names a draft.
    """
    if observed.session.drafts.planned_draft:
        return observed.session.drafts.planned_draft
    hashes = [report.draft.hash for report in observed.reports if report.draft.hash]
    return max(sorted(set(hashes)), key=hashes.count, default=learned.draft)


def _recalled(deployment: Deployment, learned: LearnedState) -> LearnedState:
    """Return the state of this deployment. A lost state takes the history back from the status."""
    shown = deployment.status.speculation.history if deployment.status.speculation else ()
    return learned.model_copy(update={"uid": deployment.uid, "history": learned.history or shown})


def _with_planned_draft(learned: LearnedState, observed: Observation) -> LearnedState:
    """Return the state with the rows and costs of the assigned draft, after a promotion or a rollback."""
    planned = observed.session.drafts.planned_draft
    return with_promoted_draft(learned, planned) if planned and learned.draft not in ("", planned) else learned


def _fleet_deltas(
    learned: LearnedState, observed: Observation, deltas: Sequence[WorkerDelta], now: float
) -> tuple[Delta | None, Sequence[Delta]]:
    """Add up all workers' differences, with step times evened to those of the median worker.

    The acceptance of an unhealthy worker is left out: it says nothing about the others.

    Returns:
        The sum of all workers, and one sum for each draft other than the deployment's, such as that of a canary.
    """
    unhealthy = health.suspected(learned)
    evened = health.evened(learned.pods, list(deltas))
    counted = [delta.without_acceptance() if uid in unhealthy else delta for uid, _, delta in evened]
    if not counted:
        return None, ()
    total = fleet(counted, at=now, draft=draft_of(observed, learned))
    others = sorted({delta.draft for delta in counted} - {"", total.draft})
    by_draft = ([delta for delta in counted if delta.draft == draft] for draft in others)
    return total, [fleet(group, at=now, draft=group[0].draft) for group in by_draft]


def _moved(
    learned: LearnedState,
    observed: Observation,
    delta: Delta | None,
    others: Sequence[Delta],
    buckets: Buckets,
    method: Method,
    now: float,
) -> LearnedState:
    # A draft is known as soon as a worker names it, long before its first token.
    named = Delta(draft=draft_of(observed, learned))
    moved = learning.learn(learned, delta, now=now) if delta else learning.learn(learned, named, now=0)
    for other in others:
        moved = learning.learn_parked(moved, other.draft, other, now)
    seeded = learning.learn_first_reports(moved, _first_reports(observed), buckets, now=now)
    if delta is None:
        return seeded
    saved = seeded.saved_device_seconds + saved_seconds(delta, seeded.costs)
    return history.realised(seeded.model_copy(update={"saved_device_seconds": saved}), delta, buckets, method)


def _first_reports(observed: Observation) -> tuple[Report, ...]:
    """Return the reports of workers that were not read before."""
    return tuple(
        worker.report
        for worker in observed.workers
        if worker.report and not worker.leaving and worker.uid not in observed.session.baselines
    )


def _read(
    known: LastReport | None, worker: Worker, buckets: Buckets, now: float
) -> tuple[LastReport | None, Delta | None]:
    """Return the next baseline of one worker, and its difference to the last one."""
    after = worker.report
    if after is None:
        return known, None
    if known is None:
        return worker.baseline or LastReport.of(after), None
    before = known.report
    if before.boot_id == after.boot_id and 0 <= after.clock_seconds - before.clock_seconds < MIN_INTERVAL_SECONDS:
        return known, None
    baseline = worker.baseline or LastReport.of(after)
    delta = difference(before, after, at=now, buckets=buckets)
    is_trial = before.trial is not None or after.trial is not None
    return baseline, delta.load_only() if delta is not None and is_trial else delta
