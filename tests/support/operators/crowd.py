"""Estimates for 8 tasks, 64 sequences and 2 contexts: the most that a deployment is expected to store."""

from __future__ import annotations

import random
from typing import Any

from specdecode_operator.state.learned import (
    MAX_PARKED_DRAFTS,
    AcceptanceCell,
    DraftEstimates,
    LearnedState,
    LoadState,
    PodState,
    PodTaskState,
    RequestCell,
    RowState,
    StepTimeCell,
    TemplateState,
    TrafficCell,
)
from specdecode_operator.telemetry.counters import PAIRS
from specdecode_worker.contract import MAX_RANKS

NOW = 1_764_000_000.0
TASKS = tuple(f"task-{index}-{'x' * 24}" for index in range(8))
SEQUENCES, CONTEXTS, DEPTH = 64, 2, 8


class Crowd:
    """Random estimates for 8 tasks, 64 sequences and 2 contexts: every cell that a deployment can have."""

    def __init__(self, seed: int = 1) -> None:
        self.random = random.Random(seed)

    def number(self, most: float, digits: int = 6) -> float:
        return float(f"{self.random.random() * most:.{digits}g}")

    def time(self) -> float:
        return NOW + round(self.random.random() * 1e5, 3)

    def moments(self, sequences: int, passes: int) -> tuple[float, ...]:
        """Return sums over steps of different sizes, as a real worker reports them."""
        sums = [0.0] * (4 + 2 * 6 + len(PAIRS))
        for _ in range(8):
            weight, size = self.random.random() + 0.01, self.random.uniform(0.6, 1) * sequences
            seconds = self.random.uniform(0.01, 0.05)
            x = (1, size, size * (passes + 1), size * self.random.uniform(100, 1000), passes, 0)
            products = (x[row] * x[column] for row, column in PAIRS)
            step = (1, seconds, seconds**2, 2 * size, *x, *(value * seconds for value in x), *products)
            sums = [total + weight * value for total, value in zip(sums, step, strict=True)]
        return tuple(float(f"{total:.6g}") for total in sums)

    def costs(self, least_passes: int, *, are_new: bool) -> tuple[StepTimeCell, ...]:
        return tuple(
            StepTimeCell(
                tokens_bucket=1 << bucket,
                draft_passes=passes,
                prefill=False,
                context_bucket=context,
                values=self.moments(1 << min(bucket, 6), passes),
                new_values=self.moments(4, passes) if are_new else (),
                at=self.time(),
                polls=self.number(9),
                changed_at=self.time() if are_new else 0,
                made_up=self.number(24),
            )
            for bucket in range((SEQUENCES * (DEPTH + 1)).bit_length() + 1)
            for passes in range(least_passes, DEPTH + 1)
            for context in range(CONTEXTS)
            if passes < 1 << bucket <= 2 * SEQUENCES * (DEPTH + 1)
        )

    def acceptance(self, *, are_new: bool) -> tuple[AcceptanceCell, ...]:
        parents: Any = ("main", "sibling")
        return tuple(
            AcceptanceCell(
                task=task,
                depth=depth,
                parent=parent,
                hits=self.number(300),
                total=self.number(600),
                at=self.time(),
                new_hits=self.number(30) if are_new else 0,
                new_total=self.number(60) if are_new else 0,
                changed_at=self.time() if are_new else 0,
                ranks=tuple(self.number(100, 3) for _ in range(MAX_RANKS - 1)),
            )
            for task in TASKS
            for depth in range(1, DEPTH + 1)
            for parent in parents
        )

    def rows(self, *, are_new: bool) -> tuple[RowState, ...]:
        return tuple(
            RowState(
                concurrency=concurrency,
                context=context,
                task=task,
                depth=self.random.randint(0, DEPTH),
                parents=(0, 0, 1, 1, 2, 3) if self.random.random() < 0.5 else (),
                since=self.time(),
                moves=tuple(self.time() for _ in range(3)) if are_new else (),
            )
            for concurrency in range(SEQUENCES.bit_length())
            for context in range(CONTEXTS)
            for task in TASKS
        )

    def requests(self) -> tuple[RequestCell, ...]:
        numbers: Any = [tuple(self.number(1e4) for _ in range(6)) for _ in TASKS]
        return tuple(RequestCell(task=task, sums=sums) for task, sums in zip(TASKS, numbers, strict=True))

    def parked(self, draft: str) -> DraftEstimates:
        return DraftEstimates(
            draft=draft,
            acceptance=self.acceptance(are_new=False),
            requests=self.requests(),
            costs=self.costs(1, are_new=False),
            rows=self.rows(are_new=False),
        )

    def pods(self, count: int) -> tuple[PodState, ...]:
        return tuple(
            PodState(
                uid=f"{self.random.getrandbits(128):032x}",
                boot=f"{self.random.getrandbits(128):032x}",
                draft="0" * 16,
                tasks=tuple(
                    PodTaskState(
                        task=task,
                        hits=self.number(99),
                        total=self.number(99),
                        past_hits=self.number(99),
                        past_total=self.number(99),
                    )
                    for task in TASKS
                ),
                pace=self.number(1),
                at=self.time(),
            )
            for _ in range(count)
        )

    def learned(self, *, pods: int = 8) -> LearnedState:
        sums: Any = [tuple(self.number(1e6) for _ in range(5)) for _ in TASKS]
        return LearnedState(
            uid="u",
            draft="0" * 16,
            rows=self.rows(are_new=True),
            acceptance=self.acceptance(are_new=True),
            requests=self.requests(),
            traffic=tuple(TrafficCell(task=task, sums=row) for task, row in zip(TASKS, sums, strict=True)),
            costs=self.costs(0, are_new=True),
            prefill=self.moments(8, 0),
            load=LoadState(sequences=3.25, at=NOW),
            pods=self.pods(pods),
            parked=tuple(self.parked(f"{index + 1}" * 16) for index in range(MAX_PARKED_DRAFTS)),
            template=TemplateState(spec_hash="h", template={"containers": [{"name": "worker"}]}, image="i"),
        )
