"""What every method does for the engine, and the loop over a tree's levels that all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.engine.drafts.aux_hidden_states import Columns
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.scheduler import Row
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.engine.step.packed_batch import Packed, Tables
from specdecode_worker.models.configs.target_states import Reads
from specdecode_worker.speculation.sampling.row_selection import Nodes
from specdecode_worker.speculation.sampling.sampler import Sampler
from specdecode_worker.speculation.trees import Forest, Level, Tree

Expand = Callable[[int, Level], Tensor]
"""(depth, level) -> [R, K] target ids proposed behind the level's nodes, best first, -1 for none."""


class Drafter(Protocol):
    """One loaded draft. Nothing that it does can change the text: it decides how many tokens a step brings."""

    reads: Reads
    """What it reads of the target."""
    columns: Columns
    """Where that stands in the states that are kept; the roster says."""

    def ready(self, request: Request) -> bool:
        """Whether it can propose anything for this request in the next step; if not, the row runs plainly."""
        ...

    def prefill(self, rows: Sequence[Row], aux_TA: Tensor) -> None:
        """Follows prefill chunks, whose aux states are ``aux_TA`` [T, A]."""
        ...

    def propose(self, rows: Sequence[Row], forest: Forest, sampler: Sampler) -> Tensor | None:
        """Drafts the forest's trees and writes their tokens behind the roots in ``state.tokens_SP``.

        [B, N, K]: the best target ids behind every node that was expanded, best first, -1 elsewhere; N counts
        verified and shadow nodes. None when no tree has a node.
        """
        ...


class PagedDrafter(ABC):
    """A Drafter with a paged cache of its own, whose passes may be captured in a graph."""

    first_slot: int
    """Of its cache."""
    last_position: int
    """Beyond which its rotations know no place."""

    @abstractmethod
    def drafting(self, rows: Sequence[Row], trees: Sequence[Tree]) -> list[int]:
        """Which rows it runs for in this step: those with something to draft, and who must catch up now."""

    @abstractmethod
    def behind(self, requests: Sequence[Request]) -> list[int]:
        """How many slots up to the root it has to run for each of them, and still can."""

    @abstractmethod
    def caught_up(self, requests: Sequence[Request], counts: Sequence[int]) -> None:
        """Notes that it runs so many slots for them in this step."""

    def first_key(self, request: Request) -> int:
        """The first slot that it sees."""
        return request.draft.start if request.draft.start > 1 else self.first_slot

    @abstractmethod
    def root_states(self, slots_T: Tensor, index_T: Tensor, packed: Packed | Tables) -> Tensor:
        """[T, E] behind the draft's slots ``index_T`` of the sequences in ``slots_T``, of committed text."""

    @abstractmethod
    def node_states(self, hidden_RE: Tensor, packed: Packed | Tables) -> Tensor:
        """[R, E] behind nodes of a tree, from the states of their parents."""

    @abstractmethod
    def rank(self, hidden_RE: Tensor, at: Nodes, depth: int, sampler: Sampler) -> Tensor:
        """[R, K] target ids to come behind these states, best first."""


class Ranking:
    """Ranks what a draft says behind a level's nodes, its logits sharpened by depth where sampled."""

    def __init__(self, target_ids: Tensor | None, sharpness: Sequence[float]) -> None:
        """``target_ids`` maps the draft's vocabulary (None: the target's own). ``sharpness[d]`` multiplies the logits
        of depth d + 1; the last entry repeats, none means 1."""
        self._target_ids, self._sharpness = target_ids, tuple(sharpness) or (1.0,)

    def of(self, logits_RV: Tensor, at: Nodes, depth: int, sampler: Sampler) -> Tensor:
        """[R, K] target ids, best first, of nodes of this depth."""
        sharpness = self._sharpness[min(depth, len(self._sharpness) - 1)]
        k = min(MAX_RANKS, logits_RV.shape[-1])
        return sampler.propose(logits_RV, self._target_ids, at.batch_R, at.node_R, at.depth_R, sharpness, k)


def grow(rows: Sequence[Row], forest: Forest, state: DeviceState, expand: Expand) -> Tensor | None:
    """Expands level by level; children become tokens behind the root, where the next level reads them."""
    if not forest.levels:
        return None
    device = state.length_S.device
    slots_B = to_device([row.request.slot for row in rows], device)
    nodes = max(len(tree.parents) for tree in forest.trees)
    ranked_BNK = torch.full((len(rows), nodes, MAX_RANKS), -1, device=device)
    for depth, level in enumerate(forest.levels):
        ranked_RK = expand(depth, level)
        ranked_BNK[level.batch_R, level.node_R, : ranked_RK.shape[1]] = ranked_RK
        slot_C = slots_B[level.child_batch_C]
        parent_C = level.node_R[level.child_source_C]
        token_C = ranked_BNK[level.child_batch_C, parent_C, level.child_rank_C]
        # A node for which nothing was proposed holds some token all the same: it is right only if the target agrees.
        state.tokens_SP[slot_C, state.length_S[slot_C] + level.child_node_C] = token_C.clamp(min=0)
    return ranked_BNK
