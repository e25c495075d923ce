"""The verify step over tables of its rows: draft, verify, accept and commit, as a CUDA graph or as calls.

`CapturedStep` has static tables of the sizes of a graph key, `UncapturedStep` tables of the sizes of its rows. Both
choose tokens by the sampler of sampling/sampler.py, and accept and commit by the operations of
`specdecode_kernels.step_tables`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from specdecode_kernels.sample.reference import Truncation
from specdecode_kernels.step_tables.op import begin, commit, pack, store_states, write_children
from specdecode_kernels.step_tables.tables import PackedRows, SamplingTables, SlotState, StepRows, Verified
from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.core.device_state import DeviceState, PackedTensors, to_host
from specdecode_worker.core.kv_cache import BLOCK_SIZE
from specdecode_worker.core.request import Row
from specdecode_worker.drafts.base import CapturedDrafter
from specdecode_worker.drafts.registry import in_order
from specdecode_worker.engine.step_tables import NODES, GraphKey, StepInputs
from specdecode_worker.engine.target import (
    LEAST_TOP,
    ROWS_AT_ONCE,
    RowLogprobs,
    Target,
    TargetPass,
    logprobs_of,
    nodes_of,
    requested_logprobs,
)
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.sampling.sampler import (
    BatchTokens,
    PassSampler,
    SampledRows,
    StepSampler,
    TokenMasks,
    sampler_of,
    unpacked_on_device,
)
from specdecode_worker.sampling.trees import Nodes, forest_of

# Log-probabilities of the tokens that a captured step emits, in static tensors.


class LogprobOutputs:
    """Outputs of a step of D accepted tokens at most: rank and top tokens, and their log-probabilities."""

    def __init__(self, key: GraphKey, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._columns, self._rows = key.depth + 1, key.rows
        self._top = min(LEAST_TOP, vocab_size)
        count = key.rows * self._columns
        self.ints_TK = torch.zeros(count, 2 + self._top, dtype=torch.int64, device=device)
        self.floats_TK = torch.zeros(
            count, 1 + self._top, dtype=torch.promote_types(dtype, torch.float32), device=device
        )

    def write(self, logits_TV: Tensor, query_start: Tensor, out: Tensor) -> None:
        """Write the log-probabilities of the accepted path of every row and of the token behind it.

        Args:
            logits_TV: The target's logits of all packed rows.
            query_start: First packed row of each sequence, [B + 1].
            out: Result of the step, as `Committed.out`.
        """
        depth = self._columns - 1
        rows_T = (query_start[:-1, None] + nodes_of(out, depth)).flatten().clamp(max=len(logits_TV) - 1)
        tokens_T = out[:, : depth + 1].flatten().clamp(min=0)
        for start in range(0, len(rows_T), ROWS_AT_ONCE):
            here = slice(start, start + ROWS_AT_ONCE)
            logprob_T, rank_T, best_TK, logprobs_TK = logprobs_of(logits_TV[rows_T[here]], tokens_T[here], self._top)
            self.ints_TK[here].copy_(torch.cat((tokens_T[here, None], rank_T[:, None], best_TK), dim=1))
            self.floats_TK[here].copy_(torch.cat((logprob_T[:, None], logprobs_TK), dim=1))

    def queue_read(self, rows: Sequence[Row]) -> RowLogprobs | None:
        """Queue the copy of the rows that asked for log-probabilities to the host; None if none did."""
        if not (tops := requested_logprobs(rows)):
            return None
        asked_A = to_device(list(tops), self.ints_TK.device)
        ints, floats = (
            table_TK.view(self._rows, self._columns, -1)[asked_A].flatten(0, 1)
            for table_TK in (self.ints_TK, self.floats_TK)
        )
        (ints, floats), host_copy = to_host((ints, floats))
        columns = ints[:, 0], floats[:, 0], ints[:, 1], ints[:, 2:], floats[:, 1:]
        return RowLogprobs(tops, [self._columns] * len(tops), *columns, host_copy)


# One decode step that can be captured in a CUDA graph: draft, verify, accept and commit over fixed-size tables.
#
# The graph key alone determines the size of every tensor. A key can also be that of the draft passes alone, or of what
# follows them. No call here may wait for the device, read a device value on the host, or make a
# size depend on a device value; tests/unit/worker/engine/graphs/test_capturable.py checks this.


@dataclass(frozen=True, slots=True)
class StepParts:
    """Models and device state that a captured step uses.

    ``drafters`` have passes in the step. ``mask_table_NW`` is None for a step without grammars.
    """

    target: Target
    drafters: tuple[CapturedDrafter, ...]
    state: DeviceState
    reads: TargetStates
    mask_table_NW: Tensor | None = None


@dataclass(slots=True)
class _DraftRun:
    """Draft in a captured step, with its hidden states.

    ``hidden_TE`` are those at the slots of its first pass, ``states_B`` the slots of the first depth of every row, and
    ``hidden_RE`` those at the nodes of the last level.
    """

    index: int
    drafter: CapturedDrafter
    hidden_TE: Tensor
    states_B: Tensor
    hidden_RE: Tensor


class CapturedStep:
    """Decode step of one graph key, with the static tensors that it reads and writes.

    The host writes ``inputs`` before each run.

    ``out`` [B, 3 D + 3], with trees of depth D, is `Committed.out`: side by side the emitted tokens (D + 1),
    path (D), ranks (D + 1) and the number of accepted nodes (1). ``ranked_BNK`` holds the ranked draft tokens behind
    each node as `draft_trees` returns them; it is None for a key without trees. Draft passes of the step write it;
    without such passes the host writes it before the step, and the tokens of the nodes are in the state. ``own_FBNK``
    has those of each draft, with a row of padding, if there are several; else it is None.
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
        own = (len(key.drafts), key.rows + 1, NODES, MAX_RANKS)
        self.own_FBNK = torch.full(own, -1, device=device) if len(key.drafts) > 1 else None
        vocab_size = parts.target.vocab_size
        self.logprobs = LogprobOutputs(key, vocab_size, parts.state.dtype, device) if key.features.logprobs else None
        # Constants of the key: no pass starts after the first key, root rows have node and depth 0.
        most = max(key.most_tokens, key.level_rows, key.rows)
        self._zeros = torch.zeros(most, dtype=torch.int64, device=device)
        self._depths = torch.arange(key.passes + 1, device=device)[:, None].expand(-1, most).contiguous()
        self._slots = SlotState(parts.state.tokens_SP, parts.state.length_S, parts.state.block_table_SM, BLOCK_SIZE)
        cuts = Truncation(self._at["top_k"], self._at["top_p"], self._at["min_p"]) if key.cuts else None
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
        sampler = self._sampler(rows)
        if key.passes:
            self._draft(rows, sampler)
        if key.only_drafts:
            return
        packed = self._verified(rows)
        tables = self._tables(
            rows, packed, at["query_start"], rows.roots_B1[:-1], at["token_ancestors"], self._zeros[: key.rows]
        )
        logits_TV, aux_TA = self._parts.target.forward_tables(tables, rows.slots_B1[:-1], self._parts.reads)
        nodes = at["token_sequence"], at["token_node"], at["token_ancestors"]
        sampled = _sampled(packed, *nodes, at.get("mask_row"))
        parents_BN = at["node_verified_parent"][:, : key.tokens_per_row]
        tokens_T, chosen_T = sampler.verified(
            sampled, packed.tokens_T, logits_TV, at["query_start"], parents_BN, key.depth
        )
        self._commit(rows, tokens_T, chosen_T, aux_TA)
        if self.logprobs is not None:
            self.logprobs.write(logits_TV, at["query_start"], self.out)

    def _draft(self, rows: StepRows, sampler: StepSampler) -> None:
        """Run the draft passes. They write proposals to ``ranked_BNK`` and the tokens of nodes behind the roots."""
        at, ranked_BNK = self._at, self.ranked_BNK
        assert ranked_BNK is not None, "a key with passes has ranks"
        ranked_BNK.fill_(-1)
        if self.own_FBNK is not None:
            self.own_FBNK.fill_(-1)
        trees = at["node_parent"], at["node_rank"], at["node_depth"]
        runs = [self._first_pass(rows, index, drafter) for index, drafter in enumerate(self._parts.drafters)]
        zeros_B = self._zeros[: self.key.rows]
        nodes, ancestors_R = Nodes(at["first_sequence"], zeros_B, zeros_B), None
        for depth in range(self.key.passes):
            if depth:
                nodes, ancestors_R = self._nodes(depth), at["level_ancestors"][depth - 1]
            proposed = [self._proposed(rows, run, nodes, ancestors_R, depth, sampler) for run in runs]
            ranked_RK = proposed[0] if self.own_FBNK is None else self._in_order(proposed, nodes)
            write_children(self._slots, rows, ranked_RK, nodes.batch_R, nodes.node_R, depth, trees, ranked_BNK)

    def _first_pass(self, rows: StepRows, index: int, drafter: CapturedDrafter) -> _DraftRun:
        """Run a draft over the slots that earlier steps committed, and over its mask slots."""
        at, last_position = self._at, drafter.last_position
        packed = self._pack(rows, at["catch_sequence"][index], at["catch_offset"][index], None, last_position)
        if drafter.block:
            drafter.store_context(packed.slots_T, packed.index_T, packed.positions_T, packed.places_T)
            sequence_T = self._own(index, at["block_sequence"])
            packed = self._pack(rows, sequence_T, at["block_offset"], None, last_position)
            start, first_B, ancestors_T = at["block_start"], rows.roots_B1[:-1], at["block_ancestors"]
            states_B = (start[:-1] + 1).clamp(max=self.key.block_slots - 1)
        else:
            start, first_B = at["catch_start"][index], rows.roots_B1[:-1] + at["catch_base"][index, :-1]
            ancestors_T, states_B = self._zeros[: self.key.catch_up_slots], at["catch_last"][index]
        tables = self._tables(rows, packed, start, first_B, ancestors_T, at["key_start"][index, :-1])
        hidden_TE = drafter.root_states(packed.slots_T, packed.index_T, tables)
        return _DraftRun(index, drafter, hidden_TE, states_B, hidden_TE[states_B])

    def _own(self, index: int, sequence_T: Tensor) -> Tensor:
        """Return the sequences for which one of several drafts proposes; padding in place of the others."""
        if self.own_FBNK is None:
            return sequence_T
        return torch.where(self._at["proposes"][index][sequence_T] > 0, sequence_T, self.key.rows)

    def _proposed(
        self, rows: StepRows, run: _DraftRun, nodes: Nodes, ancestors_R: Tensor | None, depth: int, sampler: StepSampler
    ) -> Tensor:
        """Return what a draft proposes behind the nodes of one level, [R, K], best first."""
        at, drafter = self._at, run.drafter
        nodes = Nodes(self._own(run.index, nodes.batch_R), nodes.node_R, nodes.depth_R)
        packed = self._pack(rows, nodes.batch_R, nodes.node_R, nodes.depth_R, drafter.last_position)
        if depth and drafter.one_pass:
            state_R = run.states_B[nodes.batch_R.clamp(max=self.key.rows - 1)] + depth
            run.hidden_RE = run.hidden_TE[state_R.clamp(max=len(run.hidden_TE) - 1)]
        elif depth:
            run.hidden_RE = self._level(run, rows, packed, depth)
        # The masks of the roots are known; those of deeper nodes depend on the tokens that are drafted here.
        masks_R = at["mask_row"][at["root_row"]] if self.key.features.masks and not depth else None
        sampled = _sampled(packed, nodes.batch_R, nodes.node_R, ancestors_R, masks_R)
        return drafter.rank(run.hidden_RE, nodes, depth, PassSampler(sampler, sampled))

    def _in_order(self, proposed: Sequence[Tensor], nodes: Nodes) -> Tensor:
        """Store what each draft proposes behind the nodes of a level, and return it in the common order, [R, K]."""
        assert self.own_FBNK is not None, "several drafts have ranks of their own"
        own = []
        for index, (tokens_RK, own_BNK) in enumerate(zip(proposed, self.own_FBNK, strict=True)):
            padded_RK = torch.nn.functional.pad(tokens_RK, (0, MAX_RANKS - tokens_RK.shape[1]), value=-1)
            batch_R = self._own(index, nodes.batch_R)
            own.append(torch.where((batch_R < self.key.rows)[:, None], padded_RK, -1))
            own_BNK[batch_R, nodes.node_R] = own[-1]
        return in_order(torch.stack(own, dim=1), self._at["order"][nodes.batch_R])

    def _nodes(self, depth: int) -> Nodes:
        """Return the nodes of one level, [R]."""
        sequence_R, node_R = (self._at[f"level_{name}"][depth - 1] for name in ("sequence", "node"))
        return Nodes(sequence_R, node_R, self._depths[depth, : self.key.level_rows])

    def _level(self, run: _DraftRun, rows: StepRows, packed: PackedRows, depth: int) -> Tensor:
        """Run the draft pass over the nodes of one level; return their hidden states [R, E] from their parents'."""
        at = self._at
        start, ancestors_R, source_R = (at[f"level_{name}"][depth - 1] for name in ("start", "ancestors", "source"))
        key_start_B = at["key_start"][run.index, :-1]
        tables = self._tables(rows, packed, start, rows.roots_B1[:-1], ancestors_R, key_start_B)
        return run.drafter.node_states(run.hidden_RE[source_R], tables)

    def _verified(self, rows: StepRows) -> PackedRows:
        """Return the packed rows of the verification pass. Its tokens, the root included, are read from the state."""
        at, last_position = self._at, self._parts.target.last_position
        return self._pack(rows, at["token_sequence"], at["token_node"], at["token_depth"], last_position)

    def _pack(
        self, rows: StepRows, sequence_T: Tensor, offset_T: Tensor, depth_T: Tensor | None, last_position: int
    ) -> PackedRows:
        return pack(self._slots, rows, self._sampling, sequence_T, offset_T, depth_T, last_position)

    def _sampler(self, rows: StepRows) -> StepSampler:
        """Return the sampler of the step."""
        masks_NW, size = self._parts.mask_table_NW, self._parts.target.vocab_size

        def blocked(sampled: SampledRows) -> Tensor | None:
            if masks_NW is None or sampled.mask_row_R is None:
                return None
            return ~unpacked_on_device(masks_NW[sampled.mask_row_R])[:, :size]

        return StepSampler(
            self.key.features,
            self._at,
            BatchTokens(self._slots.tokens_SP, rows.slots_B1, rows.roots_B1),
            size,
            cuts=self.key.cuts,
            blocked=blocked,
            verified_nodes=self.key.tokens_per_row,
        )

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
        limits_B = self._parts.target.within_chunk(at["depth_limit"][:-1], rows.roots_B1[:-1])
        done = commit(self._slots, rows, trees, self.ranked_BNK, limits_B, depth)
        if depth:
            self._parts.target.keep_tables(done.source_BD, done.target_BD)
        if aux_TA is not None:
            assert state.ring_SRA is not None, "the state has a ring if a draft reads states"
            store_states(
                rows, at["query_start"], done.out, depth, aux_TA, state.ring_SRA, state.block_aux_NA, BLOCK_SIZE
            )
        self.out.copy_(done.out)


def _sampled(
    packed: PackedRows, sequence_T: Tensor, node_T: Tensor, ancestors_T: Tensor | None, mask_row_T: Tensor | None
) -> SampledRows:
    """Return packed rows as the sampler reads them."""
    return SampledRows(
        sequence_T,
        node_T,
        packed.temperature_T,
        packed.seed_T,
        packed.next_T,
        packed.truncation,
        ancestors_T,
        mask_row_T,
    )


class UncapturedStep:
    """Rows that choose a token in a step without a graph, or whose drafts run before their graph.

    ``sampler`` proposes for the drafts, ``forest`` has the trees of the rows, and ``masks`` those of grammars, None if
    no row has one. The target's pass runs between the proposals and `verify`. With the rows it may have chunks of
    prompts; those that choose a token have their last token as the root of a tree without nodes.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        target: Target,
        state: DeviceState,
        *,
        coupled: bool,
        depth_limits: Sequence[int] | None = None,
    ) -> None:
        """Read the rows, at least one.

        Args:
            rows: Rows that choose a token.
            target: Target model.
            state: Device state of the running requests.
            coupled: False for the sampler ``mss``.
            depth_limits: Maximum accepted depth of each row; None for no limit.
        """
        device, requests = state.length_S.device, [row.request for row in rows]
        self._target, self._state = target, state
        self.forest = forest_of(tuple(row.tree for row in rows), device)
        ahead = [row.count - 1 if row.is_chunk else 0 for row in rows]
        slots, counts = [request.slot for request in requests], [1 if row.is_chunk else row.count for row in rows]
        starts, limits = accumulate(counts, initial=0), depth_limits or [NODES] * len(rows)
        tables = [[*slots, state.padding_slot], [*[1] * len(rows), 0], [*ahead, 0], [*starts], [*limits, 0]]
        slots_B1, live_B1, ahead_B1, self._query_start, limits_B1 = to_device(tables, device)
        self._slots = SlotState(state.tokens_SP, state.length_S, state.block_table_SM, BLOCK_SIZE)
        begun = begin(self._slots, slots_B1, live_B1)
        self._rows = StepRows(slots_B1, begun.roots_B1 + ahead_B1 if any(ahead) else begun.roots_B1, begun.blocks_B1M)
        self._limits_B = target.within_chunk(limits_B1[:-1], self._rows.roots_B1[:-1])
        texts = BatchTokens(state.tokens_SP, slots_B1, self._rows.roots_B1)
        guides, size = [request.guide for request in requests], target.vocab_size
        self.masks = TokenMasks(guides, texts, self.forest, size) if any(guides) else None
        self.sampler = sampler_of(
            [request.sampling_params for request in requests],
            texts,
            self.forest,
            size,
            longest=1 + max(max(request.cached_bound, request.prefilled) for request in requests),
            coupled=coupled,
            blocked=None if self.masks is None else self.masks.blocked,
        )

    def verify(self, step: TargetPass, logits_RV: Tensor, ranked_BNK: Tensor | None) -> Tensor:
        """Accept nodes, commit tokens, lengths and keys, and return the result as `Committed.out`.

        Args:
            step: Pass of the target.
            logits_RV: Its logits of the verified nodes.
            ranked_BNK: The drafts' best tokens behind each node, -1 where there are none; None if nothing was ranked.
        """
        forest, parents_BN = self.forest, self.forest.parents_BN
        sampled = self.sampler.at(step.nodes)
        if self.masks is not None:
            sampled = replace(sampled, mask_row_R=self.masks.prepare())
        tokens_R, chosen_R = self.sampler.verified(
            sampled, step.packed.tokens_T[step.logit_rows_R], logits_RV, self._query_start, parents_BN, forest.depth
        )
        if ranked_BNK is not None:
            ranked_BNK = ranked_BNK[:, : parents_BN.shape[1]].contiguous()
        trees = Verified(self._query_start, parents_BN, tokens_R, chosen_R)
        done = commit(self._slots, self._rows, trees, ranked_BNK, self._limits_B, forest.depth)
        if not forest.all_chains:
            self._target.cache.keep(done.source_BD.flatten(), done.target_BD.flatten(), group=forest.depth)
        return done.out

    def store_states(self, step: TargetPass, aux_TA: Tensor, out: Tensor) -> None:
        """Store the auxiliary states of the roots and of accepted nodes, after `verify` returned ``out``."""
        state, aux_RA = self._state, aux_TA[step.logit_rows_R]
        assert state.ring_SRA is not None, "the state has a ring if a draft reads states"
        store_states(
            self._rows,
            self._query_start,
            out,
            self.forest.depth,
            aux_RA,
            state.ring_SRA,
            state.block_aux_NA,
            BLOCK_SIZE,
        )
