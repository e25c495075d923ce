"""Drafts that propose in a step: the drafts of each request, their passes, their proposals and their credit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specdecode_worker.contract import DraftState
from specdecode_worker.engine.batch import Row
from specdecode_worker.engine.drafts.drafter import Drafter, PagedDrafter, draft_trees
from specdecode_worker.engine.drafts.merged.own_ranks import OwnRanks, Proposer
from specdecode_worker.engine.drafts.merged.proposals import Part, propose_together
from specdecode_worker.engine.drafts.merged.task_drafts import TaskDrafts
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.speculation.merge_order import Candidate, Credit, MergeOrder
from specdecode_worker.speculation.sampling.sampler import Sampler
from specdecode_worker.speculation.trees import PLAIN, Forest, Tree, forest_of


class Loaded(Protocol):
    """Loaded draft, implemented by ``LoadedDraft``."""

    @property
    def drafter(self) -> Drafter:
        """Drafter."""
        ...

    @property
    def state(self) -> DraftState:
        """State of the draft, with its hash."""
        ...


@dataclass(frozen=True, slots=True)
class Proposed:
    """Proposals of the drafts of a step.

    ``ranked_BNK`` holds the best target ids behind every expanded node, [B, N, K], best first, -1 elsewhere; None if no
    tree has a node. ``own`` is None if no task of the step merges drafts.
    """

    ranked_BNK: Tensor | None = None
    own: OwnRanks | None = None


class StepProposals:
    """Proposals of the loaded drafts, for each request by its own draft and those that are merged with it."""

    def __init__(self, drafts: Mapping[str, Loaded], tasks: TaskDrafts, state: DeviceState) -> None:
        """Read the drafts, by name, and those of each task at every step; both may change between steps."""
        self.order = MergeOrder()
        self._drafts, self._tasks, self._state = drafts, tasks, state

    def ready(self, request: Request) -> bool:
        """Return whether a draft can propose for the request in the next step, and record which drafts do."""
        own = self._tasks.name(request.submit.task)
        ready = self._drafts[own].drafter.ready(request)
        others = (one.draft for one in self._tasks.merged(request.submit.task))
        merged = [name for name in others if self._drafts[name].drafter.ready(request)]
        request.proposers = (own, *merged) if ready else tuple(merged)
        return bool(request.proposers)

    def passes(self, rows: Sequence[Row], depths: Sequence[int]) -> int:
        """Return the number of draft passes of a step in which the trees of ``rows`` are drafted to ``depths``.

        A parallel draft needs one pass for any depth. The passes of merged drafts add up.
        """
        if not self._tasks.merges and not any(map(self._is_parallel, self._drafts)):
            return max(depths)
        return max(self._row_passes(row, depth) for row, depth in zip(rows, depths, strict=True))

    def extension(self, request: Request) -> int:
        """Return the depth to which drafts without passes extend the request's tree in the next step; 0 for none."""
        if not self._tasks.merges:
            return 0
        merged = self._tasks.merged(request.submit.task)
        return max((one.depth for one in merged if one.draft in request.proposers), default=0)

    def is_merged(self, request: Request) -> bool:
        """Return whether other drafts than the request's own propose for it in the next step."""
        task = request.submit.task
        return bool(self._tasks.merged(task)) and request.proposers != (self._tasks.name(task),)

    def record_credit(self, request: Request, credits: Iterable[Credit]) -> None:
        """Take over the credit of each draft for the last tokens of a request, for the order of later candidates."""
        for credit in credits:
            self.order.record(request.submit.task, credit, sampled=not request.sampling_params.greedy)

    def propose(self, rows: Sequence[Row], forest: Forest, sampler: Sampler) -> Proposed:
        """Draft the trees of all rows, each row by its own draft and those that are merged with it."""
        names = [self._proposers(row.request, tree) for row, tree in zip(rows, forest.trees, strict=True)]
        used = sorted({name for row in names for name in row if name in self._drafts})
        if not used:
            return Proposed()
        if len(used) == 1 and len(set(names)) == 1:
            expand = self._drafts[used[0]].drafter.begin(rows, forest, sampler)
            return Proposed(draft_trees(rows, forest, self._state, expand), self._own_ranks(rows, names, used))
        parts = [Part(name, self._drafts[name].drafter, self._own_forest(name, names, forest)) for name in used]
        orders = self._orders(rows, names, used)
        ranked_BNK, own_FBNK = propose_together(rows, forest, parts, orders, self._state, sampler)
        return Proposed(ranked_BNK, self._own_ranks(rows, names, used, own_FBNK))

    def _proposers(self, request: Request, tree: Tree) -> tuple[str, ...]:
        """Return the drafts that propose for a tree; without a tree those that must know of the request's tokens."""
        own, merged = self._tasks.name(request.submit.task), self._tasks.merged(request.submit.task)
        return request.proposers if merged and tree.drafted_depth else (own, *(one.draft for one in merged))

    def _row_passes(self, row: Row, depth: int) -> int:
        """Return the number of draft passes for the first ``depth`` levels of a row's tree."""
        planned = min(depth, row.tree.planned_part.drafted_depth)
        names = self._proposers(row.request, row.tree)
        if len(names) == 1 and row.tree.planned is None:
            return min(planned, 1) if self._is_parallel(names[0]) else planned
        heads = [name for name in names if self._drafts[name].drafter.needs_passes]
        return sum(min(planned, 1) if self._is_parallel(name) else planned for name in heads)

    def _is_parallel(self, name: str) -> bool:
        loaded = self._drafts.get(name)
        return loaded is not None and isinstance(loaded.drafter, PagedDrafter) and loaded.drafter.parallel

    def _own_forest(self, name: str, names: Sequence[tuple[str, ...]], forest: Forest) -> Forest:
        """Return the trees that one draft proposes for: of the rows that it drafts, without what needs no pass."""
        passes = self._drafts[name].drafter.needs_passes
        own = (tree.planned_part if passes else tree for tree in forest.trees)
        mine = tuple(tree if name in row else PLAIN for tree, row in zip(own, names, strict=True))
        return forest_of(mine, forest.parents_BN.device)

    def _orders(
        self, rows: Sequence[Row], names: Sequence[tuple[str, ...]], used: Sequence[str]
    ) -> list[list[Candidate]]:
        """Return the order of the candidates of each row, for drafts by their position in ``used``."""
        orders: dict[tuple[str, bool, tuple[str, ...]], list[Candidate]] = {}
        keys = [
            (row.request.submit.task, not row.request.sampling_params.greedy, tuple(n for n in drafts if n in used))
            for row, drafts in zip(rows, names, strict=True)
        ]
        for task, sampled, drafts in set(keys):
            ordered = self.order.order(task, drafts, sampled=sampled)
            orders[task, sampled, drafts] = [Candidate(used.index(drafts[draft]), rank) for draft, rank in ordered]
        return [orders[key] for key in keys]

    def _own_ranks(
        self,
        rows: Sequence[Row],
        names: Sequence[tuple[str, ...]],
        used: Sequence[str],
        own_FBNK: Tensor | None = None,
    ) -> OwnRanks | None:
        """Return the ranks of each draft for the rows of tasks that merge drafts; None if there are none."""
        if not self._tasks.merges:
            return None
        proposers = {
            b: tuple(Proposer(name, self._drafts[name].state.hash, used.index(name)) for name in names[b])
            for b, row in enumerate(rows)
            if self._tasks.merged(row.request.submit.task)
        }
        return OwnRanks(proposers, own_FBNK) if proposers else None
