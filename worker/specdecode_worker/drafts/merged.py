"""Merged drafts: several drafts that propose into the tree of one request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import MAX_RANKS, MergedDraft, TaskMatch
from specdecode_worker.core.batch import Row
from specdecode_worker.core.device_state import DeviceState, HostCopy, to_host
from specdecode_worker.core.request import Request
from specdecode_worker.drafts.base import Drafter, LoadedDraft, draft_trees, no_ranks, write_children
from specdecode_worker.sampling.sampler import Proposer
from specdecode_worker.sampling.trees import PLAIN, Forest, Tree, forest_of

# Order of the candidates of several drafts behind one node: by how often each was right lately.
#
# A candidate is a draft with a rank: the best token of the head, the second best of the lookup, and so on. The rates of
# a draft are those of the nodes where it proposes something.

PRIOR_NODES = 16.0
"""Weight of the prior, in nodes: rank r is right with probability 2^-(r + 1), whatever draft proposes it.

Equal rates are ordered by rank and then by draft, so drafts alternate until their rates are known.
"""
MOST_NODES = 512.0
"""Nodes after which all counts of a draft are halved, so that the order follows a change of the traffic."""


class Credit(NamedTuple):
    """Ranks of the tokens that a row emitted in one draft's own order, from the root on.

    ``ranks`` are as in ``Outcome.rank_BD``: MAX_RANKS for a miss, -1 where the draft proposed nothing. ``draft`` is its
    name and ``hash`` its hash.
    """

    draft: str
    hash: str
    ranks: Sequence[int]


class Candidate(NamedTuple):
    """Candidate of a draft: position of the draft among those of a request, and rank in its own order."""

    draft: int
    rank: int


class MergeOrder:
    """Rates of all candidates, by task and by greedy and sampled requests."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, bool, str], list[float]] = {}

    def record(self, task: str, credit: Credit, *, sampled: bool) -> None:
        """Count the ranks of the tokens of one row for a draft."""
        counts = self._counts.setdefault((task, sampled, credit.draft), [0.0] * (MAX_RANKS + 1))
        for rank in credit.ranks:
            if rank >= 0:
                counts[rank] += 1
        if sum(counts) > MOST_NODES:
            counts[:] = [count / 2 for count in counts]

    def order(self, task: str, drafts: Sequence[str], *, sampled: bool) -> list[Candidate]:
        """Return all candidates of the named drafts, that of the highest rate first. Each draft's own order holds."""
        rates = [self._rates(task, draft, sampled=sampled) for draft in drafts]
        candidates = (Candidate(draft, rank) for draft in range(len(drafts)) for rank in range(MAX_RANKS))
        return sorted(candidates, key=lambda one: (-rates[one.draft][one.rank], one.rank, one.draft))

    def retain(self, tasks: Sequence[str]) -> None:
        """Forget the rates of all other tasks."""
        self._counts = {key: counts for key, counts in self._counts.items() if key[0] in tasks}

    def _rates(self, task: str, draft: str, *, sampled: bool) -> list[float]:
        """Return how often the candidates of a draft were right, by rank. A rate is at most that of a better rank."""
        counts = self._counts.get((task, sampled, draft), [0.0] * (MAX_RANKS + 1))
        total = PRIOR_NODES + sum(counts)
        rates = ((PRIOR_NODES / 2 ** (rank + 1) + counts[rank]) / total for rank in range(MAX_RANKS))
        return list(accumulate(rates, min))


# Drafts of each task: the one that it names, and those that are merged with it.

Known = Callable[[str], bool]
"""Function that returns whether a draft of this name can run."""


class TaskDrafts:
    """Choice of drafts by task. Without tasks all requests use the default draft, and nothing is merged."""

    def __init__(self, default: str, known: Known, mergeable: Known, *, merges: bool = True) -> None:
        """Start without tasks.

        Args:
            default: Name of the draft of tasks without one.
            known: Whether a draft can run; names of others are ignored.
            mergeable: Whether a draft that can run can propose behind tokens of other drafts.
            merges: False if the sampler cannot merge drafts. Each task then uses its own draft alone.
        """
        self._default, self._known, self._mergeable, self._can_merge = default, known, mergeable, merges
        self._by_task: dict[str, TaskMatch] = {}
        self.merges = False
        """True if some task merges drafts."""

    def set_tasks(self, tasks: Iterable[TaskMatch]) -> None:
        """Replace all tasks."""
        self._by_task = {task.name: task for task in tasks if task.draft or task.merge}
        self.merges = self._can_merge and any(task.merge for task in self._by_task.values())

    @property
    def is_empty(self) -> bool:
        """True if no task has drafts of its own."""
        return not self._by_task

    @property
    def merging(self) -> Sequence[str]:
        """Names of the tasks that merge drafts."""
        return [name for name, task in self._by_task.items() if task.merge]

    def name(self, task: str) -> str:
        """Return the name of the draft of a task: the default one if it names none, or one that cannot run."""
        match = self._by_task.get(task) if self._by_task else None
        return match.draft if match is not None and match.draft and self._known(match.draft) else self._default

    def merged(self, task: str) -> tuple[MergedDraft, ...]:
        """Return the drafts that are merged with the draft of a task and can run; none if that draft cannot run."""
        match = self._by_task.get(task) if self.merges else None
        if match is None or not self._can_propose(own := self.name(task)):
            return ()
        return tuple(one for one in match.merge if one.draft != own and self._can_propose(one.draft))

    def _can_propose(self, draft: str) -> bool:
        """Return whether a draft can run and propose behind tokens of other drafts."""
        return self._known(draft) and self._mergeable(draft)

    def serves(self, draft: str, task: str) -> bool:
        """Return whether a draft proposes for a task, alone or merged with others."""
        return self.name(task) == draft or any(one.draft == draft for one in self.merged(task))


# Credit of the drafts of a step for the tokens that the target chose.


@dataclass(frozen=True, slots=True)
class CreditedDraft:
    """Draft that proposed for a row: its name, its hash, and its position among the drafts of the step."""

    name: str
    hash: str
    index: int


@dataclass(frozen=True, slots=True)
class OwnRanks:
    """Ranked tokens of each draft of a step, for the rows of tasks that merge drafts."""

    proposers: dict[int, tuple[CreditedDraft, ...]]
    """Drafts of such a row, by the index of the row."""
    ranked_FBNK: Tensor | None = None
    """Target ids behind every node in each draft's own order; None if one draft alone proposed for all rows."""
    host_copy: HostCopy = field(default_factory=HostCopy)

    def on_host(self, *, overwritten: bool = False) -> OwnRanks:
        """Queue the copy to the host. ``overwritten`` is as for `to_host`."""
        if self.ranked_FBNK is None:
            return self
        (ranked_FBNK,), host_copy = to_host([self.ranked_FBNK], overwritten=overwritten)
        return OwnRanks(self.proposers, ranked_FBNK, host_copy)

    def credit(
        self, row: int, path: Sequence[int], tokens: Sequence[int], ranks: Sequence[int], depth_limit: int
    ) -> tuple[Credit, ...]:
        """Wait for the copy, and return the credit of each draft of a row; empty if its task merges nothing.

        Args:
            row: Index of the row.
            path: Accepted nodes after the root.
            tokens: Emitted tokens: those of the path and the one after it.
            ranks: Ranks of these tokens in the common order.
            depth_limit: Largest number of accepted nodes. The token after a cut counts as a miss.
        """
        proposers = self.proposers.get(row, ())
        if self.ranked_FBNK is None or len(proposers) == 1:
            return tuple(Credit(one.name, one.hash, ranks[: len(tokens)]) for one in proposers)
        self.host_copy.wait()
        nodes = [0, *path[: len(tokens) - 1]]
        credits = []
        for one in proposers:
            ranked_NK = self.ranked_FBNK[one.index, row]
            ranks_D = [_rank(ranked_NK[node].tolist(), token) for node, token in zip(nodes, tokens, strict=True)]
            if len(tokens) > depth_limit and ranks_D[-1] >= 0:
                ranks_D[-1] = MAX_RANKS
            credits.append(Credit(one.name, one.hash, ranks_D))
        return tuple(credits)


def _rank(ranked: Sequence[int], token: int) -> int:
    """Return the rank of a token: MAX_RANKS if it is not among the candidates, -1 without candidates."""
    if ranked[0] < 0:
        return -1
    return ranked.index(token) if token in ranked else MAX_RANKS


# Proposals of several drafts in one step: each for rows of its own, or merged in the trees of the same rows.
#
# The drafts take turns level by level. Behind every node the candidates of all drafts of its row are put into one
# order, equal tokens once, and the children of the node take the first of them. All drafts read these tokens at the
# next level, so a draft continues paths that another one proposed.


@dataclass(frozen=True, slots=True)
class DraftedPart:
    """Draft of a step, and the trees that it proposes for: PLAIN for rows that it does not draft."""

    name: str
    drafter: Drafter
    forest: Forest


def propose_together(
    rows: Sequence[Row],
    forest: Forest,
    parts: Sequence[DraftedPart],
    orders: Sequence[Sequence[Candidate]],
    state: DeviceState,
    sampler: Proposer,
) -> tuple[Tensor | None, Tensor]:
    """Draft the trees of a forest with several drafts.

    Args:
        rows: Rows of the step.
        forest: Trees of all rows.
        parts: Drafts of the step.
        orders: Order of the candidates of each row, where a draft is its position among ``parts``. A draft that is not
            in the order of a row proposes nothing for it.
        state: Device state of the running requests.
        sampler: Sampler of the step.

    Returns:
        The best target ids behind every expanded node in the common order, [B, N, K], None if no tree has a node; and
        those of each draft in its own order, [F, B, N, K]. Both are -1 elsewhere.
    """
    device = state.length_S.device
    expands = [part.drafter.begin(rows, part.forest, sampler) for part in parts]
    own_FBNK = torch.stack([no_ranks(forest, device)] * len(parts))
    if not forest.levels:
        return None, own_FBNK
    slots_B = to_device([row.request.slot for row in rows], device)
    order_BM = to_device(order_table(orders, len(parts)), device, dtype=torch.int64)
    ranked_BNK = no_ranks(forest, device)
    for depth, level in enumerate(forest.levels):
        for f, (part, expand) in enumerate(zip(parts, expands, strict=True)):
            if expand is None or depth >= len(part.forest.levels):
                continue
            mine = part.forest.levels[depth]
            ranked_RK = expand(depth, mine)
            own_FBNK[f, mine.batch_R, mine.node_R, : ranked_RK.shape[1]] = ranked_RK
        own_RFK = own_FBNK[:, level.batch_R, level.node_R].transpose(0, 1)
        ranked_BNK[level.batch_R, level.node_R] = in_order(own_RFK, order_BM[level.batch_R])
        write_children(ranked_BNK, level, slots_B, state)
    return ranked_BNK, own_FBNK


def in_order(own_RFK: Tensor, order_RM: Tensor) -> Tensor:
    """Return the best tokens [R, K] of several drafts in the common order of each row, from those of each draft."""
    return first_distinct(own_RFK.flatten(1).gather(1, order_RM), own_RFK.shape[-1])


def first_distinct(tokens_RM: Tensor, count: int) -> Tensor:
    """Return the first ``count`` distinct tokens of each row, [R, count]. -1 is no token, and pads the result."""
    repeated_RM = (tokens_RM[:, :, None] == tokens_RM[:, None, :]).tril(-1).any(-1)
    dropped_RM = repeated_RM | (tokens_RM < 0)
    first_RK = dropped_RM.to(torch.int8).argsort(dim=1, stable=True)[:, :count]
    return torch.where(dropped_RM.gather(1, first_RK), -1, tokens_RM.gather(1, first_RK))


def order_table(orders: Sequence[Sequence[Candidate]], drafts: int) -> list[list[int]]:
    """Return the candidates of each row as indices of [drafts, MAX_RANKS], [B, drafts * MAX_RANKS].

    Drafts that are not in the order of a row follow; they propose nothing for it.
    """
    table = []
    for order in orders:
        listed = [draft * MAX_RANKS + rank for draft, rank in order]
        rest = set(range(drafts * MAX_RANKS)).difference(listed)
        table.append([*listed, *sorted(rest)])
    return table


# Drafts that propose in a step: the drafts of each request, their passes, their proposals and their credit.


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

    def __init__(self, drafts: Mapping[str, LoadedDraft], tasks: TaskDrafts, state: DeviceState) -> None:
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
        if not self._tasks.merges and not any(map(self._has_one_pass, self._drafts)):
            return max(depths)
        return max(self._row_passes(row, depth) for row, depth in zip(rows, depths, strict=True))

    def extension(self, request: Request) -> int:
        """Return the depth to which drafts without passes extend the request's tree in the next step; 0 for none."""
        if not self._tasks.merges:
            return 0
        merged = (one for one in self._tasks.merged(request.submit.task) if one.draft in request.proposers)
        return max((one.depth for one in merged if not self._drafts[one.draft].drafter.needs_passes), default=0)

    def orders(self, rows: Sequence[Row], used: Sequence[str]) -> list[list[int]]:
        """Return the order of the candidates of the drafts ``used`` for each row, as `order_table`."""
        return order_table(self._orders(rows, [self.proposers(row.request, row.tree) for row in rows], used), len(used))

    def own_ranks(self, rows: Sequence[Row], used: Sequence[str], own_FBNK: Tensor) -> OwnRanks | None:
        """Return the ranks of the drafts ``used`` for the rows of tasks that merge drafts; None if there are none."""
        names = [self.proposers(row.request, row.tree) for row in rows]
        return self._own_ranks(rows, names, used, own_FBNK)

    def record_credit(self, request: Request, credits: Iterable[Credit]) -> None:
        """Take over the credit of each draft for the last tokens of a request, for the order of later candidates."""
        for credit in credits:
            self.order.record(request.submit.task, credit, sampled=not request.sampling_params.greedy)

    def propose(self, rows: Sequence[Row], forest: Forest, sampler: Proposer) -> Proposed:
        """Draft the trees of all rows, each row by its own draft and those that are merged with it."""
        names = [self.proposers(row.request, tree) for row, tree in zip(rows, forest.trees, strict=True)]
        used = sorted({name for row in names for name in row if name in self._drafts})
        if not used:
            return Proposed()
        if len(used) == 1 and len(set(names)) == 1:
            expand = self._drafts[used[0]].drafter.begin(rows, forest, sampler)
            return Proposed(draft_trees(rows, forest, self._state, expand), self._own_ranks(rows, names, used))
        parts = [DraftedPart(name, self._drafts[name].drafter, self._own_forest(name, names, forest)) for name in used]
        orders = self._orders(rows, names, used)
        ranked_BNK, own_FBNK = propose_together(rows, forest, parts, orders, self._state, sampler)
        return Proposed(ranked_BNK, self._own_ranks(rows, names, used, own_FBNK))

    def proposers(self, request: Request, tree: Tree) -> tuple[str, ...]:
        """Return the drafts that propose for a tree; without a tree those that must know of the request's tokens."""
        own, merged = self._tasks.name(request.submit.task), self._tasks.merged(request.submit.task)
        return request.proposers if merged and tree.drafted_depth else (own, *(one.draft for one in merged))

    def _row_passes(self, row: Row, depth: int) -> int:
        """Return the number of draft passes for the first ``depth`` levels of a row's tree."""
        planned = min(depth, row.tree.planned_part.drafted_depth)
        names = self.proposers(row.request, row.tree)
        if len(names) == 1 and row.tree.planned is None:
            return min(planned, 1) if self._has_one_pass(names[0]) else planned
        heads = [name for name in names if self._drafts[name].drafter.needs_passes]
        return sum(min(planned, 1) if self._has_one_pass(name) else planned for name in heads)

    def _has_one_pass(self, name: str) -> bool:
        loaded = self._drafts.get(name)
        return loaded is not None and loaded.drafter.one_pass

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
            b: tuple(CreditedDraft(name, self._drafts[name].state.hash, used.index(name)) for name in names[b])
            for b, row in enumerate(rows)
            if self._tasks.merged(row.request.submit.task)
        }
        return OwnRanks(proposers, own_FBNK) if proposers else None
