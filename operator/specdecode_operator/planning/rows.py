"""The depth of every row of the plan, with hysteresis.

A row moves to the depth with the least measured time per token when the gain exceeds the least gain with 90 %
certainty and the row has stood for its dwell. Speculation that loses against plain decoding stops without waiting;
it comes back when measurements say so and its patience is over, and patience doubles each time it was in vain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from specdecode_operator.api.v1alpha1 import HysteresisSpec, SpeculationSpec
from specdecode_operator.memory import Kept, RowMemory
from specdecode_operator.planning.acceptance import chain, drafts_seen
from specdecode_operator.planning.loads import present_row, typical
from specdecode_operator.planning.options import Options, weigh
from specdecode_operator.planning.steptime import StepTimes
from specdecode_worker.contract import OTHER_TASK, Buckets

CERTAINTY = 0.9
LEAST_DRAFTS = 100
"""What a task must have shown before it gets rows of its own, and ``other`` before its rows move."""
LONGEST_PATIENCE_SECONDS = 3600.0
FRESH_SECONDS = 120.0
"""Cells of speculative steps that are younger need no probe."""
BUSY_SECONDS = 30.0
"""A deployment without traffic for longer learns nothing from a probe."""
PROBE_SECONDS = 10.0
"""Until a probe has reached the workers and a whole poll of its steps was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A row that moved."""

    row: RowMemory
    before: int
    gain: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    rows: tuple[RowMemory, ...]
    changes: tuple[Change, ...] = ()


def choose(
    speculation: SpeculationSpec,
    kept: Kept,
    found: Buckets,
    *,
    max_num_seqs: int,
    now: float,
    held_back: Collection[tuple[int, int]] = (),
) -> Chosen:
    """Every row as it should be from now on. ``held_back`` are loads where the guards of all workers run plainly."""
    times = StepTimes.fit(kept.costs, kept.wander)
    rows: list[RowMemory] = []
    changes: list[Change] = []
    for row in _rows(speculation, kept, found):
        change = _bounded(row, speculation, now)
        if change is None and times is not None:
            held = (row.concurrency, row.context) in held_back
            change = _moved(row, speculation, kept, found, times, max_num_seqs, now, held=held)
        rows.append(change.row if change else row)
        if change and change.before != change.row.depth:
            changes.append(change)
    return Chosen(rows=tuple(rows), changes=tuple(changes))


def _rows(speculation: SpeculationSpec, kept: Kept, found: Buckets) -> Iterator[RowMemory]:
    """One per load and task. A task has rows once it was seen often enough; until then it runs those of ``other``."""
    known = {(row.task, row.concurrency, row.context): row for row in kept.rows}
    named = [task.name for task in speculation.tasks if drafts_seen(kept, task.name) >= LEAST_DRAFTS]
    for task in [OTHER_TASK, *named]:
        for concurrency in range(len(found.concurrency) + 1):
            for context in range(len(found.context) + 1):
                start = known.get((OTHER_TASK, concurrency, context))
                depth = start.depth if start and start.since else speculation.depth.initial
                blank = RowMemory(concurrency=concurrency, context=context, task=task, depth=depth)
                row = known.get((task, concurrency, context), blank)
                # A row that never moved follows depth.initial.
                yield row if row.since else row.model_copy(update={"depth": depth})


def _bounded(row: RowMemory, speculation: SpeculationSpec, now: float) -> Change | None:
    """The bounds of the spec hold at once; 0 stands outside them only while speculation is off for losing."""
    depth = max(speculation.depth.min, min(speculation.depth.max, row.depth))
    if depth == row.depth:
        return None
    reason = f"spec.speculation.depth allows {speculation.depth.min} to {speculation.depth.max}"
    return Change(row=row.model_copy(update={"depth": depth, "since": now}), before=row.depth, gain=None, reason=reason)


def _moved(
    row: RowMemory,
    speculation: SpeculationSpec,
    kept: Kept,
    found: Buckets,
    times: StepTimes,
    max_num_seqs: int,
    now: float,
    *,
    held: bool,
) -> Change | None:
    if row.probing and not _probed(row, kept):
        return None
    load = typical(kept.costs, found, row.concurrency, row.context, max_num_seqs)
    depths = set(range(speculation.depth.min, speculation.depth.max + 1)) | {row.depth}
    task = None if row.task == OTHER_TASK and not speculation.tasks else row.task
    chances = chain(kept, task, max(depths))
    options = weigh(times, chances, load, row.context, depths)
    if not any(option.seconds.steps for option in options.by_depth.values()):
        return None  # nobody has been at this load: what other loads cost is no reason to move
    here = present_row(kept.load, found) == (row.concurrency, row.context)
    return (
        _stop(row, options, speculation.hysteresis, now, held=held)
        or _improve(row, options, speculation.hysteresis, now)
        or (_probe(row, options, kept, now) if here else None)
    )


def _stop(row: RowMemory, options: Options, hysteresis: HysteresisSpec, now: float, *, held: bool) -> Change | None:
    """Speculation that loses against plain decoding stops at once, where depth 0 is allowed; a probe at first doubt,
    and so what is ``held`` back by the guards: they have measured it, and hold back what there is to learn from."""
    if row.depth == 0 or 0 not in options.by_depth:
        return None
    if options.confidence(row.depth, 0, 0.0) < (0.5 if row.probing or held else CERTAINTY):
        return None
    plain = options.by_depth[0].per_token
    winners = [depth for depth, option in options.by_depth.items() if depth and option.per_token < plain]
    best = _surest(row.depth, options, 0.0, winners)
    if best:
        return _to(row, best, options, now, "speculation loses against plain decoding; ")
    patience = max(float(hysteresis.min_dwell_seconds), 1.0)
    if row.patience and now - row.since < 4 * row.patience:
        patience = min(LONGEST_PATIENCE_SECONDS, 2 * row.patience)
    change = _to(row, 0, options, now, "speculation loses against plain decoding; ")
    waiting = change.row.model_copy(update={"patience": patience, "off_until": now + patience})
    return replace(change, row=waiting)


def _improve(row: RowMemory, options: Options, hysteresis: HysteresisSpec, now: float) -> Change | None:
    if now - row.since < hysteresis.min_dwell_seconds or (row.depth == 0 and now < row.off_until):
        return None
    best = _surest(row.depth, options, hysteresis.min_gain_percent / 100, options.by_depth)
    return None if best is None else _to(row, best, options, now, "")


def _probe(row: RowMemory, options: Options, kept: Kept, now: float) -> Change | None:
    """Speculation that was stopped and about which nothing new is known is tried again once patience is over."""
    if row.depth or not row.patience or now < row.off_until or now - kept.load.at > BUSY_SECONDS:
        return None
    if any(cell.draft_passes and now - cell.at < FRESH_SECONDS for cell in kept.costs):
        return None
    deeper = [option for depth, option in options.by_depth.items() if depth]
    if not deeper:
        return None
    best = min(deeper, key=lambda option: option.per_token).depth
    change = _to(row, best, options, now, f"a probe after {now - row.since:.0f} s of plain decoding; ")
    return replace(change, row=change.row.model_copy(update={"probing": True}))


def _probed(row: RowMemory, kept: Kept) -> bool:
    """Whether the chains that a probe runs were timed since it began."""
    return any(cell.draft_passes == row.depth and cell.at - row.since > PROBE_SECONDS for cell in kept.costs)


def _surest(before: int, options: Options, least: float, depths: Iterable[int]) -> int | None:
    """The depth with the least time per token among those of ``depths`` that are surely better than ``before``."""
    sure = [depth for depth in depths if depth != before and options.confidence(before, depth, least) >= CERTAINTY]
    return min(sure, key=lambda depth: options.by_depth[depth].per_token, default=None)


def _to(row: RowMemory, depth: int, options: Options, now: float, why: str) -> Change:
    gain = options.gain(row.depth, depth)
    sure = options.confidence(row.depth, depth, 0.0)
    chances = ", ".join(f"{chance.p:.2f}" for chance in options.chances)
    reason = (
        f"{why}{options.by_depth[row.depth]} -> {options.by_depth[depth]} a step; acceptance by depth {chances};"
        f" {100 * gain:+.0f} % tokens in the same time, {100 * sure:.0f} % sure"
    )
    moved = row.model_copy(update={"depth": depth, "since": now, "probing": False})
    return Change(row=moved, before=row.depth, gain=gain, reason=reason)
