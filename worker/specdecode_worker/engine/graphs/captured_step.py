"""One decode step that can be captured in a CUDA graph: draft, verify, accept and commit over fixed-size tables.

The graph key alone determines the size of every tensor. The step is equivalent to the eager path of the step launcher
and the drafters for decoding rows. No call here may wait for the device, read a device value on the host, or make a
size depend on a device value; tests/unit/worker/engine/graphs/test_capturable.py checks this.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.engine.drafts.drafter import PagedDrafter
from specdecode_worker.engine.graphs import row_tables, tree_tables
from specdecode_worker.engine.graphs.graph_key import NODES, GraphKey
from specdecode_worker.engine.graphs.graph_sampling import TableSampler
from specdecode_worker.engine.graphs.static_inputs import Layout, StagedTensor
from specdecode_worker.engine.kv_cache.kv_commit import Roots, commit_paths
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.engine.step.packed_batch import PackedTensors, slots_of
from specdecode_worker.engine.step.target_pass import Target
from specdecode_worker.models.configs.target_states import TargetStates
from specdecode_worker.speculation.acceptance import Outcome
from specdecode_worker.speculation.sampling.row_selection import Nodes
from specdecode_worker.speculation.trees import Forest


@dataclass(frozen=True, slots=True)
class StepParts:
    """Models and device state that a captured step uses. ``drafter`` is None for a step without draft passes."""

    target: Target
    drafter: PagedDrafter | None
    state: DeviceState
    reads: TargetStates


@dataclass(frozen=True, slots=True)
class RowState:
    """Slot, root index and block table of every row, [B + 1]. Row B is padding; the root index of padding is 0."""

    slots_B1: Tensor
    roots_B1: Tensor
    blocks_B1M: Tensor


class CapturedStep:
    """Decode step of one graph key, with the static tensors that it reads and writes.

    The host writes the integer tables (`tree_tables.topology`, then `row_tables.rows_of`, laid out by ``row_layout``)
    to ``int_inputs`` and the float tables (`row_tables.floats_of`, laid out by ``floats``) to ``float_inputs``.

    ``out`` [B, 3 D + 3], with D draft passes, holds the columns of an Outcome side by side: emitted tokens (D + 1),
    path (D), ranks (D + 1) and the number of accepted nodes (1). ``ranked_BNK`` holds the ranked draft tokens behind
    each node as `Drafter.propose` returns them; it is None for a key without draft passes.
    """

    def __init__(self, key: GraphKey, parts: StepParts) -> None:
        device = parts.state.length_S.device
        trees, row_layout, floats = (
            Layout(tree_tables.shapes(key)),
            Layout(row_tables.shapes(key)),
            Layout(row_tables.float_shapes(key)),
        )
        self.key, self.row_layout, self.floats, self._parts = key, row_layout, floats, parts
        self.int_inputs = StagedTensor(trees.size + row_layout.size, torch.int64, device)
        self.float_inputs = StagedTensor(floats.size, torch.float32, device)
        parts_of_flat = torch.split(self.int_inputs.device_copy, [trees.size, row_layout.size])
        self._at = trees.views(parts_of_flat[0]) | row_layout.views(parts_of_flat[1])
        self._at |= floats.views(self.float_inputs.device_copy)
        self.out = torch.zeros(key.rows, 3 * key.passes + 3, dtype=torch.int64, device=device)
        shape = (key.rows, NODES, MAX_RANKS)
        self.ranked_BNK = torch.full(shape, -1, device=device) if key.passes else None

    def run(self) -> None:
        """Queue the step that the static tables describe, and write its results to ``out`` and ``ranked_BNK``."""
        at, state = self._at, self._parts.state
        slots_B1 = at["slot"]
        # Every step overwrites the length of the padding slot, so the root index of padding rows is forced to 0.
        row_state = RowState(slots_B1, state.length_S[slots_B1] * at["live"], state.block_table_SM[slots_B1])
        sampler = TableSampler(
            at["temperature"],
            at["seed"],
            row_state.roots_B1,
            (at["top_k"], at["top_p"], at["min_p"]) if self.key.cuts else None,
            self._parts.target.vocab_size,
        )
        ranked_BNK = self._draft(row_state, sampler) if self.key.passes else None
        packed = self._verified(row_state)
        logits_TV, aux_TA = self._parts.target.forward_tables(packed, self._parts.reads)
        outcome = self._accepted(sampler, packed, logits_TV, ranked_BNK)
        self._commit(row_state, packed, outcome, aux_TA)
        results = (outcome.emitted_BD, outcome.path_BD, outcome.rank_BD, outcome.count_B[:, None])
        self.out.copy_(torch.cat(results, dim=1))

    def _draft(self, row_state: RowState, sampler: TableSampler) -> Tensor:
        at, drafter, ranked_BNK = self._at, self._parts.drafter, self.ranked_BNK
        assert drafter is not None, "a key with passes has a draft"
        assert ranked_BNK is not None, "a key with passes has ranks"
        hidden_RE = self._root_states(drafter, row_state)[at["catch_last"]]
        ranked_B1NK = torch.full((self.key.rows + 1, *ranked_BNK.shape[1:]), -1, device=ranked_BNK.device)
        nodes = Nodes(at["first_sequence"], torch.zeros_like(at["first_sequence"]), torch.zeros_like(at["root_row"]))
        for depth in range(self.key.passes):
            if depth:
                hidden_RE, nodes = self._level(drafter, row_state, depth, hidden_RE)
            ranked_RK = drafter.rank(hidden_RE, nodes, depth, sampler)
            ranked_B1NK[nodes.batch_R, nodes.node_R, : ranked_RK.shape[1]] = ranked_RK
            self._write_children(row_state, depth, ranked_B1NK)
        return ranked_BNK.copy_(ranked_B1NK[: self.key.rows])

    def _root_states(self, drafter: PagedDrafter, row_state: RowState) -> Tensor:
        """Run the draft over the slots that earlier steps committed, and return its hidden states [T, E]."""
        at, sequence_T = self._at, self._at["catch_sequence"]
        first_B1 = row_state.roots_B1 + 1 - at["count"]
        index_T = first_B1[sequence_T] + at["catch_row"]
        slots_T = row_state.slots_B1[sequence_T]
        packed = PackedTensors(
            tokens_T=self._parts.state.tokens_SP[slots_T, index_T],
            positions_T=index_T.clamp(max=drafter.last_position),
            slots_T=slots_of(row_state.blocks_B1M, sequence_T, index_T),
            query_start=at["catch_start"],
            prefix_len_B=first_B1[:-1],
            key_start_B=at["key_start"][:-1],
            ancestors_T=torch.zeros_like(index_T),
            block_table_BM=row_state.blocks_B1M[:-1],
        )
        return drafter.root_states(slots_T, index_T, packed)

    def _level(self, drafter: PagedDrafter, row_state: RowState, depth: int, hidden_RE: Tensor) -> tuple[Tensor, Nodes]:
        """Run the draft pass over the nodes of one depth, starting from the hidden states of their parents.

        Returns:
            The hidden states [R, E] and the nodes that they belong to.
        """
        sequence_R, node_R, ancestors_R, source_R = (
            self._at[f"level_{name}"][depth - 1] for name in ("sequence", "node", "ancestors", "source")
        )
        root_R = row_state.roots_B1[sequence_R]
        packed = PackedTensors(
            tokens_T=self._parts.state.tokens_SP[row_state.slots_B1[sequence_R], root_R + node_R],
            positions_T=(root_R + depth).clamp(max=drafter.last_position),
            slots_T=slots_of(row_state.blocks_B1M, sequence_R, root_R + node_R),
            query_start=self._at["level_start"][depth - 1],
            prefix_len_B=row_state.roots_B1[:-1],
            key_start_B=self._at["key_start"][:-1],
            ancestors_T=ancestors_R,
            block_table_BM=row_state.blocks_B1M[:-1],
        )
        return drafter.node_states(hidden_RE[source_R], packed), Nodes(
            sequence_R, node_R, torch.full_like(node_R, depth)
        )

    def _write_children(self, row_state: RowState, depth: int, ranked_B1NK: Tensor) -> None:
        """Write the tokens proposed behind the nodes of ``depth`` to ``tokens_SP``, behind the roots.

        Columns that belong to other depths are written to the scratch position.
        """
        at, state = self._at, self._parts.state
        rows_B1 = torch.arange(self.key.rows, device=ranked_B1NK.device)[:, None]
        node_N = torch.arange(NODES, device=ranked_B1NK.device)
        token_BN = ranked_B1NK[rows_B1, at["node_parent"].clamp(min=0), at["node_rank"]].clamp(min=0)
        place_BN = torch.where(at["node_depth"] == depth + 1, row_state.roots_B1[:-1, None] + node_N, state.scratch)
        state.tokens_SP[row_state.slots_B1[:-1, None], place_BN] = token_BN

    def _verified(self, row_state: RowState) -> PackedTensors:
        """Return the tables of the verification pass. Its tokens, the root included, are read from ``tokens_SP``."""
        at, sequence_T = self._at, self._at["token_sequence"]
        root_T = row_state.roots_B1[sequence_T]
        index_T = root_T + at["token_node"]
        return PackedTensors(
            tokens_T=self._parts.state.tokens_SP[row_state.slots_B1[sequence_T], index_T],
            positions_T=(root_T + at["token_depth"]).clamp(max=self._parts.target.last_position),
            slots_T=slots_of(row_state.blocks_B1M, sequence_T, index_T),
            query_start=at["query_start"],
            prefix_len_B=row_state.roots_B1[:-1],
            key_start_B=torch.zeros_like(row_state.roots_B1[:-1]),
            ancestors_T=at["token_ancestors"],
            block_table_BM=row_state.blocks_B1M[:-1],
        )

    def _accepted(
        self, sampler: TableSampler, packed: PackedTensors, logits_TV: Tensor, ranked_BNK: Tensor | None
    ) -> Outcome:
        at, parents_BN = self._at, self._at["node_verified_parent"]
        where = at["token_sequence"], at["token_node"]
        tokens_B1N = torch.full((self.key.rows + 1, NODES), -2, dtype=torch.int64, device=parents_BN.device)
        tokens_B1N[where] = packed.tokens_T
        forest = Forest((), (), parents_BN, self.key.passes, all_chains=False)
        depth_limit_B = at["depth_limit"][:-1]
        return sampler.accept(forest, tokens_B1N[:-1], logits_TV, *where, at["token_depth"], ranked_BNK, depth_limit_B)

    def _commit(self, row_state: RowState, packed: PackedTensors, outcome: Outcome, aux_TA: Tensor | None) -> None:
        roots = Roots(row_state.slots_B1[:-1], packed.block_table_BM, row_state.roots_B1[:-1], self._at["root_row"])
        cache, plain = self._parts.target.cache, self.key.passes == 0
        commit_paths(self._parts.state, cache, roots, outcome, aux_TA, in_place=plain)
