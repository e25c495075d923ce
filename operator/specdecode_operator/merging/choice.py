"""Rule for the drafts that a task merges: an axis of the planner's search, decided by the planner's rule. Pure.

| case | condition | drafts |
|---|---|---|
| nothing is known, or drafts changed | first decision; another list in the spec; another hash | all declared |
| a gain | sure as for a shape, over the best one of the running drafts; the row is free | the best subset |
| dropped drafts were not measured for long | as after plain decoding: a trial is worth it | all, on trial |
| a trial was measured, or its time is over | | the better of both, or one that is surely better |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from specdecode_operator.merging.subsets import Credit, Names, subsets_of
from specdecode_operator.planning.decision_rule import LoadDecision, recent_changes
from specdecode_operator.planning.estimates import confidence
from specdecode_operator.planning.shape_search import RANK, Choice
from specdecode_operator.planning.task_bounds import Bounds
from specdecode_operator.planning.tuning import TUNING
from specdecode_operator.planning.workload import TaskLoad
from specdecode_operator.state.learned import LearnedState, MergeChoice

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
    if options and rule is not None and age >= TUNING.recent_seconds:
        kept = min((one for one in options if one.names in (known.drafts, before)), key=lambda one: one.best.rank)
        better = (one for one in options if rule.bound(kept.best, one.best, TUNING.z) > 0)
        best = min(better, key=lambda one: one.best.rank, default=kept)
        return _changed(known, rule, options, best, best.best, now, known.moves)
    if age < TUNING.window_seconds:
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
