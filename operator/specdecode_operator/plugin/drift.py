"""Lines of ``explain`` on the drift of the draft: speed by task against the baseline, and the worth of a run. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from specdecode_operator.api.v1alpha1 import Spec
from specdecode_operator.drafts.drift import BATCH_REQUESTS
from specdecode_operator.plugin.text import ABSENT, figure, percent, table
from specdecode_operator.rollout.drift_worth import worth_of_drift
from specdecode_operator.state.drift_state import ALL_TASKS, DriftState, TaskDrift

HEAD = ("TASK", "BASELINE", "NOW", "SPEED", "EVIDENCE")
MAX_EVIDENCE = 999_999.0
"""Largest evidence that is shown. It grows without a bound where all tasks together are slower because one is."""


def drift_lines(spec: Spec, drift: DriftState, now: float) -> Iterator[str]:
    """Yield the speed of each task against its baseline. Nothing is yielded before a worker reported its draft."""
    if not drift.draft:
        return
    yield ""
    if drift.tasks:
        yield from table(HEAD, [_row(task, now) for task in drift.tasks], "  ")
        yield (
            "Baseline and now are tokens per step of a chain of three, at this time of the day. Evidence is compared"
            " with the number after it, at which a drift is found."
        )
    else:
        yield f"The baseline of the draft's speed is learnt from the first {BATCH_REQUESTS} requests on."
    if drift.renewed:
        yield f"The baseline began anew: {drift.renewed}."
    if drift.stale:
        worth = worth_of_drift(spec, drift).sentence()
        yield f"{worth[:1].upper()}{worth[1:]}."


def _row(task: TaskDrift, now: float) -> tuple[str, ...]:
    name = "(all)" if task.task == ALL_TASKS else task.task
    if task.is_learning:
        return name, f"learning, {sum(task.counts):.0f} batches", ABSENT, ABSENT, ABSENT
    usual, present = task.tokens(now)
    if not task.recent_weight:
        return name, figure(usual), ABSENT, ABSENT, ABSENT
    evidence = min(task.threshold * task.evidence, MAX_EVIDENCE)
    compared = f"{figure(evidence, 0)} of {math.ceil(task.threshold)}{' (drift)' if task.since else ''}"
    return name, figure(usual), figure(present), percent(round(-100 * task.loss)), compared
