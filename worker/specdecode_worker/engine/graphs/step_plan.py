"""Decision whether a graph can run a step, and which one.

`StepPlanner.plan` is the only place that sends a step to the eager path, apart from graphs that are not captured
(`EagerReason.NEW` and `LIMIT`, which `StepGraphs` adds). docs/gpu.md explains every reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from specdecode_worker.engine.drafts.draft_registry import DraftRegistry
from specdecode_worker.engine.drafts.drafter import PagedDrafter
from specdecode_worker.engine.graphs.graph_key import GraphKey, at_least, key_of
from specdecode_worker.engine.graphs.row_tables import CatchUp
from specdecode_worker.engine.scheduler import Row
from specdecode_worker.speculation.trees import Tree


class EagerReason(StrEnum):
    """Reason why no graph runs a step."""

    PREFILL = "prefill"
    """A row is a chunk of a prompt."""
    PROCESSORS = "processors"
    """A request has penalties, a bias, ``min_tokens`` or a grammar."""
    LOGPROBS = "logprobs"
    """A request wants log-probabilities."""
    DRAFT = "draft"
    """Several drafts run, or one whose passes are not captured."""
    CATCH_UP = "catch-up"
    """No row drafts, but a draft must process tokens before it loses the states that it needs."""
    SIZE = "size"
    """More rows than the largest bucket, or more packed tokens than a graph may have."""
    NEW = "new"
    """The graph is not captured yet."""
    LIMIT = "limit"
    """The graph is not captured, and no further one may be."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Graph that can run a step. ``drafter`` is None if no draft runs."""

    key: GraphKey
    catch_up: CatchUp
    drafter: PagedDrafter | None


class StepPlanner:
    """Planner of steps. ``rows`` are the row buckets of graphs; ``max_tokens`` bounds their packed tokens."""

    def __init__(self, drafts: DraftRegistry, rows: Sequence[int], max_tokens: int) -> None:
        self._drafts, self._rows, self._max_tokens = drafts, tuple(rows), max_tokens

    def plan(self, rows: Sequence[Row]) -> StepPlan | EagerReason:
        """Return the graph that can run ``rows``, or the reason why none can. Changes nothing."""
        if reason := _refused(rows):
            return reason
        bucket, trees = at_least(len(rows), self._rows), [row.tree for row in rows]
        if bucket is None:
            return EagerReason.SIZE
        running = self._running_draft(rows, trees)
        if running is None:
            return EagerReason.DRAFT
        name, drafter, behind = running
        drafts = any(tree.drafted_depth for tree in trees)
        if drafter is not None and drafter.parallel and drafts:
            return EagerReason.DRAFT
        if behind and not drafts:
            return EagerReason.CATCH_UP
        counts = [0] * len(rows)
        if drafter is not None:
            for b, count in zip(behind, drafter.catch_up_counts([rows[b].request for b in behind]), strict=True):
                counts[b] = count
        cuts = any(row.request.sampling_params.truncated and not row.request.sampling_params.greedy for row in rows)
        key = key_of(bucket, trees, max(counts), cuts=cuts, draft=name)
        if key is None or key.tokens > self._max_tokens:
            return EagerReason.SIZE
        return StepPlan(key, CatchUp(tuple(counts)), drafter)

    def _running_draft(
        self, rows: Sequence[Row], trees: Sequence[Tree]
    ) -> tuple[str, PagedDrafter | None, list[int]] | None:
        """Return the name and drafter of the only draft that runs in a step, and the indices of the rows it runs for.

        Return no drafter if none runs, and None if no graph can run the drafts: several run, or one without a cache.
        """
        drafters, names = self._drafts.paged(), [self._drafts.name_of(row.request) for row in rows]
        if any(tree.drafted_depth and name not in drafters for tree, name in zip(trees, names, strict=True)):
            return None
        running: tuple[str, PagedDrafter | None, list[int]] = ("", None, [])
        for name, drafter in drafters.items():
            mine = [b for b, owner in enumerate(names) if owner == name]
            behind = drafter.drafting([rows[b] for b in mine], [trees[b] for b in mine])
            if behind and running[1] is not None:
                return None
            if behind:
                running = name, drafter, [mine[index] for index in behind]
        return running


def _refused(rows: Sequence[Row]) -> EagerReason | None:
    """Return the reason why no graph can run rows of this kind, or None if one can."""
    if any(row.is_chunk for row in rows):
        return EagerReason.PREFILL
    if any(row.request.sampling_params.adjusts for row in rows):
        return EagerReason.PROCESSORS
    if any(row.request.submit.sampling.logprobs is not None for row in rows):
        return EagerReason.LOGPROBS
    return None
