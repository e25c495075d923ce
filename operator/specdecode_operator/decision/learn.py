"""Stages learn and watch drift: reports become differences, which move estimates, baselines and detectors. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Literal, TypeVar

from specdecode_operator import health
from specdecode_operator.api.draft import Phase
from specdecode_operator.api.v1alpha1 import Cause as RecordedCause
from specdecode_operator.api.v1alpha1 import Decision as DecisionRecord
from specdecode_operator.api.v1alpha1 import Spec, SpeculationSpec
from specdecode_operator.decision.plan import realised, saved_seconds
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
from specdecode_operator.health import WorkerDelta
from specdecode_operator.planning.acceptance import design_effect, names
from specdecode_operator.planning.estimates import TUNING, joined, kept_share, observed_load, rate_changed, time_changed
from specdecode_operator.state.learned import (
    ALL_TASKS,
    WINDOW_SECONDS,
    AcceptanceCell,
    ContextCell,
    DraftRecord,
    DriftState,
    LastReport,
    LearnedState,
    RequestCell,
    Session,
    Silence,
    StepTimeCell,
    TaskDrift,
    TrafficCell,
    parked_of,
    rounded,
    with_draft,
    with_parked,
    with_promoted_draft,
)
from specdecode_operator.telemetry import counters
from specdecode_operator.telemetry.counters import (
    NO_HITS,
    CellKey,
    Delta,
    Hits,
    Moments,
    RequestSums,
    TrafficSums,
    difference,
    fleet,
)
from specdecode_operator.times import iso, seconds_of
from specdecode_operator.types import Deployment, Observation, Worker
from specdecode_worker.contract import DRAFT_FREE, OTHER_TASK, Buckets, Report

Cell = TypeVar("Cell", AcceptanceCell, ContextCell)
Key = tuple[str, int, Literal["main", "sibling"]]
"""Task, depth, and parent of an acceptance rate."""


def learn_delta(learned: LearnedState, delta: Delta, *, now: float) -> LearnedState:
    """Return ``learned`` with the estimates updated by ``delta``, which is of the draft that most workers run."""
    if delta.draft and delta.draft != learned.draft:
        learned = with_draft(learned, delta.draft)
    return learned.model_copy(
        update={
            **_of_draft(learned, delta, now),
            "traffic": tuple(_traffic(learned.traffic, delta)),
            "prefill": _prefill(learned.prefill, delta),
            "wander": _wander(learned, delta),
            "load": observed_load(learned.load, delta, now),
        }
    )


def learn_parked(learned: LearnedState, draft: str, delta: Delta, now: float) -> LearnedState:
    """Return ``learned`` with the parked estimates of ``draft`` updated by ``delta``.

    Only acceptance, requests and step times with draft passes change. The draft becomes the most recently used one.
    """
    if not draft or draft == learned.draft or not (delta.acceptance or delta.siblings or delta.requests or delta.steps):
        return learned
    known = parked_of(learned, draft)
    measured = ("acceptance", "contexts", "requests", "costs")
    own = learned.model_copy(update={name: getattr(known, name) for name in measured})
    drafted = replace(delta, steps={key: moments for key, moments in delta.steps.items() if key.draft_passes})
    updated = known.model_copy(update=_of_draft(own, drafted, now))
    return with_parked(learned, updated) if updated != known else learned


def learn_first_reports(
    learned: LearnedState, reports: Sequence[Report], found: Buckets, *, now: float
) -> LearnedState:
    """Return ``learned`` with what the first reports of workers contain, where nothing is known yet.

    Workers time steps before they serve. These count for few steps, and their made-up text says nothing of acceptance.
    That of the draft's evaluation counts for as few drafts.
    """
    if not learned.acceptance:
        agreements = (report.draft.agreement for report in reports if report.draft.hash == learned.draft)
        evaluated = tuple(_evaluated(next(filter(None, agreements), ()), now))
        learned = learned.model_copy(update={"acceptance": evaluated}) if evaluated else learned
    measured = counters.summed(
        (CellKey.of(cell), Moments.of_cell(cell))
        for report in reports
        for cell in report.steps
        if report.plan.buckets == found and (not cell.draft_passes or report.draft.hash == learned.draft)
        if 2 * cell.count >= TUNING.min_samples and cell.t > TUNING.least_seconds * cell.count and not cell.prefill
    )
    costs = {CellKey.of(cell): cell for cell in learned.costs}
    new = measured.keys() - costs.keys()
    for key in new:
        light = measured[key].times(min(1.0, 2 * TUNING.min_samples / measured[key].count))
        values = light.with_emitted(0.0).values if key.draft_passes else light.values
        made_up = light.count if key.draft_passes else 0.0
        costs[key] = StepTimeCell(**key._asdict(), values=values, at=now, made_up=made_up)
    return learned.model_copy(update={"costs": tuple(costs[key] for key in sorted(costs))}) if new else learned


def _evaluated(agreement: tuple[float, ...], now: float) -> Iterable[AcceptanceCell]:
    """Yield the acceptance that a draft's evaluation recorded, of a chain that few drafts began."""
    total = 2 * TUNING.min_samples
    for depth, rate in enumerate(agreement, start=1):
        yield AcceptanceCell(task=OTHER_TASK, depth=depth, hits=rounded(rate * total), total=rounded(total), at=now)
        total *= rate


def _of_draft(learned: LearnedState, delta: Delta, now: float) -> dict[str, object]:
    # Evidence is new for at least two polls, however long they are.
    recent = now - max(TUNING.recent_seconds, 2 * delta.seconds)
    return {
        "acceptance": tuple(_acceptance(learned, delta, now, recent)),
        "contexts": tuple(_contexts(learned, delta, now, recent)),
        "requests": tuple(_requests(learned.requests, delta)),
        "costs": tuple(_step_times(learned, delta, now, recent)),
    }


def _acceptance(learned: LearnedState, delta: Delta, now: float, recent: float) -> Iterable[AcceptanceCell]:
    """Yield the acceptance counts. A change at one depth makes the task's deeper counts doubtful."""
    cells: dict[Key, AcceptanceCell] = {(cell.task, cell.depth, cell.parent): cell for cell in learned.acceptance}
    fresh: dict[Key, Hits] = {(*at, "main"): hits for at, hits in delta.acceptance.items() if hits.total > 0}
    fresh |= {(*at, "sibling"): hits for at, hits in delta.siblings.items() if hits.total > 0}
    effects = {task: design_effect(learned, task) for task, _, _ in fresh}
    changed: dict[str, int] = {}
    for key in sorted({*cells, *fresh}):
        task, depth, parent = key
        cell = cells.get(key) or AcceptanceCell(task=task, depth=depth, parent=parent, hits=0, total=0, at=now)
        if depth > changed.get(task, depth):
            cell = _doubted(cell)
        if key in fresh:
            cell = _updated(cell, fresh[key], effects[task], now, recent)
            if parent == "main" and cell.changed_at == now:
                changed.setdefault(task, depth)
        yield cell


def _contexts(learned: LearnedState, delta: Delta, now: float, recent: float) -> Iterable[ContextCell]:
    """Yield the acceptance of first draft tokens by task and context."""
    cells = {(cell.task, cell.context): cell for cell in learned.contexts}
    for (task, context), hits in delta.contexts.items():
        if hits.total > 0:
            new = ContextCell(task=task, depth=1, context=context, hits=0, total=0, at=now)
            known = cells.get((task, context), new)
            cells[task, context] = _updated(known, hits, design_effect(learned, task), now, recent)
    return (cells[key] for key in sorted(cells))


def _doubted(cell: AcceptanceCell) -> AcceptanceCell:
    """Return the counts with the weight of one draft.

    Acceptance falls at all depths together, and deeper tokens are drafted too seldom to show it soon.
    """
    if cell.total <= 1:
        return cell
    values = {name: rounded(getattr(cell, name) / cell.total) for name in ("hits", "new_hits", "new_total")}
    return cell.model_copy(update={**values, "total": 1.0, "ranks": _ranks(count / cell.total for count in cell.ranks)})


def _updated(known: Cell, fresh: Hits, effect: float, now: float, recent: float) -> Cell:
    """Return the counts with those of this poll. Counts are new if the last ones came after ``recent``."""
    gathered = _gathered(known) if known.at > recent else NO_HITS
    keep = kept_share(fresh.total, now - known.at, TUNING.half_life_drafts * effect)
    before = Hits(known.hits, known.total, known.ranks)
    after, new, changed = joined(before, gathered, fresh, keep, partial(rate_changed, effect=effect))
    # New evidence that did not contradict the older within these drafts is no longer counted apart.
    new = new if new.total < TUNING.prior_drafts * TUNING.prior_effect * effect else NO_HITS
    counts = {"hits": after.hits, "total": after.total, "new_hits": new.hits, "new_total": new.total}
    update = {name: rounded(count) for name, count in counts.items()}
    changed_at = now if changed else known.changed_at
    return known.model_copy(update={**update, "ranks": _ranks(after.ranks), "at": now, "changed_at": changed_at})


def _gathered(known: Cell) -> Hits:
    """Return the counts that are still new. Ranks are counted together, so theirs are a share by their misses."""
    misses, new_misses = known.total - known.hits, known.new_total - known.new_hits
    share = min(1.0, max(0.0, new_misses) / misses) if misses > 0 else 0.0
    return Hits(known.new_hits, known.new_total, tuple(share * count for count in known.ranks))


def _ranks(counts: Iterable[float]) -> tuple[float, ...]:
    """Return the counts rounded, without trailing zeros."""
    found = [max(0.0, round(rounded(count), 1)) for count in counts]
    while found and not found[-1]:
        found.pop()
    return tuple(found)


def _requests(known: Iterable[RequestCell], delta: Delta) -> Iterable[RequestCell]:
    cells = {cell.task: RequestSums(*cell.sums) for cell in known}
    for task, fresh in delta.requests.items():
        keep = 0.5 ** (fresh.n / TUNING.half_life_samples)
        cells[task] = cells.get(task, counters.NO_REQUESTS).times(keep).plus(fresh)
    return (RequestCell(task=task, sums=RequestSums(*map(rounded, cells[task]))) for task in sorted(cells))


def _traffic(known: Iterable[TrafficCell], delta: Delta) -> Iterable[TrafficCell]:
    """Yield the traffic by task. All tasks decay by the requests of all, so that a task without requests fades out."""
    cells = {cell.task: TrafficSums(*cell.sums) for cell in known}
    count = sum(max(0.0, fresh.arrivals, fresh.finished) for fresh in delta.traffic.values())
    keep = kept_share(count, delta.seconds, TUNING.half_life_samples)
    for task in sorted({*cells, *delta.traffic}):
        sums = cells.get(task, counters.NO_TRAFFIC).times(keep).plus(delta.traffic.get(task, counters.NO_TRAFFIC))
        yield TrafficCell(task=task, sums=TrafficSums(*(rounded(max(0.0, value)) for value in sums)))


def _step_times(learned: LearnedState, delta: Delta, now: float, recent: float) -> Iterable[StepTimeCell]:
    """Return the step times. Steps with prefill say nothing about decoding."""
    cells = {CellKey.of(cell): cell for cell in learned.costs}
    for key, fresh in delta.steps.items():
        if not key.prefill and fresh.count > 0 and fresh.seconds > TUNING.least_seconds * fresh.count:
            known = cells.get(key) or StepTimeCell(**key._asdict(), values=fresh.times(0).values, at=now, polls=0)
            cells[key] = _step_time(known, fresh, now, learned.wander, recent)
    return (cells[key] for key in sorted(cells))


def _step_time(known: StepTimeCell, fresh: Moments, now: float, wander: float, recent: float) -> StepTimeCell:
    before, is_recent = Moments(known.values), known.new_values and known.at > recent
    gathered = Moments(known.new_values) if is_recent else fresh.times(0)
    # Where means wander by more than twice the model's error, an estimate must cover more polls.
    stretch = max(1.0, wander / (2 * TUNING.model_error) ** 2)
    keep = kept_share(fresh.count, now - known.at, TUNING.half_life_samples) ** (1 / stretch)
    after, new, changed = joined(before, gathered, fresh, keep, partial(time_changed, wander=wander))
    left = max(0.0, after.count - fresh.count) / before.count if before.count > 0 else 0.0
    return known.model_copy(
        update={
            "values": tuple(map(rounded, after.values)),
            "at": now,
            "new_values": tuple(map(rounded, new.values)) if new.count < TUNING.min_samples else (),
            "polls": rounded(1 + left * known.polls),
            "changed_at": now if changed else known.changed_at,
            "made_up": rounded(left * known.made_up),
        }
    )


def _wander(learned: LearnedState, delta: Delta) -> float:
    """Return the relative variance of means from poll to poll beyond noise.

    A single jump is a change and no wander, so one poll counts for little more than what is usual.
    """
    most = min(1.0, max(TUNING.carried_error**2, TUNING.wander_limit * learned.wander))
    known = {CellKey.of(cell): Moments(cell.values) for cell in learned.costs}
    excesses, weights = list[float](), list[float]()
    for key, fresh in delta.steps.items():
        if not key.prefill and key in known and known[key].count >= TUNING.min_samples and fresh.count > 2:
            before = known[key]
            noise = before.variance / before.count + max(before.variance, fresh.variance) / fresh.count
            excess = (before.mean_seconds - fresh.mean_seconds) ** 2 - noise
            excesses.append(fresh.seconds * min(most, max(0.0, excess) / before.mean_seconds**2))
            weights.append(fresh.seconds)
    if sum(weights) <= 0:
        return learned.wander
    return rounded(learned.wander + TUNING.wander_share * (sum(excesses) / sum(weights) - learned.wander))


def _prefill(known: tuple[float, ...], delta: Delta) -> tuple[float, ...]:
    """Return the moments of all steps with prefill together."""
    fresh = [moments for key, moments in delta.steps.items() if key.prefill and moments.count > 0]
    if not fresh:
        return known
    total = reduce(Moments.plus, fresh)
    keep = 0.5 ** (total.count / TUNING.half_life_samples)
    return tuple(map(rounded, (Moments(known).times(keep).plus(total) if known else total).values))


# Ready workers without a report: counted by rounds of readings, stale after a while.

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


# Stage learn: reports become differences, and differences move the estimates.

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
        learned=_moved(judged, observed, delta, others, buckets, deployment.spec, now),
        delta=delta,
        baselines=baselines,
        window=tuple(item for item in window if now - WINDOW_SECONDS < item.at <= now),
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
    """Return the state of this deployment. A lost state takes the history back from the status.

    Tasks that neither the spec nor the plan names are forgotten: nothing outweighs what was known of them, and all
    tasks together are what ``other`` is once the spec has none.
    """
    shown = deployment.status.speculation.history if deployment.status.speculation else ()
    planned = learned.plan.tasks if learned.plan is not None else ()
    present = {*names(deployment.spec.speculation), *(task.name for task in planned)}
    return learned.model_copy(
        update={
            "uid": deployment.uid,
            "history": learned.history or shown,
            "acceptance": tuple(cell for cell in learned.acceptance if cell.task in present),
            "contexts": tuple(cell for cell in learned.contexts if cell.task in present),
            "requests": tuple(cell for cell in learned.requests if cell.task in present),
        }
    )


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
    spec: Spec,
    now: float,
) -> LearnedState:
    # A draft is known as soon as a worker names it, long before its first token.
    named = Delta(draft=draft_of(observed, learned))
    moved = learn_delta(learned, delta, now=now) if delta else learn_delta(learned, named, now=0)
    for other in others:
        moved = learn_parked(moved, other.draft, other, now)
    seeded = learn_first_reports(moved, _first_reports(observed), buckets, now=now)
    if delta is None:
        return seeded
    saved = max(1, spec.worker_devices) * saved_seconds(delta, seeded.costs)
    summed = seeded.model_copy(update={"saved_device_seconds": seeded.saved_device_seconds + saved})
    return realised(summed, delta, buckets, spec.speculation.method)


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


# Batches of requests of one task: they teach the baseline of its draft, and then move its detector.

RECENT_BATCHES = 10
"""Batches over which the present loss is averaged: 200 requests, whose mean errs by one or two percent."""
MAX_LEARNING = 4
"""Times of learning after which a baseline that still has too few batches is dropped and learnt again, because its
first part is too old."""


def chain_counts(acceptance: Mapping[tuple[str, int], Hits], task: str) -> ChainCounts:
    """Return the counts of one task on the main path. Deeper ones than the chain's are left out."""
    cells = [acceptance.get((task, depth), NO_HITS) for depth in range(1, CHAIN + 1)]
    return ChainCounts(tuple(float(cell.hits) for cell in cells), tuple(float(cell.total) for cell in cells))


def with_requests(
    known: TaskDrift, requests: float, counts: ChainCounts, *, seconds: float, tasks: int, may_alarm: bool, now: float
) -> TaskDrift:
    """Return the record after finished requests. A full batch is judged: it brings more of a baseline, or evidence.

    Requests that nothing was drafted for fill no batch by themselves.

    Args:
        known: Record of the task.
        requests: Finished requests of this poll.
        counts: Counts of this poll.
        seconds: Time over which a baseline is learnt.
        tasks: Number of tasks that share the rate of false alarms.
        may_alarm: Whether an alarm may be raised now.
        now: Time of the batch, in seconds since the epoch.
    """
    requests, counts = known.requests + requests, known.batch.plus(counts)
    if requests < BATCH_REQUESTS or not counts.is_enough:
        return known.model_copy(update={"requests": requests, "batch": counts})
    learning, baseline = known.learning or LearningBaseline(), known.baseline
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


# Stage drift: finished requests move the baselines and the detectors of the draft in use.
#
# Counts are those of all workers that run the draft. Workers that try a candidate or run another draft add nothing (see
# `_read`), and neither does the acceptance of an unhealthy worker.

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
    before = learned.drift
    state = _with_identity(before, deployment, learned)
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
    drafts = {task.name: task.draft for task in speculation.tasks}
    drafts.setdefault(OTHER_TASK, None)
    return tuple(name for name, draft in drafts.items() if draft is None)


# --- identity ---------------------------------------------------------------------------------------------------------


def _with_identity(state: DriftState, deployment: Deployment, learned: LearnedState) -> DriftState:
    """Return the state of this draft, target and image. Another one of them begins a new baseline."""
    target = deployment.spec.model.target
    # The image is known after the first decision, which makes the pod template.
    image = (learned.template.image if learned.template else "") or state.image
    present = {"draft": learned.draft, "target": target, "image": image}
    if (state.draft, state.target, state.image) == (learned.draft, target, image):
        return state
    if not state.draft:
        return state.model_copy(update=present)
    if state.target != target:
        renewed = "the target changed (TargetChanged)"
    elif image != state.image != "":
        renewed = "the workers' image changed (ImageChanged)"
    elif state.draft != learned.draft:
        renewed = f"the draft changed to {learned.draft[:12]}"
    else:
        return state.model_copy(update=present)
    return state.model_copy(update={**present, "tasks": (), "renewed": renewed})


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
    watched = watched_tasks(deployment.spec.speculation)
    after = partial(with_requests, seconds=seconds_of(deployment.spec.distillation.trigger.baseline), now=now)
    tasks: list[TaskDrift] = []
    total, requests = ChainCounts(), 0.0
    for name in watched:
        known, counts = state.task(name), chain_counts(delta.acceptance, name)
        finished = delta.requests[name].n if name in delta.requests else 0.0
        total, requests = total.plus(counts), requests + finished
        if finished or any(counts.totals):
            known = after(known, finished, counts, tasks=len(watched), may_alarm=True)
        if known != TaskDrift(task=name):
            tasks.append(known)
    whole = state.task(ALL_TASKS)
    if len(watched) > 1 and (requests or any(total.totals)):
        # As long as a task looks slower itself, its own detector decides.
        may_alarm = all(task.loss < ACCEPTED_LOSS for task in tasks)
        whole = after(whole, requests, total, tasks=1, may_alarm=may_alarm)
    if len(watched) > 1 and whole != TaskDrift(task=ALL_TASKS):
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
