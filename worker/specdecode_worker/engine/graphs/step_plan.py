"""Decision whether a graph can run a step, which one, and which part of the step runs outside of it.

`StepPlanner.plan` is the only place that sends a step to the eager path, apart from the reasons that depend on the
captured graph (`EagerReason.NEW`, `LIMIT`, `FAILED` and `MIXED`, which `StepGraphs` adds). docs/gpu.md explains every
reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from specdecode_worker.engine.batch import Row, decoding_rows
from specdecode_worker.engine.drafts.draft_registry import DraftRegistry
from specdecode_worker.engine.drafts.drafter import PagedDrafter
from specdecode_worker.engine.graphs.feature_tables import WIDTHS, width_of
from specdecode_worker.engine.graphs.graph_key import (
    NO_FEATURES,
    SIBLINGS,
    Features,
    GraphKey,
    at_least,
    key_of,
    key_outside,
)
from specdecode_worker.engine.graphs.row_tables import CatchUp
from specdecode_worker.engine.step.logprobs import LEAST_TOP
from specdecode_worker.speculation.sampling.params import SamplingParams
from specdecode_worker.speculation.trees import Tree

HISTORIES = (1024, 4096, 16384, 65536)
"""Numbers of text positions that graphs with penalties count tokens in; the longest text is another one."""


class EagerReason(StrEnum):
    """Reason why no graph runs a step."""

    PREFILL = "prefill"
    """All rows are chunks of prompts."""
    MIXED = "mixed"
    """Decoding rows run beside chunks of prompts, and one eager pass of all rows is faster."""
    SAMPLER = "sampler"
    """A row is sampled in several rounds, and its draft runs before the graph and keeps its probabilities there."""
    BIAS = "bias"
    """A request has more biased or blocked tokens than the tables have columns."""
    LOGPROBS = "logprobs"
    """A request wants more log-probabilities than the tables have columns."""
    SIZE = "size"
    """More rows than the largest bucket, or more packed tokens than a graph may have."""
    NEW = "new"
    """The graph is not captured yet."""
    LIMIT = "limit"
    """The graph is not captured, and no further one may be."""
    FAILED = "failed"
    """The graph could not be captured; on several devices, no graph is used after one that a rank could not capture."""


class OutsideReason(StrEnum):
    """Reason why the draft passes of a step run before its graph, which then only verifies."""

    GRAMMAR = "grammar"
    """All rows that draft follow a grammar, or the passes cannot have a graph of their own beside those that do. The
    host reads the drafted tokens, since the masks follow from them."""
    METHOD = "method"
    """The passes of the draft's method are not captured."""
    SEVERAL = "several"
    """Several drafts run."""
    CATCH_UP = "catch-up"
    """No row drafts, but a draft must process tokens before it loses the states that it needs."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Graph that can run a step.

    ``drafter`` runs in the graph and catches up with ``catch_up``; it is None if no draft does. ``drafts`` is a graph
    of the draft passes alone, which runs before this one. ``outside`` is the reason why drafts run before the graph
    without one of their own, None if they do not.
    """

    key: GraphKey
    catch_up: CatchUp = field(default_factory=CatchUp)
    drafter: PagedDrafter | None = None
    outside: OutsideReason | None = None
    drafts: StepPlan | None = None

    def without_drafts(self) -> StepPlan:
        """Return the plan of the same step whose drafts run without a graph."""
        return StepPlan(self.key, outside=OutsideReason.GRAMMAR)


@dataclass(frozen=True, slots=True)
class _Running:
    """Draft that runs in a step, and the indices of the rows that it runs for."""

    name: str
    drafter: PagedDrafter
    rows: list[int]


class StepPlanner:
    """Planner of steps.

    Args of the constructor: loaded drafts, row buckets of graphs, most packed tokens of a graph, longest text with its
    tree, and whether the sampler is ``coupled``.
    """

    def __init__(
        self, drafts: DraftRegistry, rows: Sequence[int], max_tokens: int, longest_text: int, *, coupled: bool
    ) -> None:
        self._drafts, self._rows, self._max_tokens, self._coupled = drafts, tuple(rows), max_tokens, coupled
        self._histories = (*(size for size in HISTORIES if size < longest_text), longest_text)

    def plan(self, rows: Sequence[Row]) -> StepPlan | EagerReason:
        """Return the graph that can run the decoding rows, or the reason why none can. Changes nothing."""
        if not (decoding := decoding_rows(rows)):
            return EagerReason.PREFILL
        rows = rows[:decoding]
        batch = [row.request.sampling_params for row in rows]
        bucket = at_least(len(rows), self._rows)
        if bucket is None:
            return EagerReason.SIZE
        features = self._features(rows, batch)
        if isinstance(features, EagerReason):
            return features
        cuts = any(params.truncated and not params.greedy for params in batch)
        plan = self._plan(rows, bucket, features, cuts=cuts)
        if plan is None or plan.key.tokens > self._max_tokens:
            return EagerReason.SIZE
        if features.rounds and plan.outside is not None and any(row.tree.drafted_depth for row in rows):
            return EagerReason.SAMPLER
        return plan

    def _features(self, rows: Sequence[Row], batch: Sequence[SamplingParams]) -> Features | EagerReason:
        """Return the optional parts of the step, or the reason why a graph cannot have them."""
        tops = [top for row in rows if (top := row.request.submit.sampling.logprobs) is not None]
        if max(tops, default=0) > LEAST_TOP:
            return EagerReason.LOGPROBS
        rounds = self._rounds(rows, batch)
        if not any(params.adjusts for params in batch):
            return Features(logprobs=bool(tops), rounds=rounds) if tops or rounds else NO_FEATURES
        width = at_least(max(map(width_of, batch)), WIDTHS)
        if width is None:
            return EagerReason.BIAS
        counts = any(params.counts for params in batch)
        adjusts = counts or any(params.blocks or params.logit_bias for params in batch)
        longest = 1 + max(row.request.cached_bound for row in rows)
        history = (at_least(longest, self._histories) or 0) if counts else 0
        masks = any(params.guided for params in batch)
        return Features(width if adjusts else 0, history, masks, bool(tops), rounds)

    def _rounds(self, rows: Sequence[Row], batch: Sequence[SamplingParams]) -> int:
        """Return the greatest number of siblings if a row is sampled in several rounds, else 0."""
        if self._coupled or all(params.greedy for params in batch):
            return 0
        siblings = at_least(1 + max(max(row.tree.ranks) for row in rows), SIBLINGS)
        assert siblings is not None, "a node has no more children than ranks"
        return siblings

    def _plan(self, rows: Sequence[Row], bucket: int, features: Features, *, cuts: bool) -> StepPlan | None:
        """Return the graph in a bucket of rows, None if a draft must catch up with more tokens than any graph has."""
        trees = list({id(row.tree): row.tree for row in rows}.values())  # the rows of a task share a tree
        running = self._running(rows)
        if (reason := self._outside(rows, running)) is not None:
            return StepPlan(key_outside(bucket, trees, cuts=cuts, features=features), outside=reason)
        if not features.masks:
            return self._whole(rows, trees, running, bucket, features, cuts=cuts)
        plan = StepPlan(key_outside(bucket, trees, cuts=cuts, features=features))
        if not running:
            return plan
        drafts = None
        if not features.rounds and _drafts_unguided(rows):
            own = replace(features, logprobs=False)
            drafts = self._whole(rows, trees, running, bucket, own, cuts=cuts)
        if drafts is None or drafts.key.tokens > self._max_tokens:
            return plan.without_drafts()
        return replace(plan, drafts=replace(drafts, key=replace(drafts.key, only_drafts=True)))

    def _whole(
        self,
        rows: Sequence[Row],
        trees: Sequence[Tree],
        running: Sequence[_Running],
        bucket: int,
        features: Features,
        *,
        cuts: bool,
    ) -> StepPlan | None:
        """Return the graph with the passes of the draft that runs, if one does; None if it must catch up too far."""
        counts = [0] * len(rows)
        if not running:
            key = key_of(bucket, trees, 0, cuts=cuts, features=features)
            return None if key is None else StepPlan(key, CatchUp(tuple(counts)))
        (draft,) = running
        behind = draft.drafter.catch_up_counts([rows[b].request for b in draft.rows])
        for b, count in zip(draft.rows, behind, strict=True):
            counts[b] = count
        key = key_of(bucket, trees, max(counts), cuts=cuts, draft=draft.name, features=features)
        return None if key is None else StepPlan(key, CatchUp(tuple(counts)), draft.drafter)

    def _outside(self, rows: Sequence[Row], running: Sequence[_Running]) -> OutsideReason | None:
        """Return the reason why drafts run before the graph without one, None if they run in one or not at all."""
        drafted = [row for row in rows if row.tree.drafted_depth]
        paged, tasks = self._drafts.paged(), {row.request.submit.task for row in drafted}
        if any(self._drafts.name_of(task) not in paged for task in tasks):
            return OutsideReason.METHOD
        is_merged = self._drafts.merges and any(self._drafts.is_merged(row.request) for row in drafted)
        if len(running) > 1 or is_merged:
            return OutsideReason.SEVERAL
        if not drafted:
            return OutsideReason.CATCH_UP if running else None
        (draft,) = running
        return None if draft.drafter.captured else OutsideReason.METHOD

    def _running(self, rows: Sequence[Row]) -> list[_Running]:
        """Return the drafts with a cache that run in a step, to draft or to catch up."""
        running = []
        tasks = {row.request.submit.task for row in rows}
        for name, drafter in self._drafts.paged().items():
            served = {task for task in tasks if self._drafts.serves(name, task)}
            mine = [b for b, row in enumerate(rows) if row.request.submit.task in served]
            behind = drafter.drafting([rows[b] for b in mine], [rows[b].tree for b in mine])
            if behind:
                running.append(_Running(name, drafter, [mine[index] for index in behind]))
        return running


def _drafts_unguided(rows: Sequence[Row]) -> bool:
    """Return whether a row without a grammar drafts.

    If none does, drafts run before the graph, where they propose under the masks of all nodes and not of the roots
    alone. More of their tokens are accepted then.
    """
    return any(row.tree.drafted_depth and not row.request.sampling_params.guided for row in rows)
