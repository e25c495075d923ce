"""Merged drafts of a task: the credit of each one, and the choice of those that take part. Pure.

The credit of a draft in the trees of its task is counted. It says how the task would do with fewer drafts, and the
planner's rule decides by it which drafts take part. Plan and replicas are then chosen as if there were no others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Literal

from specdecode_operator.api.v1alpha1 import Decision as DecisionRecord
from specdecode_operator.api.v1alpha1 import SpeculationSpec, TaskSpec
from specdecode_operator.decision.learn import learn_delta
from specdecode_operator.decision.plan import measured, read_pin_state
from specdecode_operator.planning.acceptance import (
    AcceptanceModel,
    Bounds,
    Position,
    TaskAcceptance,
    TaskLoad,
    bounds_of,
    design_effect,
    idle,
    objective_of,
    task_acceptance,
    tasks_at,
)
from specdecode_operator.planning.estimates import TUNING as PLANNING
from specdecode_operator.planning.estimates import StepTimeModel, confidence
from specdecode_operator.planning.search import RANK, Choice, LoadDecision, ShapeSearch, recent_changes, rows_of
from specdecode_operator.scaling import kv_tokens
from specdecode_operator.state.learned import AcceptanceCell, CreditCell, LearnedState, MergeChoice, rounded
from specdecode_operator.telemetry.counters import NO_HITS, Delta, Hits
from specdecode_operator.times import iso
from specdecode_operator.types import Deployment, Observation
from specdecode_worker.contract import DRAFT_FREE, Buckets


@dataclass(frozen=True, slots=True)
class MergeTuning:
    """Constants of the credit and of the choice. "Trade" marks a value between two costs; none was measured."""

    carried_drafts: float = 60.0
    """Drafts that an acceptance counts for after the drafts of its task changed: enough for rows of its own (50), and
    a fifth of what a change point needs to be outweighed by in a minute of traffic. Trade."""
    max_cells: int = 384
    """Stored credit cells: three tasks with four orders (common, own, two merged), 16 depths, two kinds of parents."""
    least_drafts: float = 20.0
    """Independent drafts of a task below which nothing is chosen: as many as outweigh a prior of acceptance twice."""
    half_count: float = 0.5
    """Pseudo-count of a share of drafts, so that no event is held to be impossible (Jeffreys)."""


TUNING = MergeTuning()


# Credit of each draft in the trees of tasks that merge drafts: decayed counts, and what they say of fewer drafts.

COMMON = ""
"""Place of a draft's hash in the counts of the common order, taken at the same nodes as the credit."""
Place = tuple[int, Literal["main", "sibling"]]
"""Depth, and parent."""
Counts = Mapping[Place, Hits]


def learn_credit(learned: LearnedState, delta: Delta | None, tasks: Collection[str], now: float) -> LearnedState:
    """Return the state with the credit of one poll added; only that of ``tasks`` stays.

    Credit is forgotten, and outdated by change points, in the same way as acceptance.
    """
    known = [cell for cell in learned.credit if cell.task in tasks]
    if delta is None or not delta.credit:
        return _with_credit(learned, known)
    fresh = {key: hits for key, hits in delta.credit.items() if key[0] in tasks}
    merging = {key[0] for key in fresh}
    for (task, depth), hits in delta.acceptance.items():
        fresh |= {(task, COMMON, depth, "main"): hits} if task in merging else {}
    for (task, depth), hits in delta.siblings.items():
        fresh |= {(task, COMMON, depth, "sibling"): hits} if task in merging else {}
    cells: list[CreditCell] = []
    for draft in sorted({cell.draft for cell in known} | {key[1] for key in fresh}):
        own = LearnedState(acceptance=tuple(c for c in known if c.draft == draft), requests=learned.requests)
        counts = {key: hits for key, hits in fresh.items() if key[1] == draft}
        moved = learn_delta(own, _as_acceptance(counts, delta.seconds), now=now).acceptance
        cells += [CreditCell(**{**dict(cell), "draft": draft}) for cell in moved]
    return _with_credit(learned, cells)


def own_acceptance(delta: Delta, draft: str) -> Delta:
    """Return the poll with the acceptance of ``draft`` on its own, in tasks that merged other drafts with it."""
    credited = {key: hits for key, hits in delta.credit.items() if key[1] == draft}
    if not credited:
        return delta
    tasks, own = {key[0] for key in credited}, _as_acceptance(credited, delta.seconds)
    rest = {key: hits for key, hits in delta.acceptance.items() if key[0] not in tasks}
    siblings = {key: hits for key, hits in delta.siblings.items() if key[0] not in tasks}
    return replace(delta, acceptance={**rest, **own.acceptance}, siblings={**siblings, **own.siblings})


def counts_of(learned: LearnedState, task: str, draft: str) -> Counts:
    """Return the counts of a draft, or of the common order, in one task."""
    return {
        (cell.depth, cell.parent): Hits(cell.hits, cell.total, cell.ranks)
        for cell in learned.credit
        if (cell.task, cell.draft) == (task, draft)
    }


def without_task(learned: LearnedState, task: str) -> LearnedState:
    """Return the state without the credit of one task, which is then measured again."""
    return _with_credit(learned, [cell for cell in learned.credit if cell.task != task])


def carried(learned: LearnedState, task: str, now: float) -> LearnedState:
    """Return the state after the drafts of a task changed: its acceptance is an estimate, and counts for few drafts.

    It is a change point: rows that were chosen by the evidence before have no claim against others, and what is
    measured from now on outweighs the estimate within a minute of traffic. The credit is measured again.
    """
    cells = (_carried(cell, now) if cell.task == task else cell for cell in learned.acceptance)
    return without_task(learned.model_copy(update={"acceptance": tuple(cells)}), task)


def _carried(cell: AcceptanceCell, now: float) -> AcceptanceCell:
    share = min(1.0, TUNING.carried_drafts / cell.total) if cell.total > 0 else 1.0
    counts = {"hits": rounded(cell.hits * share), "total": rounded(cell.total * share)}
    ranks = tuple(rounded(count * share) for count in cell.ranks)
    marks = {"new_hits": 0.0, "new_total": 0.0, "at": now, "changed_at": now}
    return cell.model_copy(update={**counts, **marks, "ranks": ranks})


def _as_acceptance(counts: Mapping[tuple[str, str, int, Literal["main", "sibling"]], Hits], seconds: float) -> Delta:
    return Delta(
        seconds=seconds,
        acceptance={(task, depth): hits for (task, _, depth, parent), hits in counts.items() if parent == "main"},
        siblings={(task, depth): hits for (task, _, depth, parent), hits in counts.items() if parent == "sibling"},
    )


def _with_credit(learned: LearnedState, cells: Iterable[CreditCell]) -> LearnedState:
    """Return the state with at most ``max_cells`` cells, those of the highest counts among the latest."""
    by_use = sorted(cells, key=lambda cell: (-cell.at, -cell.total, cell.task, cell.draft, cell.depth, cell.parent))
    most = sorted(by_use[: TUNING.max_cells], key=lambda cell: (cell.task, cell.draft, cell.depth, cell.parent))
    return learned if tuple(most) == learned.credit else learned.model_copy(update={"credit": tuple(most)})


# Estimate the acceptance of a task with fewer of its merged drafts, from the credit of each draft. Pure.
#
# The rates of the task's own draft alone are those of its credit. The gain of merging is shared among the merged drafts
# by their credit, so that the rates of all drafts together are the measured ones.

Names = tuple[str, ...]
"""Names of merged drafts, in the order of the spec."""


@dataclass(frozen=True, slots=True)
class TaskDrafts:
    """Drafts of one task: hashes by name, and where they extend the tree without draft passes."""

    task: str
    own_hash: str
    hashes: Mapping[str, str]
    """Hashes of the declared drafts, by name; empty where no worker reported it."""
    extensions: Mapping[str, int] = field(default_factory=dict)
    """Depth to which a draft without passes extends the main path, by name; absent for 0."""
    has_passes: bool = True
    """True if the task's own draft has passes. It then proposes at every node of the planned tree."""


@dataclass(frozen=True, slots=True)
class Credit:
    """Measured counts of one task with its ``running`` drafts."""

    drafts: TaskDrafts
    running: Names
    common: Counts
    own: Counts
    merged: Mapping[str, Counts]
    """By name."""
    effect: float
    """Design effect: so many drafts of one request count as one."""

    @classmethod
    def of(cls, learned: LearnedState, drafts: TaskDrafts, running: Names) -> Credit:
        """Return the credit that the state has for a task."""
        return cls(
            drafts,
            running,
            counts_of(learned, drafts.task, COMMON),
            counts_of(learned, drafts.task, drafts.own_hash) if drafts.own_hash else {},
            {n: counts_of(learned, drafts.task, drafts.hashes[n]) if drafts.hashes.get(n) else {} for n in running},
            design_effect(learned, drafts.task),
        )

    @property
    def is_measured(self) -> bool:
        """True if enough independent drafts are known, in the own order and in the common one."""
        first = [counts.get((1, "main"), NO_HITS).total for counts in (self.common, self.own)]
        return min(first) / self.effect >= TUNING.least_drafts

    def share_of_accepted(self, names: Names) -> float:
        """Return the share of the accepted tokens that drafts proposed first; tokens of several count once at most."""
        accepted = sum(hits.hits + sum(hits.ranks) for hits in self.common.values())
        credited = sum(hits.hits for name in names for hits in self.merged[name].values())
        return min(1.0, credited / accepted) if accepted > 0 else 0.0

    # --- fewer drafts ---------------------------------------------------------------------------------------------

    def acceptance(self, learned: LearnedState, names: Names, depth: int, top_k: int) -> TaskAcceptance:
        """Return the acceptance of the task with the drafts ``names``, which are among the running ones."""
        return task_acceptance(self.with_counts(learned, names), self.drafts.task, depth, top_k)

    def with_counts(self, learned: LearnedState, names: Names) -> LearnedState:
        """Return the state as if the task's counts were those with the drafts ``names``."""
        task = self.drafts.task
        counts = {place: hits for place in self.common if (hits := self._counts(place, names)) is not None}
        at = max((cell.at for cell in learned.credit if cell.task == task), default=0.0)
        cells = [
            AcceptanceCell(
                task=task, depth=depth, parent=parent, hits=hits.hits, total=hits.total, ranks=hits.ranks, at=at
            )
            for (depth, parent), hits in sorted(counts.items())
        ]
        others = (cell for cell in learned.acceptance if cell.task != task)
        both = sorted((*others, *cells), key=lambda cell: (cell.task, cell.depth, cell.parent))
        return learned.model_copy(update={"acceptance": tuple(both)})

    def error(self, names: Names, acceptance: TaskAcceptance) -> dict[Position, float]:
        """Return the variance of the differences between the running rates and those with the drafts ``names``.

        Both rates are measured at the same nodes, so only nodes at which one of them alone was right differ. Without
        the dropped drafts, a node can be lost only where one of these was right.
        """
        variances: dict[Position, float] = {}
        for depth, ranks in enumerate(acceptance.main, start=1):
            hits = self.common.get((depth, "main"), NO_HITS)
            if hits.total >= 1:
                before, after = min(1.0, hits.hits / hits.total), ranks[0].mean
                loss = before - after
                dropped = [
                    self.merged[name].get((depth, "main"), NO_HITS) for name in self.running if name not in names
                ]
                credit = sum(one.hits + sum(one.ranks) for one in dropped) + TUNING.half_count
                lost = min(credit / (hits.total + 1), before, 1 - after)
                apart = before * (1 - after) + after * (1 - before)
                differing = max(abs(loss), min(apart, 2 * max(0.0, lost) - loss))
                variances[depth, True, 0] = max(0.0, differing - loss**2) * self.effect / hits.total
        return variances

    def _counts(self, place: Place, names: Names) -> Hits | None:
        """Return the counts at one place with the drafts ``names``; None where none of them proposes."""
        common, own = self.common[place], self.own.get(place, NO_HITS)
        if names == self.running:
            return common
        credits = {name: self.merged[name].get(place, NO_HITS).hits for name in self.running}
        total = sum(credits.values()) + TUNING.half_count * len(credits)
        share = sum(credits[name] + TUNING.half_count for name in names) / total if names else 0.0
        if own.total < 1:
            return common.times(share) if names else None
        # A lookup proposes nothing at some nodes; without it, these are no part of its counts.
        alone = own.times(common.total / (own.total if self.drafts.has_passes else max(own.total, common.total)))
        mixed = alone.times(1 - share).plus(common.times(share))
        return Hits(min(mixed.hits, common.total), common.total, mixed.ranks)

    # --- extensions of the main path ------------------------------------------------------------------------------

    def extension(self, names: Names, depth: int, survival: float) -> tuple[float, float]:
        """Return the tokens and the nodes that drafts without passes add to a main path of ``depth`` in a step.

        Args:
            names: Merged drafts.
            depth: Depth of the planned main path; at 0 nothing is extended.
            survival: Probability that the whole planned path is accepted.
        """
        reach = {name: most for name in names if (most := self.drafts.extensions.get(name, 0)) > depth > 0}
        if not reach:
            return 0.0, 0.0
        first = self.common.get((1, "main"), NO_HITS).total
        proposed = sum(self.merged[name].get((1, "main"), NO_HITS).total for name in reach)
        nodes = min(1.0, proposed / first) * (max(reach.values()) - depth) if first > 0 else 0.0
        tokens, alive = 0.0, survival
        for level in range(depth + 1, max(reach.values()) + 1):
            alive *= max(self._extended(name, level) for name in reach if reach[name] >= level)
            tokens += alive
        return tokens, nodes

    def _extended(self, name: str, level: int) -> float:
        """Return the probability that a draft proposes the next token of the main path, and is right."""
        parents = self.common.get((level - 1, "main"), NO_HITS).hits
        hits = self.merged[name].get((level, "main"), NO_HITS).hits
        return min(1.0, hits / parents) if parents >= 1 else 0.0


def subsets_of(running: Sequence[str]) -> list[Names]:
    """Return all subsets of the drafts that run, in their order, the largest first."""
    sizes = range(len(running), -1, -1)
    return [names for size in sizes for names in combinations(running, size)]


# Rule for the drafts that a task merges: an axis of the planner's search, decided by the planner's rule. Pure.
#
# | case | condition | drafts |
# |---|---|---|
# | nothing is known, or drafts changed | first decision; another list in the spec; another hash | all declared |
# | a gain | sure as for a shape, over the best one of the running drafts; the row is free | the best subset |
# | dropped drafts were not measured for long | as after plain decoding: a trial is worth it | all, on trial |
# | a trial was measured, or its time is over | | the better of both, or one that is surely better |

Because = Literal["bounds", "gain", "trial"]


@dataclass(frozen=True, slots=True)
class Option:
    """Drafts that a task could merge, and steps of the present load with them."""

    names: Names
    steps: tuple[Choice, ...]
    """By shape of the task."""
    same: Choice
    """With the best shape of the running drafts."""

    @property
    def best(self) -> Choice:
        return min(self.steps, key=RANK)


@dataclass(frozen=True, slots=True)
class Step:
    """A choice, and why it changed; ``because`` is None where the drafts stay."""

    choice: MergeChoice
    because: Because | None = None
    reason: str = ""
    """Expected gain of the change in words; empty if the drafts stay."""


def all_declared(task: str, declared: Names, hashes: tuple[str, ...]) -> MergeChoice:
    """Return the choice without data."""
    return MergeChoice(task=task, drafts=declared, declared=declared, hashes=hashes)


def renewed(known: MergeChoice | None, task: str, declared: Names, hashes: tuple[str, ...]) -> Step:
    """Return the choice for these drafts: the known one, unless it was made for others."""
    fresh = all_declared(task, declared, hashes)
    if known is None:
        return Step(fresh)
    if known.declared == declared and len(known.hashes) == len(hashes):
        pairs = list(zip(known.hashes, hashes, strict=True))
        if all(before == now or "" in (before, now) for before, now in pairs):
            # A worker that does not answer leaves the hashes as they were.
            return Step(known.model_copy(update={"hashes": tuple(now or before for before, now in pairs)}))
    return Step(fresh.model_copy(update={"moves": known.moves}), "bounds")


def options_of(rule: LoadDecision, learned: LearnedState, credit: Credit, bounds: dict[Names, Bounds]) -> list[Option]:
    """Return the steps of the present load with every subset of the running drafts, all of these first.

    Args:
        rule: Decision for the present load, where the task has traffic.
        learned: Learned state of the deployment.
        credit: Credit of the task's drafts.
        bounds: Bounds of the task's shapes with each subset of its running drafts.
    """
    shapes, name = tuple((row.task, row.shape) for row in rule.rows), credit.drafts.task
    options: list[Option] = []
    for names in subsets_of(credit.running):
        tasks = (
            _merging(task, learned, credit, names, bounds[names]) if task.name == name else task
            for task in rule.search.tasks
        )
        search = replace(rule.search, tasks=tuple(tasks), known={})
        now, _, found = search.best(shapes, [name])
        best = options[0].best if options else min((now, *found), key=RANK)
        options.append(Option(names, (now, *found), search.evaluate([best.shapes])[best.shapes]))
    return options


def next_step(known: MergeChoice, options: Sequence[Option], rule: LoadDecision | None, now: float) -> Step:
    """Return the next choice.

    Args:
        known: The present choice.
        options: Subsets of the running drafts; none while too little is known of them.
        rule: Decision for the present load; None while no step was timed, and where the task has no traffic.
        now: Time in seconds since the epoch.
    """
    if known.before is not None:
        return _after_trial(known, known.before, options, rule, now)
    if rule is None or not rule.is_free(known):
        return Step(known)
    moves = (*recent_changes(known.moves, now), now)
    if options:
        worth = [
            (step, option)
            for option in options[1:]
            for step in option.steps
            if rule.is_worth_it(options[0].best, step, outdated=False)
        ]
        if worth:
            step, option = min(worth, key=lambda one: one[0].rank)
            return _changed(known, rule, options, option, step, now, moves)
    share = next(task.demand for task in rule.search.tasks if task.name == known.task)
    doubt = share**2 * rule.drift_variance(now - known.since)
    if known.drafts != known.declared and rule.trial_value(-math.log1p(known.loss), doubt, share=share) > 0:
        update = {"drafts": known.declared, "before": known.drafts, "since": now, "moves": moves}
        return Step(known.model_copy(update=update), "trial")
    return Step(known)


def _after_trial(
    known: MergeChoice, before: Names, options: Sequence[Option], rule: LoadDecision | None, now: float
) -> Step:
    """Return the better drafts once the trial was measured, and those before it once its time is over."""
    age = now - known.since
    if options and rule is not None and age >= PLANNING.recent_seconds:
        kept = min((one for one in options if one.names in (known.drafts, before)), key=lambda one: one.best.rank)
        better = (one for one in options if rule.bound(kept.best, one.best, PLANNING.z) > 0)
        best = min(better, key=lambda one: one.best.rank, default=kept)
        return _changed(known, rule, options, best, best.best, now, known.moves)
    if 0 <= age < PLANNING.window_seconds:
        return Step(known)
    return Step(known.model_copy(update={"drafts": before, "before": None, "since": now}), "trial")


def _changed(
    known: MergeChoice,
    rule: LoadDecision,
    options: Sequence[Option],
    best: Option,
    step: Choice,
    now: float,
    moves: tuple[float, ...],
) -> Step:
    """Return the change to an option, with what the drafts bring that it leaves out, or that it keeps."""
    is_whole, gain = best is options[0], rule.search.gain(options[0].best, step)
    apart, verb = best, "dropped"
    if is_whole and len(options) > 1:
        apart, verb = min(options[1:], key=lambda one: one.best.rank), "kept"
        step = apart.best
    sure = confidence(rule.search.gain(options[0].best, step), rule.search.gain_error(options[0].best, step))
    left = tuple(name for name in options[0].names if name not in apart.names)
    ratios = apart.same.by_task[known.task] / options[0].same.by_task[known.task], _ratio(apart, options[0])
    reason = gain_text(left, verb, *ratios, 1 - sure if is_whole else sure)
    update = {
        "drafts": best.names,
        "before": None,
        "since": now,
        "moves": moves,
        # A loss above e - 1 is bounded: a trial is then far away in any case.
        "loss": 0.0 if best.names == known.declared else math.expm1(max(0.0, min(1.0, gain))),
        "reason": "" if best.names == known.declared else reason,
    }
    return Step(known.model_copy(update=update), "trial" if known.before is not None else "gain", reason)


def _ratio(one: Option, two: Option) -> float:
    return one.same.seconds.mean / two.same.seconds.mean


def _merging(task: TaskLoad, learned: LearnedState, credit: Credit, names: Names, bounds: Bounds) -> TaskLoad:
    """Return the task with other drafts merged."""
    depth, top_k = len(task.acceptance.main), len(task.acceptance.main[0]) if task.acceptance.main else 1
    rates = credit.acceptance(learned, names, depth, top_k)
    differing = None if names == credit.running else credit.error(names, rates)
    return replace(
        task,
        bounds=replace(task.bounds, methods=bounds.methods),
        acceptance=rates,
        extension=partial(credit.extension, names),
        differing=differing,
    )


# Sentences about merged drafts, as status, `explain` and the history show them.


def listed(names: Names) -> str:
    """Return names in one phrase."""
    *first, last = names or ("nothing",)
    return f"{', '.join(first)} and {last}" if first else last


def merge_text(names: Names, *, is_trial: bool) -> str:
    """Return the drafts as the history shows them before and after a change."""
    return f"merge {', '.join(names) or 'nothing'}{' on trial' if is_trial else ''}"


def gain_text(names: Names, verb: str, tokens_ratio: float, seconds_ratio: float, confidence: float) -> str:
    """Return the tokens and the time that drafts bring, by those of a step without them over those with them."""
    tokens, seconds = 100 * (1 / tokens_ratio - 1), 100 * (1 / seconds_ratio - 1)
    length = "longer" if seconds >= 0 else "shorter"
    return (
        f"{listed(names)} {verb}: {tokens:+.0f} % tokens for {abs(seconds):.0f} % {length} steps,"
        f" {100 * confidence:.0f} % sure"
    )


def task_text(choice: MergeChoice, credit: Credit) -> str:
    """Return the drafts that a task merges, with their credit, and why others are left out."""
    text = f"merges {listed(choice.drafts)}"
    if choice.before is not None:
        tried = tuple(name for name in choice.drafts if name not in choice.before)
        return f"{text}; {listed(tried)} on trial"
    if choice.drafts and credit.common:
        text += f" (credit {100 * credit.share_of_accepted(choice.drafts):.0f} % of accepted tokens)"
    elif choice.drafts:
        text += " (credit not measured yet)"
    return f"{text}; {choice.reason}" if choice.reason else text


# Stage merge: choose which of the drafts that a task declares in ``merge`` take part.


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Result of the stage."""

    learned: LearnedState
    deployment: Deployment
    """The deployment, whose tasks merge the drafts that take part and no others."""
    changes: tuple[DecisionRecord, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    """One sentence for each task that declares merged drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Inputs that all tasks share."""

    deployment: Deployment
    observed: Observation
    delta: Delta | None
    buckets: Buckets
    now: float

    @property
    def speculation(self) -> SpeculationSpec:
        return self.deployment.spec.speculation


def choose_merges(
    deployment: Deployment,
    observed: Observation,
    learned: LearnedState,
    delta: Delta | None,
    buckets: Buckets,
    *,
    now: float,
) -> Merged:
    """Choose the drafts of every task that merges some. Nothing changes for a deployment without such a task.

    Args:
        deployment: The deployment.
        observed: Workers with their reports.
        learned: State after the stages learn and drift.
        delta: Difference of all workers. None if no worker has a new reading.
        buckets: Buckets of concurrency and context that plan rows use.
        now: Operator's clock, in seconds since the epoch.
    """
    tasks = [task for task in deployment.spec.speculation.tasks if task.merge]
    if not tasks:
        is_empty = not (learned.credit or learned.merges)
        emptied = learned if is_empty else learned.model_copy(update={"credit": (), "merges": ()})
        return Merged(learned=emptied, deployment=deployment)
    stage = _Stage(deployment=deployment, observed=observed, delta=delta, buckets=buckets, now=now)
    learned = learn_credit(learned, delta, [task.name for task in tasks], now)
    changes, sentences = list[DecisionRecord](), dict[str, str]()
    for task in tasks:
        learned, change, sentences[task.name] = _decide(stage, learned, task)
        changes += [change] if change else []
    names = {task.name for task in tasks}
    stored = tuple(one for one in learned.merges if one.task in names)
    learned = learned if stored == learned.merges else learned.model_copy(update={"merges": stored})
    return Merged(
        learned=learned, deployment=_with_merges(deployment, learned), changes=tuple(changes), texts=sentences
    )


# --- one task -----------------------------------------------------------------------------------------------------


def _decide(stage: _Stage, learned: LearnedState, task: TaskSpec) -> tuple[LearnedState, DecisionRecord | None, str]:
    """Return the state with the task's next choice, the record of a change, and the sentence about the task."""
    drafts, declared = _drafts_of(stage, learned, task), tuple(one.draft for one in task.merge)
    hashes = (drafts.own_hash, *(drafts.hashes[name] for name in declared))
    mode, known = _mode(stage.speculation, task), _known(learned, task.name)
    if mode in ("Off", "Static", "Advisory"):
        return _as_declared(stage, learned, drafts, all_declared(task.name, declared, hashes), mode)
    if stage.deployment.spec.paused and known is not None:
        step = Step(known)
    else:
        step = renewed(known, task.name, declared, hashes)
    running = Credit.of(learned, drafts, step.choice.drafts)
    if step.because is None and not _is_held(stage, learned, task.name):
        rule = _rule(stage, learned, task.name)
        step = next_step(step.choice, _options(stage, learned, running, rule), rule, stage.now)
    if step.because is None:
        return _stored(learned, step.choice), None, task_text(step.choice, running)
    before = known.drafts if known else declared
    is_news = step.because != "bounds" or set(before) != set(step.choice.drafts)
    was_trial = known is not None and known.before is not None
    record = _record(stage, learned, merge_text(before, is_trial=was_trial), step) if is_news else None
    if step.reason:
        learned = running.with_counts(learned, step.choice.drafts)
    learned = _stored(carried(learned, task.name, stage.now), step.choice)
    return learned, record, task_text(step.choice, Credit.of(learned, drafts, step.choice.drafts))


def _as_declared(
    stage: _Stage, learned: LearnedState, drafts: TaskDrafts, whole: MergeChoice, mode: str
) -> tuple[LearnedState, None, str]:
    """Return the sentence about a task that merges the drafts that the spec declares, whatever was measured."""
    known, running = _known(learned, drafts.task), Credit.of(learned, drafts, whole.drafts)
    if known is not None:
        is_same = set(known.drafts) == set(whole.drafts)
        others = tuple(one for one in learned.merges if one.task != drafts.task)
        learned = learned if is_same else carried(learned, drafts.task, stage.now)
        learned = learned.model_copy(update={"merges": others})
    text = task_text(whole, running)
    rule = _rule(stage, learned, drafts.task) if mode == "Advisory" else None
    options = _options(stage, learned, running, rule)
    if options:
        step = next_step(whole, options, rule, stage.now)
        text += f"; mode Auto would merge {listed(step.choice.drafts)}" if step.because else ""
        text += f": {step.choice.reason}" if step.choice.reason else ""
    return learned, None, text


def _options(stage: _Stage, learned: LearnedState, running: Credit, rule: LoadDecision | None) -> list[Option]:
    """Return the subsets of the running drafts; none while too little is known of them, and without traffic."""
    if rule is None or not running.is_measured or not running.running:
        return []
    name, speculation = running.drafts.task, _with_merges(stage.deployment, learned).spec.speculation
    bounds = {names: bounds_of(_only(speculation, {name: names}), name) for names in subsets_of(running.running)}
    return options_of(rule, learned, running, bounds)


def _rule(stage: _Stage, learned: LearnedState, task: str) -> LoadDecision | None:
    """Return the decision for the present load with the rows that run.

    None while no step was timed, and where the task has no traffic.
    """
    speculation = _with_merges(stage.deployment, learned).spec.speculation
    times = StepTimeModel.fit(learned.costs, learned.wander)
    if times is None or not _is_active(learned, task, stage.now):
        return None
    at = learned.load.row(stage.buckets)
    # Rows that were chosen under an earlier spec may lie outside of the bounds of the present one.
    rows = [
        row.running(bounds_of(speculation, row.task).nearest(row.shape))
        for row in rows_of(speculation, learned, stage.buckets)
        if row.load == at
    ]
    quiet = idle(learned, [row.task for row in rows])
    busy = [row for row in rows if row.task not in quiet]
    if task not in {row.task for row in busy}:
        return None
    load = times.typical(stage.buckets, *at, stage.deployment.spec.engine.max_num_seqs)
    tasks = tasks_at(AcceptanceModel(learned, speculation), busy, load, kv_tokens(stage.observed))
    step_tokens = stage.deployment.spec.step_tokens
    objective = objective_of(speculation.objective, learned, stage.observed.last_reports, step_tokens)
    search = ShapeSearch(times, load, tasks, objective)
    return LoadDecision(speculation, learned, search, busy, stage.now, is_suspended=False, is_present=True)


# --- inputs of the choice -----------------------------------------------------------------------------------------


def _drafts_of(stage: _Stage, learned: LearnedState, task: TaskSpec) -> TaskDrafts:
    """Return the drafts of a task with the hashes that most workers report."""
    specs = {draft.name: draft for draft in stage.speculation.drafts}
    hashes: dict[str, list[str]] = {name: [] for name in specs}
    for report in stage.observed.reports:
        for draft in report.named_drafts:
            if draft.name in hashes and draft.hash:
                hashes[draft.name].append(draft.hash)
    named = {name: max(sorted(set(each)), key=each.count, default="") for name, each in hashes.items()}
    method = specs[task.draft].method if task.draft else stage.speculation.method
    return TaskDrafts(
        task=task.name,
        own_hash=named[task.draft] if task.draft else learned.draft,
        hashes={one.draft: named[one.draft] for one in task.merge},
        extensions={one.draft: one.depth for one in task.merge if one.depth},
        has_passes=method not in DRAFT_FREE,
    )


def _mode(speculation: SpeculationSpec, task: TaskSpec) -> str:
    """Return the mode that decides for a task, as for its depth."""
    if speculation.mode == "Off" or task.mode in ("Off", "Static"):
        return "Off" if speculation.mode == "Off" else str(task.mode)
    return speculation.mode if speculation.mode == "Advisory" or task.mode is None else task.mode


def _is_held(stage: _Stage, learned: LearnedState, task: str) -> bool:
    """Return whether nothing may change: the deployment is paused, or a pin says what the task runs."""
    pin = read_pin_state(stage.deployment, learned.pin).pin
    return stage.deployment.spec.paused or (pin is not None and pin.shape_of(task) is not None)


def _is_active(learned: LearnedState, task: str, now: float) -> bool:
    """Return whether something was drafted for the task within the last minute."""
    first = (cell.at for cell in learned.acceptance if (cell.task, cell.depth, cell.parent) == (task, 1, "main"))
    return now - max(first, default=0.0) <= PLANNING.window_seconds


# --- results ------------------------------------------------------------------------------------------------------


def _known(learned: LearnedState, task: str) -> MergeChoice | None:
    return next((one for one in learned.merges if one.task == task), None)


def _stored(learned: LearnedState, chosen: MergeChoice) -> LearnedState:
    known = _known(learned, chosen.task)
    if known == chosen:
        return learned
    merges = (*(one for one in learned.merges if one.task != chosen.task), chosen)
    return learned.model_copy(update={"merges": tuple(sorted(merges, key=lambda one: one.task))})


def _with_merges(deployment: Deployment, learned: LearnedState) -> Deployment:
    """Return the deployment as if its tasks declared the drafts that take part, and no others."""
    speculation = _only(deployment.spec.speculation, {one.task: one.drafts for one in learned.merges})
    if speculation is deployment.spec.speculation:
        return deployment
    return replace(deployment, spec=deployment.spec.model_copy(update={"speculation": speculation}))


def _only(speculation: SpeculationSpec, drafts: Mapping[str, Names]) -> SpeculationSpec:
    """Return the spec whose tasks merge these drafts only. Tasks that are not named stay."""
    tasks = tuple(
        task.model_copy(update={"merge": tuple(one for one in task.merge if one.draft in drafts[task.name])})
        if task.name in drafts
        else task
        for task in speculation.tasks
    )
    return speculation if tasks == speculation.tasks else speculation.model_copy(update={"tasks": tasks})


def _record(stage: _Stage, learned: LearnedState, before: str, step: Step) -> DecisionRecord:
    reasons = {
        "bounds": "the drafts of the task changed, and all of them take part until their credit is measured",
        "gain": step.choice.reason,
        "trial": "a trial of the dropped drafts begins"
        if step.choice.before is not None
        else "the trial was not measured",
    }
    reason = step.reason or reasons[step.because or "bounds"]
    return DecisionRecord(
        time=iso(stage.now),
        measured=measured(learned, step.choice.task),
        load=f"every load, task {step.choice.task}",
        before=before,
        after=merge_text(step.choice.drafts, is_trial=step.choice.before is not None),
        expected_gain_percent=round(100 * step.choice.loss, 1) if step.reason and step.choice.loss else None,
        cause=step.because,
        reason=reason,
    )
