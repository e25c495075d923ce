"""A simulated worker whose requests merge several drafts: what each proposes, what it costs, and its credit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from specdecode_operator.planning.estimates import buckets_for
from specdecode_operator.state.learned import CreditCell
from specdecode_worker.contract import MAX_RANKS, DraftState, Method, Plan, Report, TreeShape, draft_passes
from support.operators.fleet import Loop, SimulatedWorker, Truth, deployment_with
from support.operators.reports import main_cell

TASK, OWN = "edits", "d1"
QUICK: dict[str, Any] = {"min_dwell_seconds": 20, "min_gain_percent": 3}
HEAD: dict[str, Any] = {"name": "head", "method": "eagle3", "uri": "hf://org/head"}
LOOKUP: dict[str, Any] = {"name": "lookup", "method": "ngram"}


@dataclass
class MergedTruth:
    """Draft that is merged: the chance that it is right where the task's own draft is wrong, and its credit beyond."""

    rescue: float
    agreement: float = 0.5
    """Chance that it is right, too, where the own draft is right."""
    method: Method = "eagle3"


@dataclass
class MergingWorker(SimulatedWorker):
    """Worker of one task, which runs the drafts that the plan merges. A pass takes 4 ms, a verified token 0.4 ms."""

    own: float = 0.6
    """Chance that the task's own draft is right, at every depth."""
    merged: dict[str, MergedTruth] = field(default_factory=dict)
    credit: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    pass_seconds: float = 0.004

    def __post_init__(self) -> None:
        super().__post_init__()
        self.luck = random.Random(self.seed + 1)
        self.truth.step_time = self._seconds

    @property
    def running(self) -> list[str]:
        tasks = [task for task in self.plan.tasks if task.name == TASK]
        return [one.draft for task in tasks for one in task.merge]

    def passes(self, depth: int) -> int:
        heads = (self.merged[name].method for name in self.running if self.merged[name].method != "ngram")
        return draft_passes(self.truth.method, depth) + sum(draft_passes(method, depth) for method in heads)

    def report(self) -> Report:
        cells = sorted(self.credit.items())
        credit = tuple(main_cell(draft, TASK, depth, ranks) for (draft, depth), ranks in cells)
        named = tuple(
            DraftState(name=name, method=one.method, hash=f"hash-{name}") for name, one in self.merged.items()
        )
        return super().report().model_copy(update={"credit": credit, "named_drafts": named})

    def _seconds(self, sequences: float, depth: int, context: float) -> float:
        return 0.020 + self.pass_seconds * self.passes(depth) + 0.0004 * sequences * (depth + 1)

    def _sequence(self, depth: int) -> int:
        accepted = 0
        for level in range(1, depth + 1):
            is_own = self.luck.random() < self.own
            right = {name: self._is_right(self.merged[name], is_own) for name in self.running}
            hit = is_own or any(right.values())
            self.ranks.setdefault(level, [0] * (MAX_RANKS + 1))[0 if hit else MAX_RANKS] += 1
            if right:
                for draft, is_right in ((OWN, is_own), *((f"hash-{name}", one) for name, one in right.items())):
                    counts = self.credit.setdefault((draft, level), [0] * (MAX_RANKS + 1))
                    counts[0 if is_right else MAX_RANKS] += 1
            if not hit:
                break
            accepted += 1
        if depth:
            for index, value in enumerate((1, accepted, 1, accepted**2, accepted, 1)):
                self.request[index] += value
        return accepted

    def _is_right(self, draft: MergedTruth, is_own: bool) -> bool:
        return self.luck.random() < (draft.agreement if is_own else draft.rescue)


def merging_loop(merged: dict[str, MergedTruth], *, pass_seconds: float = 0.004, **speculation: Any) -> Loop:
    """Return a loop over one worker of four sequences, whose task declares all drafts of ``merged``.

    The worker has timed steps of its own draft alone, as workers do before they serve.
    """
    drafts = [{**(LOOKUP if one.method == "ngram" else HEAD), "name": name} for name, one in merged.items()]
    task = {"name": TASK, "merge": [{"draft": name} for name in merged]}
    fields: dict[str, Any] = {"drafts": drafts, "tasks": [task], "limits": QUICK, **speculation}
    worker = MergingWorker(
        Truth(sequences=4),
        plan=Plan(initial=TreeShape.chain(3), buckets=buckets_for(16)),
        task=TASK,
        merged=merged,
        pass_seconds=pass_seconds,
    )
    for depth in (0, 1, 5) * 20:
        worker._step(depth)
    return Loop(deployment_with(speculation=fields), worker)


def any_credit(task: str, drafts: Sequence[str], *, ranks: int, size: int) -> st.SearchStrategy[list[CreditCell]]:
    """Return lists of at most ``size`` cells of credit of ``task``, with at most so many ``ranks`` and any amounts."""
    amounts = st.floats(0, 1e6)
    cell = st.builds(
        CreditCell,
        task=st.just(task),
        draft=st.sampled_from(drafts),
        depth=st.integers(1, 6),
        hits=amounts,
        total=amounts,
        at=amounts,
        parent=st.sampled_from(["main", "sibling"]),
        ranks=st.lists(amounts, max_size=ranks).map(tuple),
    )
    return st.lists(cell, max_size=size)
