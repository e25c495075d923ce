"""One decode step that can be captured in a CUDA graph: draft, verify, accept and commit over fixed-size tables.

The graph key alone determines the size of every tensor. A key can also be that of the draft passes alone, or of what
follows them. The step is equivalent to the eager path of the step launcher
and the drafters for decoding rows. No call here may wait for the device, read a device value on the host, or make a
size depend on a device value; tests/unit/worker/engine/graphs/test_capturable.py checks this.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_kernels.step_tables.op import begin, commit, pack, store_states, write_children
from specdecode_kernels.step_tables.tables import PackedRows, SamplingTables, SlotState, StepRows, Verified
from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.engine.drafts.drafter import PagedDrafter
from specdecode_worker.engine.graphs.adjustment import AdjustedSampler, Adjustment, PassNodes
from specdecode_worker.engine.graphs.feature_tables import HostMasks
from specdecode_worker.engine.graphs.graph_key import NODES, GraphKey
from specdecode_worker.engine.graphs.graph_logprobs import LogprobOutputs
from specdecode_worker.engine.graphs.graph_multi_round import GraphRounds
from specdecode_worker.engine.graphs.graph_sampling import PackedSampler
from specdecode_worker.engine.graphs.step_inputs import StepInputs
from specdecode_worker.engine.kv_cache.block_pool import BLOCK_SIZE
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.engine.step.packed_batch import PackedTensors
from specdecode_worker.engine.step.target_pass import Target
from specdecode_worker.models.configs.target_states import TargetStates
from specdecode_worker.speculation.sampling.row_selection import Nodes
from specdecode_worker.speculation.sampling.sampler import Proposer


@dataclass(frozen=True, slots=True)
class StepParts:
    """Models and device state that a captured step uses.

    ``drafter`` is None for a step without draft passes, ``mask_table_NW`` for one without grammars.
    """

    target: Target
    drafter: PagedDrafter | None
    state: DeviceState
    reads: TargetStates
    mask_table_NW: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Proposals:
    """Results of what runs before a graph that only verifies.

    ``ranked_BNK`` is as `Drafter.propose` returns it. ``masks`` are the grammar masks of the packed tokens.
    """

    ranked_BNK: Tensor | None = None
    masks: HostMasks | None = None


class CapturedStep:
    """Decode step of one graph key, with the static tensors that it reads and writes.

    The host writes ``inputs`` before each run.

    ``out`` [B, 3 D + 3], with trees of depth D, holds the columns of an Outcome side by side: emitted tokens (D + 1),
    path (D), ranks (D + 1) and the number of accepted nodes (1). ``ranked_BNK`` holds the ranked draft tokens behind
    each node as `Drafter.propose` returns them; it is None for a key without trees. Draft passes of the step write it;
    without such passes the host writes it before the step, and the tokens of the nodes are in the state.
    """

    def __init__(self, key: GraphKey, parts: StepParts) -> None:
        assert not (key.passes and key.outside), "a graph with draft passes drafts all trees"
        device = parts.state.length_S.device
        self.key, self._parts = key, parts
        self.inputs = StepInputs(key, parts.state.padding_slot, device)
        self._at = self.inputs.at
        self.out = torch.zeros(key.rows, 3 * key.depth + 3, dtype=torch.int64, device=device)
        shape = (key.rows, NODES, MAX_RANKS)
        self.ranked_BNK = torch.full(shape, -1, device=device) if key.depth else None
        vocab_size = parts.target.vocab_size
        self.logprobs = LogprobOutputs(key, vocab_size, parts.state.dtype, device) if key.features.logprobs else None
        # Constants of the key: no pass starts after the first key, root rows have node and depth 0.
        most = max(key.tokens, key.level_rows, key.rows)
        self._zeros = torch.zeros(most, dtype=torch.int64, device=device)
        self._depths = torch.arange(key.passes + 1, device=device)[:, None].expand(-1, most).contiguous()
        self._slots = SlotState(parts.state.tokens_SP, parts.state.length_S, parts.state.block_table_SM, BLOCK_SIZE)
        cuts = (self._at["top_k"], self._at["top_p"], self._at["min_p"]) if key.cuts else None
        self._sampling = SamplingTables(self._at["temperature"], self._at["seed"], cuts)

    def store_ranks(self, ranked_BNK: Tensor | None) -> None:
        """Queue the copy of ranked draft tokens to the static tensor of a step that drafts nothing itself."""
        assert self.ranked_BNK is not None, "a step with trees has ranks"
        self.ranked_BNK.fill_(-1)
        if ranked_BNK is not None:
            rows, nodes = ranked_BNK.shape[:2]
            self.ranked_BNK[:rows, :nodes].copy_(ranked_BNK)

    def run(self) -> None:
        """Queue the step that the static tables describe, and write its results to the output tensors."""
        at, key = self._at, self.key
        # Every step overwrites the length of the padding slot, so the root index of padding rows is forced to 0.
        rows = begin(self._slots, at["slot"], at["live"])
        adjustment = None
        if key.features.change_logits:
            vocab_size, masks_NW = self._parts.target.vocab_size, self._parts.mask_table_NW
            adjustment = Adjustment(key.features, at, self._slots, rows, masks_NW, vocab_size)
        rounds = None
        if key.features.rounds:
            rounds = GraphRounds(key, at, rows, adjustment, self._parts.target.vocab_size)
        if key.passes:
            self._draft(rows, adjustment, rounds)
        if key.only_drafts:
            return
        packed = self._verified(rows)
        tables = self._tables(
            rows, packed, at["query_start"], rows.roots_B1[:-1], at["token_ancestors"], self._zeros[: key.rows]
        )
        logits_TV, aux_TA = self._parts.target.forward_tables(tables, rows.slots_B1[:-1], self._parts.reads)
        nodes = PassNodes(at["token_sequence"], at["token_ancestors"], at.get("mask_row"))
        if rounds is None:
            tokens_T, chosen_T = packed.tokens_T, self._sampler(packed, nodes, adjustment).choose(logits_TV)
        else:
            tokens_T, chosen_T = rounds.accept(packed, nodes, logits_TV)
        self._commit(rows, tokens_T, chosen_T, aux_TA)
        if self.logprobs is not None:
            self.logprobs.write(logits_TV, at["query_start"], self.out)

    def _draft(self, rows: StepRows, adjustment: Adjustment | None, rounds: GraphRounds | None) -> None:
        """Run the draft passes. They write proposals to ``ranked_BNK`` and the tokens of nodes behind the roots."""
        at, drafter, ranked_BNK = self._at, self._parts.drafter, self.ranked_BNK
        assert drafter is not None, "a key with passes has a draft"
        assert ranked_BNK is not None, "a key with passes has ranks"
        ranked_BNK.fill_(-1)
        trees = at["node_parent"], at["node_rank"], at["node_depth"]
        hidden_RE = self._root_states(drafter, rows)[at["catch_last"]]
        zeros_B = self._zeros[: self.key.rows]
        nodes, ancestors_R = Nodes(at["first_sequence"], zeros_B, zeros_B), None
        packed = self._pack(rows, nodes.batch_R, nodes.node_R, nodes.depth_R, drafter.last_position)
        for depth in range(self.key.passes):
            if depth:
                nodes, ancestors_R = self._nodes(depth), at["level_ancestors"][depth - 1]
                packed = self._pack(rows, nodes.batch_R, nodes.node_R, nodes.depth_R, drafter.last_position)
                hidden_RE = self._level(drafter, rows, packed, depth, hidden_RE)
            # The masks of the roots are known; those of deeper nodes depend on the tokens that are drafted here.
            masks_R = at["mask_row"][at["root_row"]] if self.key.features.masks and not depth else None
            at_pass = PassNodes(nodes.batch_R, ancestors_R, masks_R)
            sampler: Proposer = (
                self._sampler(packed, at_pass, adjustment) if rounds is None else rounds.sampler(packed, at_pass)
            )
            ranked_RK = drafter.rank(hidden_RE, nodes, depth, sampler)
            write_children(self._slots, rows, ranked_RK, nodes.batch_R, nodes.node_R, depth, trees, ranked_BNK)

    def _root_states(self, drafter: PagedDrafter, rows: StepRows) -> Tensor:
        """Run the draft over the slots that earlier steps committed, and return its hidden states [T, E]."""
        at = self._at
        packed = self._pack(rows, at["catch_sequence"], at["catch_offset"], None, drafter.last_position)
        first_B = rows.roots_B1[:-1] + at["catch_base"][:-1]
        causal_T = self._zeros[: self.key.tokens]
        tables = self._tables(rows, packed, at["catch_start"], first_B, causal_T, at["key_start"][:-1])
        return drafter.root_states(packed.slots_T, packed.index_T, tables)

    def _nodes(self, depth: int) -> Nodes:
        """Return the nodes of one level, [R]."""
        sequence_R, node_R = (self._at[f"level_{name}"][depth - 1] for name in ("sequence", "node"))
        return Nodes(sequence_R, node_R, self._depths[depth, : self.key.level_rows])

    def _level(
        self, drafter: PagedDrafter, rows: StepRows, packed: PackedRows, depth: int, hidden_RE: Tensor
    ) -> Tensor:
        """Run the draft pass over the nodes of one level; return their hidden states [R, E] from their parents'."""
        at = self._at
        start, ancestors_R, source_R = (at[f"level_{name}"][depth - 1] for name in ("start", "ancestors", "source"))
        tables = self._tables(rows, packed, start, rows.roots_B1[:-1], ancestors_R, at["key_start"][:-1])
        return drafter.node_states(hidden_RE[source_R], tables)

    def _verified(self, rows: StepRows) -> PackedRows:
        """Return the packed rows of the verification pass. Its tokens, the root included, are read from the state."""
        at, last_position = self._at, self._parts.target.last_position
        return self._pack(rows, at["token_sequence"], at["token_node"], at["token_depth"], last_position)

    def _pack(
        self, rows: StepRows, sequence_T: Tensor, offset_T: Tensor, depth_T: Tensor | None, last_position: int
    ) -> PackedRows:
        return pack(self._slots, rows, self._sampling, sequence_T, offset_T, depth_T, last_position)

    def _sampler(
        self, packed: PackedRows, nodes: PassNodes, adjustment: Adjustment | None
    ) -> PackedSampler | AdjustedSampler:
        vocab_size = self._parts.target.vocab_size
        if adjustment is None:
            return PackedSampler(packed, vocab_size)
        return AdjustedSampler(packed, nodes, adjustment, vocab_size)

    @staticmethod
    def _tables(
        rows: StepRows,
        packed: PackedRows,
        query_start: Tensor,
        prefix_len_B: Tensor,
        ancestors_T: Tensor,
        key_start_B: Tensor,
    ) -> PackedTensors:
        """Return the tables of a pass; fields as in `PackedTensors`."""
        return PackedTensors(
            tokens_T=packed.tokens_T,
            positions_T=packed.positions_T,
            slots_T=packed.places_T,
            query_start=query_start,
            prefix_len_B=prefix_len_B,
            key_start_B=key_start_B,
            ancestors_T=ancestors_T,
            block_table_BM=rows.blocks_B1M[:-1],
        )

    def _commit(self, rows: StepRows, tokens_T: Tensor, chosen_T: Tensor, aux_TA: Tensor | None) -> None:
        """Accept nodes along the chosen tokens, and commit tokens, lengths, keys and auxiliary states."""
        at, state, depth = self._at, self._parts.state, self.key.depth
        trees = Verified(at["query_start"], at["node_verified_parent"], tokens_T, chosen_T)
        done = commit(self._slots, rows, trees, self.ranked_BNK, at["depth_limit"][:-1], depth)
        if depth:
            self._parts.target.keep_tables(done.source_BD, done.target_BD)
        if aux_TA is not None:
            assert state.ring_SRA is not None, "the state has a ring if a draft reads states"
            store_states(
                rows, at["query_start"], done.out, depth, aux_TA, state.ring_SRA, state.block_aux_NA, BLOCK_SIZE
            )
        self.out.copy_(done.out)
