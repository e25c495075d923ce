"""Interface of all draft methods, and the loop over the levels of a tree that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.engine.batch import Row
from specdecode_worker.engine.drafts.aux_hidden_states import StateColumns
from specdecode_worker.engine.drafts.draft_passes import level_pass
from specdecode_worker.engine.drafts.draft_progress import DraftProgress
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.engine.step.packed_batch import PackedBatch, PackedTensors
from specdecode_worker.models.configs.target_states import TargetStates
from specdecode_worker.speculation.sampling.row_selection import Nodes
from specdecode_worker.speculation.sampling.sampler import Proposer, Sampler
from specdecode_worker.speculation.trees import Forest, Level, Tree

Expand = Callable[[int, Level], Tensor]
"""Callable (depth, level) that returns the target ids proposed behind the nodes of a level, [R, K], best first.

Missing proposals are -1.
"""

Progress = Callable[[Request], DraftProgress]


class Drafter(Protocol):
    """Interface of a loaded draft. A draft affects the number of tokens per step, never the text."""

    needs_passes: ClassVar[bool]
    """False if the draft has no network, so that a deeper tree costs no draft pass."""
    reads: TargetStates
    """Target states that the draft reads."""
    columns: StateColumns
    """Columns of those states among the stored target states; set by the DraftRegistry."""

    def ready(self, request: Request) -> bool:
        """Return whether the draft can propose tokens for this request in the next step; else it decodes plainly."""
        ...

    def prefill(self, rows: Sequence[Row], aux_TA: Tensor) -> None:
        """Run the draft over prefill chunks. ``aux_TA`` [T, A] holds the target states of their tokens."""
        ...

    def begin(self, rows: Sequence[Row], forest: Forest, sampler: Sampler) -> Expand | None:
        """Catch up with committed tokens, and return the function that proposes tokens for the trees of the forest.

        It is called for one level after the other, once the tokens of the nodes of a level are in ``state.tokens_SP``.
        Those need not be tokens that this draft proposed. None if there is no tree to draft.
        """
        ...


@runtime_checkable
class AnswerReader(Protocol):
    """Drafter that learns from the answers of requests, or stores something for each request."""

    def record_end(self, request: Request) -> None:
        """Read the answer of a request that ends for any reason, and drop what is stored for the request itself."""
        ...


@runtime_checkable
class RestartedDrafter(Protocol):
    """Drafter whose network runs in a process that may be lost and started again."""

    @property
    def problem(self) -> str:
        """Reason why it cannot draft now; empty if it can."""
        ...

    def take_restarted(self) -> bool:
        """Begin to use a restarted process and return whether there was one. It has no keys of any request."""
        ...


def own_progress(request: Request) -> DraftProgress:
    """Return the progress of the request's own draft, for a draft that no registry knows."""
    return request.draft


def any_request(request: Request) -> bool:
    """Return True: a draft that no registry knows serves every request."""
    return True


class PagedDrafter(ABC):
    """Drafter with a paged KV cache of its own."""

    needs_passes: ClassVar[bool] = True
    parallel: ClassVar[bool] = False
    """True if one pass proposes all depths of a tree, so that a deeper tree needs no further passes."""
    captured: ClassVar[bool] = True
    """True if its passes can be captured in a graph."""
    first_slot: int
    """First slot of its cache that holds keys: 0, or 1 for EAGLE heads."""
    last_position: int
    """Last position that its position embedding supports; later positions are clamped to it."""
    serves: Callable[[Request], bool] = staticmethod(any_request)
    """Function that returns whether this draft serves a request; set by the DraftRegistry.

    Rows of other drafts can be in the same step. Their lag is that of their own draft.
    """
    progress: Progress = staticmethod(own_progress)
    """Function that returns the progress of this draft through the text of a request that it serves; set likewise."""

    @abstractmethod
    def drafting(self, rows: Sequence[Row], trees: Sequence[Tree]) -> list[int]:
        """Return the indices of the rows that the draft runs for: rows that draft, and rows that must catch up now."""

    @abstractmethod
    def catch_up_counts(self, requests: Sequence[Request]) -> list[int]:
        """Return the number of slots up to the root that the draft must run for each request, and still can."""

    @abstractmethod
    def record_catch_up(self, requests: Sequence[Request], counts: Sequence[int]) -> None:
        """Record that the draft runs the last ``counts`` slots up to the root of each request in this step."""

    def first_key(self, request: Request) -> int:
        """Return the first slot of the request whose keys the draft attends to."""
        start = self.progress(request).start
        return start if start > 1 else self.first_slot

    def pass_by_level(
        self, roots_RE: Tensor, rows: Sequence[Row], forest: Forest, state: DeviceState, sampler: Proposer
    ) -> Expand:
        """Return the function that proposes tokens, with one pass for each level below the roots.

        Args:
            roots_RE: The draft's hidden states at the roots of the trees, [R, E].
            rows: Rows of the step.
            forest: Their trees.
            state: Device state of the running requests.
            sampler: Sampler of the step.
        """
        hidden_RE = roots_RE

        def expand(depth: int, level: Level) -> Tensor:
            nonlocal hidden_RE
            hidden_RE = hidden_RE[level.source_R]
            if depth:
                packed = level_pass(state, rows, level, depth, forest, self.last_position, first_key=self.first_key)
                hidden_RE = self.node_states(hidden_RE, packed)
            return self.rank(hidden_RE, level.nodes, depth, sampler)

        return expand

    @abstractmethod
    def root_states(self, slots_T: Tensor, index_T: Tensor, packed: PackedBatch | PackedTensors) -> Tensor:
        """Return the draft's hidden states [T, E] at committed tokens.

        Args:
            slots_T: Slot of the request in DeviceState.
            index_T: Draft slot, i.e. index of the token in the text.
            packed: The pass over these draft slots.
        """

    @abstractmethod
    def node_states(self, hidden_RE: Tensor, packed: PackedBatch | PackedTensors) -> Tensor:
        """Return the draft's hidden states [R, E] at tree nodes, from the states ``hidden_RE`` of their parents."""

    @abstractmethod
    def rank(self, hidden_RE: Tensor, at: Nodes, depth: int, sampler: Proposer) -> Tensor:
        """Return the best target token ids behind these hidden states, [R, K], best first."""


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
        return sampler.propose(logits_RV, self._target_ids, at.batch_R, at.node_R, at.depth_R, sharpness, k)


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
