"""Estimates for 8 tasks, 64 sequences and 2 contexts: the most that a deployment is expected to store."""

from __future__ import annotations

import random
from typing import Any, TypeVar

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
    Stored,
    TemplateState,
    TrafficCell,
)
from specdecode_operator.telemetry.counters import PAIRS
from specdecode_worker.contract import MAX_RANKS

TASKS = tuple(f"task-{index}-{'x' * 24}" for index in range(8))
SEQUENCES, CONTEXTS, DEPTH = 64, 2, 8
MOMENTS = 4 + 2 * 6 + len(PAIRS)


Cell = TypeVar("Cell", bound=Stored)


class Crowd:
    """Random estimates for 8 tasks, 64 sequences and 2 contexts: every cell that a deployment can have."""

    def __init__(self) -> None:
        self.random = random.Random(1)

    def numbers(self, count: int) -> Any:
        return tuple(float(f"{self.random.random() * 1e6:.6g}") for _ in range(count))

    def cell(self, kind: type[Cell], **given: Any) -> Cell:
        """Return a record with the given fields, and random numbers in the others that are numbers."""
        others = [name for name, field in kind.model_fields.items() if field.annotation is float and name not in given]
        return kind(**dict(zip(others, self.numbers(len(others)), strict=True)), **given)

    def costs(self, least_passes: int, **given: Any) -> tuple[StepTimeCell, ...]:
        return tuple(
            self.cell(
                StepTimeCell,
                tokens_bucket=1 << bucket,
                draft_passes=passes,
                prefill=False,
                context_bucket=context,
                values=self.numbers(MOMENTS),
                **given,
            )
            for bucket in range((SEQUENCES * (DEPTH + 1)).bit_length() + 1)
            for passes in range(least_passes, DEPTH + 1)
            for context in range(CONTEXTS)
            if passes < 1 << bucket <= 2 * SEQUENCES * (DEPTH + 1)
        )

    def acceptance(self, **given: Any) -> tuple[AcceptanceCell, ...]:
        return tuple(
            self.cell(AcceptanceCell, task=task, depth=depth, parent=parent, ranks=self.numbers(MAX_RANKS - 1), **given)
            for task in TASKS
            for depth in range(1, DEPTH + 1)
            for parent in ("main", "sibling")
        )

    def rows(self, *, moves: int) -> tuple[RowState, ...]:
        return tuple(
            self.cell(
                RowState,
                concurrency=concurrency,
                context=context,
                task=task,
                depth=self.random.randint(0, DEPTH),
                parents=(0, 0, 1, 1, 2, 3) if self.random.random() < 0.5 else (),
                moves=self.numbers(moves),
            )
            for concurrency in range(SEQUENCES.bit_length())
            for context in range(CONTEXTS)
            for task in TASKS
        )

    def requests(self) -> tuple[RequestCell, ...]:
        return tuple(RequestCell(task=task, sums=self.numbers(6)) for task in TASKS)

    def parked(self, draft: str) -> DraftEstimates:
        """Return the estimates of another draft, in which nothing is new."""
        return DraftEstimates(
            draft=draft,
            acceptance=self.acceptance(new_hits=0, new_total=0, changed_at=0),
            requests=self.requests(),
            costs=self.costs(1, changed_at=0),
            rows=self.rows(moves=0),
        )

    def pod(self) -> PodState:
        uid, boot = (f"{self.random.getrandbits(128):032x}" for _ in range(2))
        tasks = tuple(self.cell(PodTaskState, task=task) for task in TASKS)
        return self.cell(PodState, uid=uid, boot=boot, draft="0" * 16, tasks=tasks)

    def learned(self) -> LearnedState:
        return LearnedState(
            uid="u",
            draft="0" * 16,
            rows=self.rows(moves=3),
            acceptance=self.acceptance(),
            requests=self.requests(),
            traffic=tuple(TrafficCell(task=task, sums=self.numbers(5)) for task in TASKS),
            costs=self.costs(0, new_values=self.numbers(MOMENTS)),
            prefill=self.numbers(MOMENTS),
            load=self.cell(LoadState),
            pods=tuple(self.pod() for _ in range(8)),
            parked=tuple(self.parked(f"{index + 1}" * 16) for index in range(MAX_PARKED_DRAFTS)),
            template=TemplateState(spec_hash="h", template={"containers": [{"name": "worker"}]}, image="i"),
        )
