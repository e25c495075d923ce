"""Products of rows with the matrix of their expert in plain PyTorch (README.md).

Tensor suffixes: T rows, K inputs, N outputs, X experts, M tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specdecode_kernels.quantised_linear.reference import Quantised, dequantise

FEW_ROWS = 64
"""Most rows of a pass whose tiles have `FEW_TILE_ROWS` rows."""
FEW_TILE_ROWS, TILE_ROWS = 16, 64


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows of a pass by expert.

    ``order_T`` are the rows sorted by expert, and ``score_T`` the score of each row. ``tiles_M3`` holds, for each tile,
    its expert, and its first place and its end in ``order_T``; the expert of a tile that does not exist is -1.
    Matrices of all ``experts`` lie one above the other.
    """

    order_T: Tensor
    score_T: Tensor
    tiles_M3: Tensor
    tile_rows: int
    experts: int

    def outputs(self, matrices: Tensor | Quantised) -> int:
        """Return the rows of the matrix of one expert."""
        return (matrices.rows if isinstance(matrices, Quantised) else len(matrices)) // self.experts


def tile_rows(rows: int) -> int:
    """Return the rows of a tile of a pass."""
    return FEW_TILE_ROWS if rows <= FEW_ROWS else TILE_ROWS


def most_tiles(rows: int, experts: int) -> int:
    """Return the most tiles of a pass: each expert may have one that is not full."""
    return min(rows, experts + rows // tile_rows(rows))


def group(logits_TX: Tensor) -> Groups:
    """Group the rows of a pass by the expert with the largest logit."""
    rows, experts = logits_TX.shape
    top_T, expert_T = logits_TX.max(1)
    order_T = expert_T.argsort(stable=True)
    size, tiles, end = tile_rows(rows), [], 0
    for expert, count in enumerate(expert_T.bincount(minlength=experts).tolist()):
        tiles += [(expert, end + start, end + count) for start in range(0, count, size)]
        end += count
    tiles += [(-1, 0, 0)] * (most_tiles(rows, experts) - len(tiles))
    tiles_M3 = torch.tensor(tiles, dtype=torch.int32, device=logits_TX.device).view(-1, 3)
    return Groups(order_T.int(), top_T.float().sigmoid().to(logits_TX.dtype), tiles_M3, size, experts)


def grouped_linear(
    x_TK: Tensor,
    matrices: Tensor | Quantised,
    groups: Groups,
    *,
    scored: bool = False,
    gated: bool = False,
    residual_TN: Tensor | None = None,
) -> Tensor:
    """Return the product [T, N] of each row with the matrix of its expert ([T, N / 2] if gated)."""
    if scored:
        x_TK = x_TK * groups.score_T[:, None]
    wide = torch.promote_types(x_TK.dtype, torch.float32)
    weight_MK = dequantise(matrices, wide) if isinstance(matrices, Quantised) else matrices.to(wide)
    weight_XNK = weight_MK.view(groups.experts, -1, x_TK.shape[1])
    out_TN = x_TK.new_zeros(len(x_TK), weight_XNK.shape[1], dtype=wide)
    for expert, first, end in groups.tiles_M3.tolist():
        rows = groups.order_T[first : min(end, first + groups.tile_rows)].long()
        if expert >= 0:
            out_TN[rows] = F.linear(x_TK[rows].to(wide), weight_XNK[expert])
    if gated:
        gate_TN, up_TN = out_TN.chunk(2, dim=1)
        out_TN = F.silu(gate_TN) * up_TN
    if residual_TN is not None:
        out_TN = out_TN + residual_TN
    return out_TN.to(x_TK.dtype)
