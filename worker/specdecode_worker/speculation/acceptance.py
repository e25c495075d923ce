"""Which drafted nodes stay: the walk along the target's own choices, and what it teaches about the draft.

Everything stays on the device; the host reads `Outcome` a step later.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_kernels.verify.op import Accepted, walk
from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.speculation.trees import Forest


@dataclass(frozen=True, slots=True)
class Outcome:
    """``emitted_BD``: the accepted tokens and the bonus behind them, D = depth + 1, then padding; ``count_B`` accepted
    nodes, whose path is ``path_BD`` (-1 padded). ``rank_BD``: where the target's token behind the i-th node of the
    accepted path (the root first) stood in the draft's ordering: 0-7, 8 for a miss, -1 where nothing was ranked."""

    emitted_BD: Tensor
    count_B: Tensor
    path_BD: Tensor
    rank_BD: Tensor


def accept(
    forest: Forest,
    tokens_BN: Tensor,
    chosen_BN: Tensor,
    ranked_BNK: Tensor | None,
    kept_depth_B: Tensor | None = None,
) -> Outcome:
    """The walk along ``chosen_BN``, the target's choice behind each node; ``tokens_BN`` are the verified nodes' tokens.
    The rest is as in ``outcome``."""
    found = walk(forest.parents_BN, tokens_BN, chosen_BN, forest.depth)
    return outcome(found, chosen_BN.gather(1, nodes_of(found.path_BD)), ranked_BNK, kept_depth_B)


def outcome(
    found: Accepted, emitted_BD: Tensor, ranked_BNK: Tensor | None, kept_depth_B: Tensor | None = None
) -> Outcome:
    """``emitted_BD`` holds the token behind every node of the accepted path, the root first; what stands behind the
    bonus is not read. ``kept_depth_B`` (a synthetic knob) cuts accepted paths short: the token behind a cut comes out
    all the same, only its node is not kept, and it is a miss wherever it was ranked."""
    path_BD, count_B = found.path_BD, found.count_B
    step_D = torch.arange(emitted_BD.shape[1], device=emitted_BD.device)
    cut_B = torch.zeros_like(count_B, dtype=torch.bool)
    if kept_depth_B is not None:
        cut_B = count_B >= kept_depth_B
        count_B = torch.minimum(count_B, kept_depth_B)
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
    """The root and the path's nodes; the root again as padding."""
    return torch.nn.functional.pad(path_BD.clamp(min=0), (1, 0))


def _ranks(ranked_BNK: Tensor, nodes_BD: Tensor, emitted_BD: Tensor) -> Tensor:
    ranked_BDK = ranked_BNK.gather(1, nodes_BD[..., None].expand(-1, -1, ranked_BNK.shape[-1]))
    hit_BDK = ranked_BDK == emitted_BD[..., None]
    rank_BD = torch.where(hit_BDK.any(-1), hit_BDK.int().argmax(-1), MAX_RANKS)
    return torch.where(ranked_BDK[..., 0] >= 0, rank_BD, -1)
