"""Acceptance of drafted nodes along the target's choices, and the ranks of those choices in the draft's ordering.

All results stay on the device; the host reads `Outcome` one step later.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_kernels.verify.op import Accepted, walk
from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.sampling.trees import Forest


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one step for a batch, with D = depth + 1.

    ``emitted_BD`` holds the accepted tokens and the bonus token after them, padded with -1. ``count_B`` is the number
    of accepted nodes, and ``path_BD`` their indices, padded with -1. ``rank_BD`` is the rank, in the draft's ordering,
    of the target's token after the i-th node of the accepted path (the root first): 0 to 7, 8 for a miss, -1 where the
    draft ranked nothing.
    """

    emitted_BD: Tensor
    count_B: Tensor
    path_BD: Tensor
    rank_BD: Tensor

    def columns(self) -> Tensor:
        """Return emitted tokens, path, ranks and count side by side, so that one copy brings them to the host."""
        return torch.cat((self.emitted_BD, self.path_BD, self.rank_BD, self.count_B[:, None]), dim=1)


def accept(
    forest: Forest,
    tokens_BN: Tensor,
    chosen_BN: Tensor,
    ranked_BNK: Tensor | None,
    depth_limit_B: Tensor | None = None,
) -> Outcome:
    """Walk each tree along ``chosen_BN``, the target's choice after each node.

    ``tokens_BN`` are the tokens of the verified nodes. The other arguments are those of `outcome`.
    """
    accepted = walk(forest.parents_BN, tokens_BN, chosen_BN, forest.depth)
    return outcome(accepted, chosen_BN.gather(1, nodes_of(accepted.path_BD)), ranked_BNK, depth_limit_B)


def outcome(
    accepted: Accepted, emitted_BD: Tensor, ranked_BNK: Tensor | None, depth_limit_B: Tensor | None = None
) -> Outcome:
    """Build the result of a step from the accepted path.

    Args:
        accepted: Accepted path of each sequence.
        emitted_BD: Token after each node of the accepted path, the root first. Entries after the bonus token are
            ignored.
        ranked_BNK: The draft's K best tokens after each node, -1 where there are none; None if nothing was ranked.
        depth_limit_B: Largest number of nodes to accept, a synthetic limit. The token after a cut is still emitted, but
            its node is not accepted, and it counts as a miss at any rank.
    """
    path_BD, count_B = accepted.path_BD, accepted.count_B
    step_D = torch.arange(emitted_BD.shape[1], device=emitted_BD.device)
    cut_B = torch.zeros_like(count_B, dtype=torch.bool)
    if depth_limit_B is not None:
        cut_B = count_B >= depth_limit_B
        count_B = torch.minimum(count_B, depth_limit_B)
        path_BD = torch.where(step_D[:-1] < count_B[:, None], path_BD, -1)
    on_path = step_D <= count_B[:, None]
    emitted_BD = torch.where(on_path, emitted_BD, -1)
    rank_BD = torch.full_like(emitted_BD, -1)
    if ranked_BNK is not None:
        rank_BD = torch.where(on_path, _ranks(ranked_BNK, nodes_of(path_BD), emitted_BD), -1)
        missed = cut_B[:, None] & (step_D == count_B[:, None]) & (rank_BD >= 0)
        rank_BD = torch.where(missed, MAX_RANKS, rank_BD)
    return Outcome(emitted_BD, count_B, path_BD, rank_BD)


def nodes_of(path_BD: Tensor) -> Tensor:
    """Return the root and the nodes of the path [B, D + 1], padded with the root."""
    return torch.nn.functional.pad(path_BD.clamp(min=0), (1, 0))


def _ranks(ranked_BNK: Tensor, nodes_BD: Tensor, emitted_BD: Tensor) -> Tensor:
    """Return the rank [B, D] of each emitted token in the draft's ordering: MAX_RANKS for a miss, -1 if not ranked."""
    ranked_BDK = ranked_BNK.gather(1, nodes_BD[..., None].expand(-1, -1, ranked_BNK.shape[-1]))
    hit_BDK = ranked_BDK == emitted_BD[..., None]
    rank_BD = torch.where(hit_BDK.any(-1), hit_BDK.int().argmax(-1), MAX_RANKS)
    return torch.where(ranked_BDK[..., 0] >= 0, rank_BD, -1)
