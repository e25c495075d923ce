"""The plan: draft shape per load bucket and task. It is pushed to running workers and mounted for new ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Self

from pydantic import Field, field_validator, model_validator

from specdecode_worker.contract.assignment import DraftAssignment
from specdecode_worker.contract.capture import CaptureRules
from specdecode_worker.contract.shape import TreeShape
from specdecode_worker.contract.wire import (
    CONTRACT_VERSION,
    MAX_CLIENTS,
    MAX_DEPTH,
    MAX_MERGED,
    MAX_PREFILL_WORKERS,
    MAX_RANKS,
    MAX_TASKS,
    OTHER_TASK,
    Received,
    TaskName,
)


class Buckets(Received):
    """Load buckets: inclusive upper edges. The last bucket has no upper edge.

    Concurrency is the number of running sequences; context is the number of tokens in the KV cache of one sequence. A
    worker enters the next bucket when the load exceeds an edge by the fraction ``hysteresis``, and leaves it below the
    edge, so that a load close to an edge does not make the shape oscillate.
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
    """Draft shape for one load bucket of one task.

    All requests of a batch use the rows of the longest context in it, because that context determines the step's cost.
    """

    concurrency: int = Field(ge=0)
    context: int = Field(ge=0)
    task: TaskName = OTHER_TASK
    shape: TreeShape


class MergedDraft(Received):
    """Draft that proposes into the trees of a task together with the draft of that task."""

    draft: TaskName
    """Name of the draft. An unknown name, or that of the task's own draft, merges nothing."""
    depth: int = Field(default=0, ge=0, le=MAX_DEPTH)
    """Depth to which a draft of a method in ``DRAFT_FREE`` extends the main path of the planned shape."""


class TaskMatch(Received):
    """Task label, and the requests that belong to it without naming it, if any.

    These have ``match`` in their prompt and come from one of ``clients``, as far as either is given. A label in the
    request header takes precedence.
    """

    name: TaskName
    match: str | None = None
    clients: tuple[str, ...] = Field(default=(), max_length=MAX_CLIENTS)
    """Names of API keys, which are tenants at routers."""
    draft: TaskName | None = None
    """Name of the draft that this task uses. None and unknown names select the first draft."""
    merge: tuple[MergedDraft, ...] = Field(default=(), max_length=MAX_MERGED)
    """Further drafts whose proposals are merged into the same trees."""


def belongs(match: str | None, clients: Collection[str], prompts: Iterable[str], client: str) -> bool:
    """Return whether a request without a label belongs to a task with these rules. ``prompts`` are its texts."""
    if not (match or clients) or (clients and client not in clients):
        return False
    return not match or any(match in text for text in prompts)


class Plan(Received):
    """Draft shape per load bucket and task. The version never decreases within one (uid, draft).

    ``initial`` is the shape where no row matches, and everywhere if the loaded draft is not the one planned for.
    ``max_depth`` bounds shadow drafting and exploration; ``explore`` is the share of device seconds that they may use.
    """

    contract_version: int = CONTRACT_VERSION
    uid: str = ""
    draft: str = ""
    """Hash of the draft that the rows were planned for."""
    version: int = Field(default=0, ge=0)
    buckets: Buckets = Buckets()
    rows: tuple[PlanRow, ...] = Field(default=(), max_length=512)
    initial: TreeShape = TreeShape(())
    max_depth: int = Field(default=0, ge=0, le=MAX_DEPTH)
    top_k: int = Field(default=1, ge=1, le=MAX_RANKS)
    explore: float = Field(default=0.01, ge=0, le=0.5)
    guard: bool = True
    quiet: bool = False
    """True if this worker must not speculate.

    It then gets no rows and no initial shape, at the same version as the other workers.
    """
    tasks: tuple[TaskMatch, ...] = Field(default=(), max_length=MAX_TASKS)
    prefill: tuple[str, ...] = Field(default=(), max_length=MAX_PREFILL_WORKERS)
    """Addresses (host and block port) of the prefill workers that may be asked for the blocks of long prompts."""
    assignment: DraftAssignment | None = None
    """Drafts of the workers. None: each worker runs the draft of its config."""
    capture: CaptureRules | None = None
    """Capture of requests. None: nothing is captured, and what was captured under an earlier plan is deleted."""

    @model_validator(mode="after")
    def _rows_lie_in_buckets(self) -> Self:
        for row in self.rows:
            if row.concurrency > len(self.buckets.concurrency):
                raise ValueError(f"row {row} names a concurrency bucket that does not exist")
            if row.context > len(self.buckets.context):
                raise ValueError(f"row {row} names a context bucket that does not exist")
        return self

    @cached_property
    def deepest(self) -> int:
        """Depth of the deepest draft that is planned for any load and task."""
        shapes = {self.initial, *(row.shape for row in self.rows)}
        merged = (draft.depth for task in self.tasks for draft in task.merge)
        return max(*(shape.depth for shape in shapes), *merged, 0)

    @property
    def timed_shapes(self) -> tuple[TreeShape, ...]:
        """Shapes that workers time before they serve, deepest first, where the plan allows other shapes than its own.

        The step times of other shapes follow from these: the deepest chain, one of a single token, and a wide tree.
        """
        if not (self.max_depth and self.explore):
            return ()
        wide = [TreeShape.levels(self.top_k, 1)] if self.top_k > 1 and self.max_depth > 1 else []
        chains = (TreeShape.chain(depth) for depth in {self.max_depth, 1})
        return tuple(sorted((*chains, *wide), key=lambda shape: (-shape.depth, shape.nodes)))

    def shape(self, concurrency: int, context: int, task: str = OTHER_TASK) -> TreeShape:
        """Return the shape at these bucket indices: the row of the task, else that of ``other``, else ``initial``.

        The draft must be the one that the rows were planned for.
        """
        shapes = {row.task: row.shape for row in self.rows if (row.concurrency, row.context) == (concurrency, context)}
        return shapes.get(task, shapes.get(OTHER_TASK, self.initial))
