"""Which shape runs at which load: pushed to live workers, mounted for new ones."""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator

from specdecode_worker.contract.shape import TreeShape
from specdecode_worker.contract.wire import CONTRACT_VERSION, MAX_RANKS, MAX_TASKS, OTHER_TASK, Received, TaskName


class Buckets(Received):
    """Upper edges, inclusive, of the load buckets; the last bucket has no upper edge.

    Concurrency is running sequences; context is tokens in the KV cache of one sequence. A worker enters the next
    bucket when it exceeds an edge by ``hysteresis`` and leaves it below the edge, so that load at an edge does not
    make the shape flap.
    """

    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16)
    context: tuple[int, ...] = (1024, 8192)
    hysteresis: float = Field(default=0.15, ge=0, lt=1)

    @field_validator("concurrency", "context")
    @classmethod
    def _rising(cls, edges: tuple[int, ...]) -> tuple[int, ...]:
        if list(edges) != sorted(set(edges)) or any(edge < 1 for edge in edges):
            raise ValueError(f"bucket edges must rise from at least 1, got {list(edges)}")
        return edges


class PlanRow(Received):
    """What one load of one task runs. All requests of a batch read the rows of its longest context, for that is what
    their step costs by."""

    concurrency: int = Field(ge=0)
    context: int = Field(ge=0)
    task: TaskName = OTHER_TASK
    shape: TreeShape


class TaskMatch(Received):
    """A task label and the substring of the prompt that gives it, if any; the header always wins."""

    name: TaskName
    match: str | None = None
    draft: TaskName | None = None
    """Name of the draft that this task uses; None is the first. An unknown one is the first too."""


class Plan(Received):
    """Which shape runs at which load. The version only rises within one (uid, draft).

    ``initial`` runs where no row matches, and everywhere when the draft loaded is not the one planned for.
    ``max_depth`` bounds shadow drafting and exploration, ``explore`` is the share of device seconds they may take.
    """

    contract_version: int = CONTRACT_VERSION
    uid: str = ""
    draft: str = ""
    """Hash of the draft that the rows were planned for."""
    version: int = Field(default=0, ge=0)
    buckets: Buckets = Buckets()
    rows: tuple[PlanRow, ...] = Field(default=(), max_length=512)
    initial: TreeShape = TreeShape(())
    max_depth: int = Field(default=0, ge=0, le=16)
    top_k: int = Field(default=1, ge=1, le=MAX_RANKS)
    explore: float = Field(default=0.01, ge=0, le=0.5)
    guard: bool = True
    quiet: bool = False
    """This worker alone shall not speculate: it has no rows and no initial shape, at the version that others run."""
    tasks: tuple[TaskMatch, ...] = Field(default=(), max_length=MAX_TASKS)

    @model_validator(mode="after")
    def _rows_lie_in_buckets(self) -> Self:
        for row in self.rows:
            if row.concurrency > len(self.buckets.concurrency):
                raise ValueError(f"row {row} names a concurrency bucket that does not exist")
            if row.context > len(self.buckets.context):
                raise ValueError(f"row {row} names a context bucket that does not exist")
        return self

    def row(self, concurrency: int, context: int, task: str = OTHER_TASK) -> PlanRow | None:
        """The row of these bucket indices: of the task, else of ``other``, else None."""
        found = {row.task: row for row in self.rows if row.concurrency == concurrency and row.context == context}
        return found.get(task) or found.get(OTHER_TASK)
