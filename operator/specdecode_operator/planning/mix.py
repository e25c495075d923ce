"""Who runs at a load: the tasks, their shares of the running sequences, and what each may and can draft."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from specdecode_operator.api.v1alpha1 import SpeculationSpec
from specdecode_operator.planning.acceptance import rates
from specdecode_operator.planning.bounds import Bounds, bounds_of
from specdecode_operator.planning.loads import Load
from specdecode_operator.planning.promise import Promise, Prompt
from specdecode_operator.planning.situation import Situation, Task
from specdecode_operator.planning.steptime import StepTimes
from specdecode_operator.planning.trees import Rates, expected
from specdecode_operator.state.learned import LearnedState, RowState
from specdecode_operator.telemetry.counters import RequestSums, TrafficSums
from specdecode_worker.contract import OTHER_TASK

LEAST_SHARE = 0.02
"""A task that sends nothing now still has rows, and their shapes must mean something."""
LEAST_TRAFFIC = 0.001
"""Share of the tokens below which a task has no traffic of its own."""
STEPS_AHEAD = 2
"""The engine reserves cache for two worst-case steps of every sequence."""

SituationAt = Callable[[Load, int, Sequence[RowState]], Situation | None]


def situations(
    speculation: SpeculationSpec,
    learned: LearnedState,
    times: StepTimes | None,
    *,
    kv_tokens: float | None,
    prompt: Prompt,
) -> SituationAt:
    """Makes the situation of a load and its rows. What is the same at every load is found once."""
    known: dict[tuple[str, Bounds], Rates] = {}
    promise = Promise.of(speculation.objective, prompt)

    def rates_of(name: str, bounds: Bounds) -> Rates:
        if (name, bounds) not in known:
            task = None if name == OTHER_TASK and not speculation.tasks else name
            known[name, bounds] = rates(learned, task, bounds.most, bounds.top_k)
        return known[name, bounds]

    def situation(load: Load, context: int, rows: Sequence[RowState]) -> Situation | None:
        if times is None:
            return None
        found = []
        for row in rows:
            bounds = bounds_of(speculation, row.task)
            found.append((row, _fitting(bounds, load, kv_tokens), rates_of(row.task, bounds)))
        tokens = {row.task: expected(chances, row.shape) for row, _, chances in found}
        shares = _shares(learned, tokens)
        mean = sum(shares[task] * tokens[task] for task in tokens)
        known_by = _known_by(learned, tokens)
        tasks = tuple(
            Task(
                name=row.task,
                bounds=bounds,
                rates=chances,
                share=shares[row.task],
                demand=shares[row.task] * tokens[row.task] / mean,
                requests=known_by[row.task],
            )
            for row, bounds, chances in found
        )
        return Situation(times, load, context, tasks, promise, _requests(learned))

    return situation


def shares(speculation: SpeculationSpec, learned: LearnedState, rows: Sequence[RowState]) -> dict[str, float]:
    """Of the running sequences, by task that has rows."""
    tokens = {}
    for row in rows:
        bounds = bounds_of(speculation, row.task)
        task = None if row.task == OTHER_TASK and not speculation.tasks else row.task
        tokens[row.task] = expected(rates(learned, task, bounds.most, bounds.top_k), bounds.nearest(row.shape))
    return _shares(learned, tokens)


def idle(learned: LearnedState, tasks: Collection[str]) -> frozenset[str]:
    """Those of ``tasks`` that send nothing, or next to nothing, while others do. Who has no rows counts as
    ``other``."""
    tokens = _by_row(tasks, ((cell.task, TrafficSums(*cell.sums).output_tokens) for cell in learned.traffic))
    total = sum(tokens.values())
    return frozenset(task for task in tasks if total > 0 and tokens[task] < LEAST_TRAFFIC * total)


def _shares(learned: LearnedState, tokens: dict[str, float]) -> dict[str, float]:
    """``tokens`` of a step by task. A sequence is there for output / tokens steps; who has no rows counts as
    ``other``, whose rows it runs."""
    output = _by_row(tokens, ((cell.task, TrafficSums(*cell.sums).output_tokens) for cell in learned.traffic))
    steps = {task: count / tokens.get(task, 1.0) for task, count in output.items()}
    total = sum(steps[task] for task in tokens)
    raw = {task: max(LEAST_SHARE, steps[task] / total) if total > 0 else 1.0 for task in tokens}
    return {task: share / sum(raw.values()) for task, share in raw.items()}


def _known_by(learned: LearnedState, tasks: Collection[str]) -> dict[str, float]:
    """Of how many requests the rates of each task are known: what is remembered of their drafts, by what a request
    drafts; never more than came. Where nobody counted any, it is no reason for doubt."""
    first = (cell for cell in learned.acceptance if cell.depth == 1 and cell.parent == "main")
    ended = [(cell.task, RequestSums(*cell.sums)) for cell in learned.requests]
    came = _by_row(tasks, ((cell.task, TrafficSums(*cell.sums).arrivals) for cell in learned.traffic))
    drafts = _by_row(tasks, ((cell.task, cell.total) for cell in first))
    count = _by_row(tasks, ((task, sums.n) for task, sums in ended))
    drafted = _by_row(tasks, ((task, sums.d) for task, sums in ended))
    return {task: min(came[task] or math.inf, _by_drafts(drafts[task], count[task], drafted[task])) for task in tasks}


def _by_drafts(drafts: float, ended: float, drafted: float) -> float:
    return drafts * ended / drafted if min(drafts, ended, drafted) > 0 else math.inf


def _by_row(tasks: Collection[str], found: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sums by task. Who has no rows here counts as ``other``, be that among ``tasks`` or not."""
    sums = dict.fromkeys(tasks, 0.0)
    for name, value in found:
        task = name if name in tasks else OTHER_TASK
        sums[task] = sums.get(task, 0.0) + value
    return sums


def _requests(learned: LearnedState) -> float:
    """Those that the shares are made of. Lengths vary about as much as their mean, so two say as much as one would
    whose length is known."""
    return max(1.0, sum(TrafficSums(*cell.sums).finished for cell in learned.traffic) / 2)


def _fitting(bounds: Bounds, load: Load, kv_tokens: float | None) -> Bounds:
    """No more nodes than the cache has room for at this load."""
    if not kv_tokens:
        return bounds
    room = int((kv_tokens / load.sequences - load.context_tokens) / STEPS_AHEAD)
    nodes = max(1, bounds.least, min(bounds.max_nodes, room))
    return replace(bounds, max_nodes=nodes, most=max(bounds.least, min(bounds.most, nodes)))
