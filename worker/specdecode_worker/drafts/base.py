"""Interface of drafters, their passes, and a loaded draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import MAX_RANKS, DraftConfig, DraftState
from specdecode_worker.core.device_state import DeviceState, PackedBatch, PackedTensors, PagedCache, slots_of, spread
from specdecode_worker.core.kv_cache import BLOCK_SIZE
from specdecode_worker.core.request import DraftProgress, Request, Row
from specdecode_worker.models.target_states import NO_STATES, TargetStates
from specdecode_worker.sampling.sampler import Proposer
from specdecode_worker.sampling.trees import Forest, Level, Nodes, Tree, all_nodes

# Target hidden states that the loaded drafts read. They are stored together; each draft selects its columns.


@dataclass(frozen=True, slots=True)
class StateColumns:
    """Indices of the stored states that a draft reads, each of width ``size``; None for all, in stored order."""

    indices: tuple[int, ...] | None = None
    size: int = 0

    def of(self, aux_TA: Tensor) -> Tensor:
        """Select the states of the draft from the stored ones, [tokens, width]."""
        if self.indices is None:
            return aux_TA
        states_TSH = aux_TA.view(len(aux_TA), -1, self.size)
        # Single selections, because a list as index would be copied to the device.
        return torch.cat([states_TSH[:, index] for index in self.indices], dim=1)


def union_reads(reads: Iterable[TargetStates]) -> TargetStates:
    """Return the union of the states that several drafts read.

    If all drafts read the same states, their order is preserved, so that no selection is needed.
    """
    distinct = {one for one in reads if one}
    return distinct.pop() if len(distinct) == 1 else reduce(TargetStates.__or__, distinct, NO_STATES)


def columns_of(one: TargetStates, among: TargetStates, size: int) -> StateColumns:
    """Return the columns of the states ``one`` among the stored states ``among``."""
    return StateColumns() if one == among else StateColumns(among.indices_of(one), size)


# Passes of a draft with a KV cache of its own: runs of consecutive slots, and levels of trees.
#
# Draft slot i belongs to token i and proposes token i + 1. The keys of a tree follow those of the root, as in the
# target's cache. They are rewritten once their tokens are accepted.


def catch_up_runs(
    state: DeviceState, requests: Sequence[Request], counts: Sequence[int], masks: Sequence[int] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """Locate the ``counts[b]`` draft slots that end at the root of each request, and the ``masks[b]`` behind it.

    Returns:
        The first draft slot of each request [B], all draft slots [T], and the slot in DeviceState of each [T].
    """
    slots_B = to_device([request.slot for request in requests], state.length_S.device)
    first_B = state.length_S[slots_B] + 1 - to_device(counts, slots_B.device)
    every = [count + behind for count, behind in zip(counts, masks or [0] * len(counts), strict=True)]
    sequence_T, row_T = spread(tuple(every), slots_B.device)
    return first_B, first_B[sequence_T] + row_T, slots_B[sequence_T]


# Interface of all draft methods, and the loop over the levels of a tree that they share.

Expand = Callable[[int, Level], Tensor]
"""Callable (depth, level) that returns the target ids proposed behind the nodes of a level, [R, K], best first.

Missing proposals are -1.
"""

Progress = Callable[[Request], DraftProgress]


def own_progress(request: Request) -> DraftProgress:
    """Return the progress of the request's own draft, for a draft that no registry knows."""
    return request.draft


def any_request(request: Request) -> bool:
    """Return True: a draft that no registry knows serves every request."""
    return True


class Drafter(ABC):
    """Loaded draft. It affects the number of tokens per step, never the text."""

    needs_passes: ClassVar[bool] = True
    """False if the draft has no network, so that a deeper tree costs no draft pass."""
    one_pass: ClassVar[bool] = False
    """True if one pass proposes all depths of a tree, so that a deeper tree needs no further passes."""
    own_process: ClassVar[bool] = False
    """True if its network runs in a process of its own, which drafts whole trees and may be lost and started again."""
    kv_cache: PagedCache | None = None
    """Keys and values of the draft's own in this process, if it has any."""
    reads: TargetStates = NO_STATES
    """Target states that the draft reads."""
    columns: StateColumns = StateColumns()
    """Columns of those states among the stored target states; set by the DraftRegistry."""
    serves: Callable[[Request], bool] = staticmethod(any_request)
    """Function that returns whether this draft serves a request; set by the DraftRegistry.

    Rows of other drafts can be in the same step. Their lag is that of their own draft.
    """
    progress: Progress = staticmethod(own_progress)
    """Function that returns the progress of this draft through the text of a request that it serves; set likewise."""

    @property
    def problem(self) -> str:
        """Reason why it cannot draft now; empty if it can."""
        return ""

    @abstractmethod
    def ready(self, request: Request) -> bool:
        """Return whether the draft can propose tokens for this request in the next step; else it decodes plainly."""

    def prefill(self, rows: Sequence[Row], aux_TA: Tensor) -> None:  # noqa: B027 - some drafts need no prefill
        """Run the draft over prefill chunks. ``aux_TA`` [T, A] holds the target states of their tokens."""

    @abstractmethod
    def begin(self, rows: Sequence[Row], forest: Forest, sampler: Proposer) -> Expand | None:
        """Catch up with committed tokens, and return the function that proposes tokens for the trees of the forest.

        It is called for one level after the other, once the tokens of the nodes of a level are in ``state.tokens_SP``.
        Those need not be tokens that this draft proposed. None if there is no tree to draft.
        """

    def take_restarted(self) -> bool:
        """Begin to use a restarted process and return whether there was one. It has no keys of any request."""
        return False

    def record_end(self, request: Request) -> None:  # noqa: B027 - most drafts store nothing
        """Read the answer of a request that ends for any reason."""


class PagedDrafter(Drafter):
    """Drafter that must catch up with the text of its requests, most with a paged KV cache of its own."""

    first_slot: int
    """First slot of its cache that holds keys: 0, or 1 for EAGLE heads."""
    last_position: int
    """Last position that its position embedding supports; later positions are clamped to it."""

    def record_prefill(self, rows: Sequence[Row]) -> None:
        """Record that the draft has run over these chunks."""
        for row in rows:
            progress = self.progress(row.request)
            if progress.lag > 1:  # the draft has not run over the prompt so far
                progress.start = self._start_at(row.start)
            progress.lag = 1

    def drafting(self, rows: Sequence[Row], trees: Sequence[Tree]) -> list[int]:
        """Return the indices of the rows that the draft runs for: rows that draft, and rows that must catch up now."""
        return [b for b, row in enumerate(rows) if trees[b].drafted_depth and not row.is_chunk]

    @abstractmethod
    def catch_up_counts(self, requests: Sequence[Request]) -> list[int]:
        """Return the number of slots up to the root that the draft must run for each request, and still can."""

    def record_catch_up(self, requests: Sequence[Request], counts: Sequence[int]) -> None:
        """Record that the draft runs the last ``counts`` slots up to the root of each request in this step.

        The draft restarts at them where it lags further behind.
        """
        for request, count in zip(requests, counts, strict=True):
            progress = self.progress(request)
            # The backlog is at most the lag, which is cheaper to read.
            if progress.lag > count < request.draft_backlog(self.first_slot, progress):
                progress.start = self._start_at(request.cached_min + 1 - count)
            progress.reached_root(len(request.in_flight))

    def _start_at(self, slot: int) -> int:
        """Return the start of a progress whose first key is at this slot. A start of 1 or less means slot 0 too."""
        return max(slot, 2 - self.first_slot) if slot else 1

    def start_catch_up(self, rows: Sequence[Row], trees: Sequence[Tree]) -> tuple[list[int], list[int]]:
        """Record the catch-up to the roots, and return the rows that the draft runs for, and their counts."""
        drafting = self.drafting(rows, trees)
        requests = [rows[b].request for b in drafting]
        counts = self.catch_up_counts(requests) if drafting else []
        self.record_catch_up(requests, counts)
        return drafting, counts

    def first_key(self, request: Request) -> int:
        """Return the first slot of the request whose keys the draft attends to."""
        start = self.progress(request).start
        return start if start > 1 else self.first_slot


def target_ids_of(network: Any, context: DraftContext) -> Tensor | None:
    """Return the target id of each token of a draft's vocabulary; None if the vocabularies are the same."""
    ids: Tensor | None = network.target_ids
    return None if ids is None or len(ids) == context.vocab_size else ids


class CapturedDrafter(PagedDrafter):
    """Paged drafter whose passes can be captured in a graph: one for each level of a tree.

    With ``one_pass`` the first of them also runs a mask slot behind the root for each further level, and is the only
    one. `root_states` then gets these slots too, and a level has the states at its mask slot.
    """

    block: ClassVar[bool] = False
    """True if the one pass runs a block of the root and its mask slots, which all see each other. The committed tokens
    before the root are not in it; `store_context` gets them."""
    _state: DeviceState
    _ranking: Ranking

    def begin(self, rows: Sequence[Row], forest: Forest, sampler: Proposer) -> Expand | None:
        """Catch up to the root, and return the function that proposes tokens."""
        drafting, counts = self.start_catch_up(rows, forest.trees)
        return self.first_pass(drafting, counts, rows, forest, sampler)

    def first_pass(
        self, drafting: Sequence[int], counts: Sequence[int], rows: Sequence[Row], forest: Forest, sampler: Proposer
    ) -> Expand | None:
        """Run the slots up to the roots and the mask slots, and return the function that proposes tokens.

        Args:
            drafting: Rows that the draft runs for; without any, None is returned.
            counts: Number of slots of each up to its root.
            rows: Rows of the step.
            forest: Their trees.
            sampler: Sampler of the step.
        """
        if self.block and drafting:
            self._store_committed([rows[b].request for b in drafting], counts)
            drafting = [b for b in drafting if forest.trees[b].drafted_depth]
            counts = [1] * len(drafting)
        if not drafting:
            return None
        requests, depths = [rows[b].request for b in drafting], [forest.trees[b].drafted_depth for b in drafting]
        masks = [max(depth - 1 + self.block, 0) if self.one_pass else 0 for depth in depths]
        every = [count + behind for count, behind in zip(counts, masks, strict=True)]
        first_B, index_T, slots_T = catch_up_runs(self._state, requests, counts, masks)
        packed = self.causal_pass(requests, every, first_B, masks, block=self.block)
        hidden_TE = self.root_states(slots_T, index_T, packed)
        begins = [begin + count - 1 for begin, count in zip(accumulate(every, initial=0), counts, strict=False)]
        if not self.one_pass:
            return self._by_level(hidden_TE[self._of_rows(drafting, begins, len(rows))], rows, forest, sampler)
        # The output matrix is read once, for all depths.
        depths = [behind + 1 - self.block for behind in masks]
        proposing = [root + self.block + k for root, depth in zip(begins, depths, strict=True) for k in range(depth)]
        logits_PV = self.logits(hidden_TE[to_device(proposing, hidden_TE.device)], 0)
        first_B = self._of_rows(drafting, list(accumulate(depths, initial=0)), len(rows))

        def expand(depth: int, level: Level) -> Tensor:
            return self._ranking.of(logits_PV[first_B[level.batch_R] + depth], level.nodes, depth, sampler)

        return expand

    def _of_rows(self, drafting: Sequence[int], places: Sequence[int], rows: int) -> Tensor:
        """Return the places of the drafting rows, [B], and 0 for the others."""
        of_row = dict(zip(drafting, places, strict=False))
        return to_device([of_row.get(b, 0) for b in range(rows)], self._state.length_S.device)

    def _store_committed(self, requests: Sequence[Request], counts: Sequence[int]) -> None:
        """Write keys and values of the committed tokens that the draft lags behind, up to the one before the root."""
        _, index_T, slots_T = catch_up_runs(self._state, requests, counts)
        places_T = slots_of(self._state.block_table_SM, slots_T, index_T - 1)
        self.store_context(slots_T, index_T - 1, (index_T - 1).clamp(max=self.last_position), places_T)

    def _by_level(self, roots_RE: Tensor, rows: Sequence[Row], forest: Forest, sampler: Proposer) -> Expand:
        """Return the function that proposes tokens, with one pass for each level below the roots.

        Args:
            roots_RE: The draft's hidden states at the roots of the trees, [R, E].
            rows: Rows of the step.
            forest: Their trees.
            sampler: Sampler of the step.
        """
        hidden_RE = roots_RE

        def expand(depth: int, level: Level) -> Tensor:
            nonlocal hidden_RE
            hidden_RE = hidden_RE[level.source_R]
            if depth:
                hidden_RE = self.node_states(hidden_RE, self.level_pass(rows, level, depth, forest))
            return self.rank(hidden_RE, level.nodes, depth, sampler)

        return expand

    def causal_pass(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        first_B: Tensor,
        masks: Sequence[int] = (),
        *,
        block: bool = False,
    ) -> PackedBatch:
        """Build the pass over ``counts[b]`` consecutive draft slots of each request, from ``first_B[b]`` on.

        Args:
            requests: Requests of the pass, B of them.
            counts: Number of slots of each request.
            first_B: First slot of each request, on the device.
            masks: Number of the slots of each request that are mask slots behind its root; none if left out.
            block: The slots of a request see each other, and not only those before them.
        """
        state = self._state
        device = first_B.device
        slots_B = to_device([request.slot for request in requests], device)
        sequence_T, row_T = spread(tuple(counts), device)
        index_T = first_B[sequence_T] + row_T
        table_BM = state.block_table_SM[slots_B]
        # During prefill, a request owns blocks only for the tokens launched so far; the last of them has the last slot.
        bounds = tuple(
            min(max(request.cached_bound, request.prefilled) + 1 + behind, len(request.blocks) * BLOCK_SIZE)
            for request, behind in zip(requests, masks or [0] * len(requests), strict=True)
        )
        seen = to_device([all_nodes(count) for count in counts for _ in range(count)], device) if block else None
        return PackedBatch(
            tokens_T=state.tokens_SP[slots_B[sequence_T], index_T],
            positions_T=index_T.clamp(max=self.last_position),
            slots_T=slots_of(table_BM, sequence_T, index_T),
            prefix_len_B=first_B,
            ancestors_T=torch.zeros_like(index_T) if seen is None else seen,
            block_table_BM=table_BM,
            blocks=tuple(tuple(request.blocks) for request in requests),
            query_counts=tuple(counts),
            key_bounds=bounds,
            key_starts=tuple(self.first_key(request) for request in requests),
            dense=False,
        )

    def level_pass(self, rows: Sequence[Row], level: Level, depth: int, forest: Forest) -> PackedBatch:
        """Build the pass over the nodes of one level of the trees.

        Args:
            rows: Rows of the step.
            level: Nodes to run.
            depth: Depth of the level; the root has depth 0.
            forest: Trees of the step.
        """
        state = self._state
        running = [b for b, count in enumerate(level.counts) if count]
        requests = [rows[b].request for b in running]
        counts = tuple(level.counts[b] for b in running)
        slots_B = to_device([request.slot for request in requests], level.node_R.device)
        sequence_R, _ = spread(counts, slots_B.device)
        length_B = state.length_S[slots_B]
        length_R = length_B[sequence_R]
        table_BM = state.block_table_SM[slots_B]
        highest = [max(forest.trees[b].expanded[depth]) for b in running]
        return PackedBatch(
            tokens_T=state.tokens_SP[slots_B[sequence_R], length_R + level.node_R],
            positions_T=(length_R + depth).clamp(max=self.last_position),
            slots_T=slots_of(table_BM, sequence_R, length_R + level.node_R),
            prefix_len_B=length_B,
            ancestors_T=level.ancestors_R,
            block_table_BM=table_BM,
            blocks=tuple(tuple(request.blocks) for request in requests),
            query_counts=counts,
            key_bounds=tuple(r.cached_bound + node + 1 for r, node in zip(requests, highest, strict=True)),
            key_starts=tuple(self.first_key(request) for request in requests),
            dense=all(r.cached_bound == r.cached for r in requests) and all(node == depth for node in highest),
        )

    @abstractmethod
    def root_states(self, slots_T: Tensor, index_T: Tensor, packed: PackedBatch | PackedTensors) -> Tensor:
        """Return the draft's hidden states [T, E] at committed tokens.

        Args:
            slots_T: Slot of the request in DeviceState.
            index_T: Draft slot, i.e. index of the token in the text. Mask slots are behind the root.
            packed: The pass over these draft slots.
        """

    def node_states(self, hidden_RE: Tensor, packed: PackedBatch | PackedTensors) -> Tensor:
        """Return the draft's hidden states [R, E] at tree nodes, from the states ``hidden_RE`` of their parents.

        They are those of the parents unless the draft has a pass for each level.
        """
        return hidden_RE

    def store_context(self, slots_T: Tensor, index_T: Tensor, positions_T: Tensor, places_T: Tensor) -> None:
        """Write the keys and values of committed tokens before the roots, for a draft with a block.

        Args:
            slots_T: Slot of the request in DeviceState.
            index_T: Index of the token in the text.
            positions_T: Its position.
            places_T: Its slot in the draft's cache.
        """

    @abstractmethod
    def logits(self, hidden_RE: Tensor, depth: int) -> Tensor:
        """Return the logits of the draft's tokens behind these hidden states of nodes of one depth, [R, V].

        With ``one_pass`` they are those of any depth.
        """

    def rank(self, hidden_RE: Tensor, at: Nodes, depth: int, sampler: Proposer) -> Tensor:
        """Return the best target token ids behind these hidden states, [R, K], best first."""
        return self._ranking.of(self.logits(hidden_RE, depth), at, depth, sampler)


class Ranking:
    """Ranking of the draft's tokens behind the nodes of a level. For sampled requests, logits are scaled by depth."""

    def __init__(self, target_ids: Tensor | None, sharpness: Sequence[float]) -> None:
        """Create a ranking.

        Args:
            target_ids: Target id of each token of the draft's vocabulary; None if the vocabularies are the same.
            sharpness: Factors on the logits, ``sharpness[d]`` for depth d + 1. The last factor applies to all greater
                depths; empty means 1.
        """
        self._target_ids, self._sharpness = target_ids, tuple(sharpness) or (1.0,)

    def of(self, logits_RV: Tensor, at: Nodes, depth: int, sampler: Proposer) -> Tensor:
        """Return the best target token ids behind nodes of this depth, [R, K], best first."""
        sharpness = self._sharpness[min(depth, len(self._sharpness) - 1)]
        k = min(MAX_RANKS, logits_RV.shape[-1])
        return sampler.propose(logits_RV, self._target_ids, at, sharpness, k)


def draft_trees(rows: Sequence[Row], forest: Forest, state: DeviceState, expand: Expand | None) -> Tensor | None:
    """Draft the trees of the forest level by level.

    The tokens of each level's children are written behind the root in ``state.tokens_SP``, where the next level reads
    them.

    Returns:
        The best target ids behind every expanded node, [B, N, K], best first, -1 elsewhere. N counts verified and
        shadow nodes. None if no tree has a node.
    """
    if not forest.levels or expand is None:
        return None
    slots_B = to_device([row.request.slot for row in rows], state.length_S.device)
    ranked_BNK = no_ranks(forest, state.length_S.device)
    for depth, level in enumerate(forest.levels):
        ranked_RK = expand(depth, level)
        ranked_BNK[level.batch_R, level.node_R, : ranked_RK.shape[1]] = ranked_RK
        write_children(ranked_BNK, level, slots_B, state)
    return ranked_BNK


def no_ranks(forest: Forest, device: torch.device) -> Tensor:
    """Return ranked target ids [B, N, MAX_RANKS] of a forest before anything is proposed: -1."""
    nodes = max(len(tree.parents) for tree in forest.trees)
    return torch.full((len(forest.trees), nodes, MAX_RANKS), -1, device=device)


def write_children(ranked_BNK: Tensor, level: Level, slots_B: Tensor, state: DeviceState) -> None:
    """Write the tokens of the children of a level behind their roots, from the ranked ids behind its nodes."""
    slot_C = slots_B[level.child_batch_C]
    parent_C = level.node_R[level.child_source_C]
    token_C = ranked_BNK[level.child_batch_C, parent_C, level.child_rank_C]
    # A node without a proposal (-1) gets token 0. This is harmless, since the target verifies every node.
    state.tokens_SP[slot_C, state.length_S[slot_C] + level.child_node_C] = token_C.clamp(min=0)


# Arguments of a new drafter, a draft that was loaded, and the interface of what loads it.


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftContext:
    """Arguments of a new drafter besides its network."""

    config: DraftConfig
    sharpness: tuple[float, ...] = ()
    """Factors of the calibration, as for Ranking."""
    state: DeviceState
    vocab_size: int
    """Vocabulary size of the target."""
    positions: int
    """Number of positions that the target supports."""
    host_is_current: bool
    """True if no step is launched before the previous one is collected."""
    make_cache: Callable[[Any], PagedCache]
    """Function that allocates the KV cache of a network, from its configuration."""


DEFAULT_DRAFT = ""
"""Name of the default draft, used by tasks that have no draft of their own."""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """Draft that can run, and its state for the worker report."""

    drafter: Drafter
    state: DraftState


class LoadDraft(Protocol):
    """Callable that loads a draft while others run; see DraftLoader."""

    def __call__(self, config: DraftConfig, name: str = DEFAULT_DRAFT) -> LoadedDraft:
        """Load the draft of ``config`` under ``name``. Raise ModelError on failure."""
        ...
