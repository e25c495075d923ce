"""Proposals of several drafts in one step: each for rows of its own, or merged in the trees of the same rows.

The drafts take turns level by level. Behind every node the candidates of all drafts of its row are put into one order,
equal tokens once, and the children of the node take the first of them. All drafts read these tokens at the next level,
so a draft continues paths that another one proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.engine.batch import Row
from specdecode_worker.engine.drafts.drafter import Drafter, no_ranks, write_children
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.speculation.merge_order import Candidate
from specdecode_worker.speculation.sampling.sampler import Sampler
from specdecode_worker.speculation.trees import Forest


@dataclass(frozen=True, slots=True)
class Part:
    """Draft of a step, and the trees that it proposes for: PLAIN for rows that it does not draft."""

    name: str
    drafter: Drafter
    forest: Forest


def propose_together(
    rows: Sequence[Row],
    forest: Forest,
    parts: Sequence[Part],
    orders: Sequence[Sequence[Candidate]],
    state: DeviceState,
    sampler: Sampler,
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
    order_BM = _order_table(orders, len(parts), device)
    ranked_BNK = no_ranks(forest, device)
    for depth, level in enumerate(forest.levels):
        for f, (part, expand) in enumerate(zip(parts, expands, strict=True)):
            if expand is None or depth >= len(part.forest.levels):
                continue
            mine = part.forest.levels[depth]
            ranked_RK = expand(depth, mine)
            own_FBNK[f, mine.batch_R, mine.node_R, : ranked_RK.shape[1]] = ranked_RK
        own_RFK = own_FBNK[:, level.batch_R, level.node_R].transpose(0, 1)
        candidates_RM = own_RFK.flatten(1).gather(1, order_BM[level.batch_R])
        ranked_BNK[level.batch_R, level.node_R] = first_distinct(candidates_RM, MAX_RANKS)
        write_children(ranked_BNK, level, slots_B, state)
    return ranked_BNK, own_FBNK


def first_distinct(tokens_RM: Tensor, count: int) -> Tensor:
    """Return the first ``count`` distinct tokens of each row, [R, count]. -1 is no token, and pads the result."""
    repeated_RM = (tokens_RM[:, :, None] == tokens_RM[:, None, :]).tril(-1).any(-1)
    dropped_RM = repeated_RM | (tokens_RM < 0)
    first_RK = dropped_RM.to(torch.int8).argsort(dim=1, stable=True)[:, :count]
    return torch.where(dropped_RM.gather(1, first_RK), -1, tokens_RM.gather(1, first_RK))


def _order_table(orders: Sequence[Sequence[Candidate]], drafts: int, device: torch.device) -> Tensor:
    """Return the candidates of each row as indices of [drafts, MAX_RANKS], [B, drafts * MAX_RANKS].

    Drafts that are not in the order of a row follow; they propose nothing for it.
    """
    table = []
    for order in orders:
        listed = [draft * MAX_RANKS + rank for draft, rank in order]
        rest = set(range(drafts * MAX_RANKS)).difference(listed)
        table.append([*listed, *sorted(rest)])
    return to_device(table, device, dtype=torch.int64)
