"""Reference implementation of the bookkeeping of a decode step in plain PyTorch. Tables and suffixes: tables.py."""

from __future__ import annotations

import torch
from torch import Tensor

from specdecode_kernels.step_tables.tables import Committed, PackedRows, SamplingTables, SlotState, StepRows, Verified
from specdecode_kernels.verify.reference import walk


def begin(state: SlotState, slots_B1: Tensor, live_B1: Tensor) -> StepRows:
    """Return the rows of a step. ``live_B1`` is 1 for requests and 0 for padding."""
    return StepRows(slots_B1, state.length_S[slots_B1] * live_B1, state.block_table_SM[slots_B1])


def pack(
    state: SlotState,
    rows: StepRows,
    sampling: SamplingTables,
    sequence_T: Tensor,
    offset_T: Tensor,
    depth_T: Tensor | None,
    last_position: int,
) -> PackedRows:
    """Return the packed rows at ``offset_T`` from the roots of their sequences.

    Args:
        state: State of all slots.
        rows: Rows of the step.
        sampling: Sampling parameters of the rows.
        sequence_T: Row of the step that each packed row belongs to.
        offset_T: Index of each packed row relative to the root.
        depth_T: Position of each packed row relative to the root; None if it is ``offset_T``.
        last_position: Later positions are clamped to it.
    """
    root_T, slots_T = rows.roots_B1[sequence_T], rows.slots_B1[sequence_T]
    index_T = root_T + offset_T
    position_T = index_T if depth_T is None else root_T + depth_T
    block_T = rows.blocks_B1M[sequence_T, index_T // state.page]
    return PackedRows(
        tokens_T=state.tokens_SP[slots_T, index_T],
        positions_T=position_T.clamp(max=last_position),
        places_T=block_T * state.page + index_T % state.page,
        slots_T=slots_T,
        index_T=index_T,
        next_T=position_T + 1,
        temperature_T=sampling.temperature_B1[sequence_T],
        seed_T=sampling.seed_B1[sequence_T],
        truncation=None if sampling.truncation is None else sampling.truncation.of(sequence_T),
    )


def write_children(
    state: SlotState,
    rows: StepRows,
    ranked_RK: Tensor,
    sequence_R: Tensor,
    node_R: Tensor,
    depth: int,
    trees: tuple[Tensor, Tensor, Tensor],
    ranked_BNK: Tensor,
) -> None:
    """Write the proposals behind the nodes of ``depth`` to ``ranked_BNK``, and the tokens of their children.

    A child j of a sequence is stored at index root + j of its tokens. Missing proposals (-1) become token 0.

    Args:
        state: State of all slots; its tokens are written.
        rows: Rows of the step.
        ranked_RK: Proposals behind the nodes, best first.
        sequence_R: Sequence of each node; B is padding.
        node_R: The nodes, all of the same depth.
        depth: That depth.
        trees: Parent, rank and depth of all nodes of the trees, each [B, N].
        ranked_BNK: Receives the proposals.
    """
    parent_BN, rank_BN, depth_BN = trees
    real_R = sequence_R < len(ranked_BNK)
    padded = torch.cat((ranked_BNK, torch.full_like(ranked_BNK[:1], -1)))
    padded[sequence_R, node_R, : ranked_RK.shape[1]] = torch.where(real_R[:, None], ranked_RK, -1)
    ranked_BNK.copy_(padded[:-1])
    batch_B1 = torch.arange(len(ranked_BNK), device=ranked_RK.device)[:, None]
    token_BN = ranked_BNK[batch_B1, parent_BN.clamp(min=0), rank_BN].clamp(min=0)
    index_BN = rows.roots_B1[:-1, None] + torch.arange(parent_BN.shape[1], device=ranked_RK.device)
    # Nodes of other depths are written to the last column, which nothing reads.
    index_BN = torch.where(depth_BN == depth + 1, index_BN, state.tokens_SP.shape[1] - 1)
    state.tokens_SP[rows.slots_B1[:-1, None], index_BN] = token_BN


def commit(
    state: SlotState,
    rows: StepRows,
    trees: Verified,
    ranked_BNK: Tensor | None,
    depth_limit_B: Tensor,
    depth: int,
) -> Committed:
    """Accept nodes along the chosen tokens and commit the emitted tokens and new lengths to ``state``.

    Args:
        state: State of all slots.
        rows: Rows of the step.
        trees: Verified trees.
        ranked_BNK: Proposals behind each node, -1 where there are none; None if there are no draft passes.
        depth_limit_B: Maximum number of nodes to accept. The token after a cut is emitted and counts as a miss.
        depth: Maximum depth D of the trees.
    """
    parents_BN, device = trees.parents_BN, trees.parents_BN.device
    (tokens_BN, chosen_BN), step_D = _by_node(trees), torch.arange(depth + 1, device=device)
    accepted = walk(parents_BN, tokens_BN, chosen_BN, depth)
    count_B = torch.minimum(accepted.count_B, depth_limit_B)
    path_BD = torch.where(step_D[:-1] < count_B[:, None], accepted.path_BD, -1)
    nodes_BD = torch.nn.functional.pad(path_BD.clamp(min=0), (1, 0))
    on_path = step_D <= count_B[:, None]
    emitted_BD = torch.where(on_path, chosen_BN.gather(1, nodes_BD), -1)
    rank_BD = torch.full_like(emitted_BD, -1)
    if ranked_BNK is not None:
        ranked_BDK = ranked_BNK.gather(1, nodes_BD[..., None].expand(-1, -1, ranked_BNK.shape[-1]))
        hit_BDK = ranked_BDK == emitted_BD[..., None]
        miss = ranked_BNK.shape[-1]
        rank_BD = torch.where(hit_BDK.any(-1), hit_BDK.int().argmax(-1), miss)
        cut = (accepted.count_B >= depth_limit_B)[:, None] & (step_D == count_B[:, None])
        rank_BD = torch.where(on_path & (ranked_BDK[..., 0] >= 0), torch.where(cut, miss, rank_BD), -1)
    roots_B, slots_B = rows.roots_B1[:-1], rows.slots_B1[:-1]
    place_BD = torch.where(emitted_BD >= 0, roots_B[:, None] + 1 + step_D, state.tokens_SP.shape[1] - 1)
    state.tokens_SP[slots_B[:, None], place_BD] = emitted_BD
    state.length_S[slots_B] = roots_B + 1 + count_B
    out = torch.cat((emitted_BD, path_BD, rank_BD, count_B[:, None]), dim=1)
    if not depth:
        return Committed(out, path_BD, path_BD)
    moves = path_BD > 0
    source_BD = _places(state, rows, roots_B[:, None] + path_BD.clamp(min=0))
    target_BD = _places(state, rows, (roots_B[:, None] + 1 + step_D[:-1]).expand_as(path_BD))
    return Committed(out, torch.where(moves, source_BD, 0), torch.where(moves, target_BD, 0))


def store_states(
    rows: StepRows,
    query_start: Tensor,
    out: Tensor,
    depth: int,
    aux_TA: Tensor,
    ring_SRA: Tensor,
    block_aux_NA: Tensor | None,
    page: int,
) -> None:
    """Store the states of each root and its accepted nodes in the ring, and of those that end a block by block.

    The ring has a column more than positions; the last one absorbs padding, as block 0 does.
    """
    path_BD, ring = out[:, depth + 1 : 2 * depth + 1], ring_SRA.shape[1] - 1
    counts_B = query_start[1:] - query_start[:-1]
    nodes_BD = torch.nn.functional.pad(path_BD, (1, 0))
    nodes_BD = torch.where(counts_B[:, None] > 0, nodes_BD, -1)
    position_BD = rows.roots_B1[:-1, None] + torch.arange(depth + 1, device=out.device)
    stored = nodes_BD >= 0
    row_BD = torch.where(stored, query_start[:-1, None] + nodes_BD, 0)
    ring_SRA[rows.slots_B1[:-1, None], torch.where(stored, position_BD % ring, ring)] = aux_TA[row_BD]
    if block_aux_NA is not None:
        ends = stored & (position_BD % page == page - 1)
        batch_B1 = torch.arange(len(out), device=out.device)[:, None]
        block_BD = torch.where(ends, rows.blocks_B1M[batch_B1, position_BD // page], 0)
        block_aux_NA[block_BD] = aux_TA[row_BD]


def _by_node(trees: Verified) -> tuple[Tensor, Tensor]:
    """Return the tokens and the chosen tokens of packed rows by node, [B, N], padded with -2 and -1."""
    starts, nodes = trees.query_start, trees.parents_BN.shape[1]
    node_N = torch.arange(nodes, device=starts.device)
    real_BN = node_N < (starts[1:] - starts[:-1])[:, None]
    row_BN = torch.where(real_BN, starts[:-1, None] + node_N, 0)
    return torch.where(real_BN, trees.tokens_T[row_BN], -2), torch.where(real_BN, trees.chosen_T[row_BN], -1)


def _places(state: SlotState, rows: StepRows, index_BD: Tensor) -> Tensor:
    """Return the cache slots of the indices of each sequence."""
    batch_B1 = torch.arange(len(index_BD), device=index_BD.device)[:, None]
    return rows.blocks_B1M[batch_B1, index_BD // state.page] * state.page + index_BD % state.page
