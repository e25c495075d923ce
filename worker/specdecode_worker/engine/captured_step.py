"""A decode step over static tensors: draft, verify, accept and commit, as a CUDA graph or as calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdecode_kernels.noise.op import gumbel
from specdecode_kernels.noise.reference import PROPOSAL_STREAM
from specdecode_kernels.sample import op
from specdecode_kernels.step_tables.op import begin, commit, pack, store_states, write_children
from specdecode_kernels.step_tables.tables import PackedRows, SamplingTables, SlotState, StepRows, Verified
from specdecode_kernels.top_k.op import top_k
from specdecode_kernels.transfer import to_device
from specdecode_kernels.verify.op import choose, multi_round
from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.core.batch import Row
from specdecode_worker.core.device_state import DeviceState, to_host
from specdecode_worker.core.kv_cache import BLOCK_SIZE
from specdecode_worker.core.paged_attention import PackedTensors
from specdecode_worker.drafts.base import PagedDrafter
from specdecode_worker.engine.logprobs import LEAST_TOP, ROWS_AT_ONCE, RowLogprobs, TokenLogprobs, logprobs_of
from specdecode_worker.engine.step_tables import NODES, Features, GraphKey, HostMasks, StepInputs
from specdecode_worker.engine.target import Target
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.sampling.masks import unpacked_on_device
from specdecode_worker.sampling.sampler import Proposer
from specdecode_worker.sampling.trees import Nodes

# Coupled sampling from the packed rows of a captured pass.
#
# It is equivalent to Coupling for requests without logits processors (penalties, logit bias, minimum length).


@dataclass(frozen=True, slots=True)
class PackedSampler:
    """`Proposer` (see sampling/sampler.py) of one captured pass.

    A row of logits belongs to the packed row of the same index, which holds its sampling parameters.
    """

    packed: PackedRows
    vocab_size: int

    def propose(
        self,
        logits_RV: Tensor,
        target_ids_V: Tensor | None,
        batch_R: Tensor,
        node_R: Tensor,
        depth_R: Tensor,
        sharpness: float,
        k: int,
    ) -> Tensor:
        """Return the ``k`` best target token ids for each row of ``logits_RV``, best first: [R, k]."""
        return top_k(
            logits_RV,
            k,
            temperature_R=self.packed.temperature_T,
            seed_R=self.packed.seed_T,
            position_R=self.packed.next_T,
            vocab_size=self.vocab_size,
            ids_V=target_ids_V,
            sharpness=sharpness,
            truncation=self.packed.truncation,
        )

    def choose(self, logits_TV: Tensor) -> Tensor:
        """Return the target's token [T] behind every packed row."""
        packed = self.packed
        return choose(logits_TV, packed.temperature_T, packed.seed_T, packed.next_T, packed.truncation)


# Adjustment of the logits of a captured pass: bias, blocked tokens, penalties and grammar masks from static tables.
#
# It is equivalent to `LogitsProcessor.adjusted` (sampling/logits.py) with tensors of fixed
# sizes.

ADJUSTED_AT_ONCE = 64
"""Rows of logits adjusted at a time, which bounds the memory of the fp32 copies, counts and masks."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of the rows of a step, [B + 1, V]: whether the prompt has them, and how often the answer to the root."""

    prompt_BV: Tensor
    answer_BV: Tensor


def count_tokens(state: SlotState, rows: StepRows, prompt_tokens_B1: Tensor, history: int, vocab_size: int) -> Counts:
    """Count the tokens of each row in the first ``history`` positions of its text, which hold the root."""
    tokens_BL = state.tokens_SP[rows.slots_B1, :history].clamp(min=0)
    index_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    begin_B1, root_B1 = prompt_tokens_B1[:, None], rows.roots_B1[:, None]
    nothing_BV = torch.zeros(len(tokens_BL), vocab_size, device=tokens_BL.device)
    prompt_BV = nothing_BV.scatter_add(1, tokens_BL, (index_L < begin_B1).float()) > 0
    answer_BL = (index_L >= begin_B1) & (index_L <= root_B1)
    return Counts(prompt_BV, nothing_BV.scatter_add_(1, tokens_BL, answer_BL.float()))


@dataclass(frozen=True, slots=True)
class PassNodes:
    """Nodes of the packed rows of a pass.

    ``ancestors_T`` are bit masks of the nodes on their paths, the root included; None if all rows are roots.
    ``mask_row_T`` is the row of each in the table of grammar masks, None without grammars.
    """

    sequence_T: Tensor
    ancestors_T: Tensor | None
    mask_row_T: Tensor | None = None

    def __getitem__(self, here: slice) -> PassNodes:
        """Return the nodes of a slice of the rows."""
        ancestors, masks = self.ancestors_T, self.mask_row_T
        return PassNodes(
            self.sequence_T[here],
            None if ancestors is None else ancestors[here],
            None if masks is None else masks[here],
        )


class Adjustment:
    """Adjustment of logits in one captured step.

    Args of the constructor: features and static tables of the step, its slots and rows, the table of grammar masks
    [N, W], and the size of the target's vocabulary.
    """

    def __init__(
        self,
        features: Features,
        at: Mapping[str, Tensor],
        state: SlotState,
        rows: StepRows,
        mask_table_NW: Tensor | None,
        vocab_size: int,
    ) -> None:
        self._features, self._at, self._state, self._rows = features, at, state, rows
        self._masks_NW, self._size = mask_table_NW, vocab_size
        self._counts = (
            count_tokens(state, rows, at["prompt_tokens"], features.history, vocab_size) if features.history else None
        )

    def adjusted(self, logits_RV: Tensor, ids_V: Tensor | None, nodes: PassNodes, next_R: Tensor) -> Tensor:
        """Return adjusted logits of at most ADJUSTED_AT_ONCE rows, in fp32 or wider.

        Args:
            logits_RV: Logits of the rows, over the vocabulary of the target or of the draft.
            ids_V: Target id of each draft token; None if the logits are over the target's vocabulary.
            nodes: Nodes of the rows.
            next_R: Position of the token that is chosen behind each row.
        """
        if ids_V is None:
            return self._moved(logits_RV, nodes, next_R)
        wide = logits_RV.new_full((len(logits_RV), self._size), -math.inf)
        wide[:, ids_V] = logits_RV
        return self._moved(wide, nodes, next_R)[:, ids_V]

    def _moved(self, logits_RV: Tensor, nodes: PassNodes, next_R: Tensor) -> Tensor:
        at, b = self._at, nodes.sequence_T
        if self._features.adjusts:
            early_R1 = (next_R - at["prompt_tokens"][b] < at["min_tokens"][b])[:, None]
            blocked_RK = at["blocked_ids"][b]
            counts = self._counts
            moved_RV = op.adjusted(
                logits_RV,
                bias=(at["bias_ids"][b], at["bias"][b]),
                blocked=(blocked_RK, early_R1.expand_as(blocked_RK)),
                prompt_RV=None if counts is None else counts.prompt_BV[b],
                counts_RV=None if counts is None else self._counted(counts, nodes),
                repetition_R=None if counts is None else at["repetition"][b],
                frequency_R=None if counts is None else at["frequency"][b],
                presence_R=None if counts is None else at["presence"][b],
            )
        else:
            moved_RV = op.adjusted(logits_RV)
        if self._masks_NW is None or nodes.mask_row_T is None:
            return moved_RV
        free_RV = unpacked_on_device(self._masks_NW[nodes.mask_row_T])[:, : self._size]
        return moved_RV.masked_fill_(~free_RV, -math.inf)

    def _counted(self, counts: Counts, nodes: PassNodes) -> Tensor:
        """Return the occurrences [R, V] of each token in the answer, those on the path of a node included."""
        b, answer_RV = nodes.sequence_T, counts.answer_BV[nodes.sequence_T]
        if nodes.ancestors_T is None:
            return answer_RV
        node_N = torch.arange(1, NODES, device=b.device)  # the root is counted already
        on_path_RN = (nodes.ancestors_T[:, None] >> node_N) & 1
        index_RN = self._rows.roots_B1[b, None] + node_N
        tokens_RN = self._state.tokens_SP[self._rows.slots_B1[b, None], index_RN] * on_path_RN
        return answer_RV.scatter_add_(1, tokens_RN, on_path_RN.to(answer_RV.dtype))


@dataclass(frozen=True, slots=True)
class AdjustedSampler:
    """`Proposer` of one captured pass, as `PackedSampler`, for steps whose logits are adjusted."""

    packed: PackedRows
    nodes: PassNodes
    adjustment: Adjustment
    vocab_size: int

    def propose(
        self,
        logits_RV: Tensor,
        target_ids_V: Tensor | None,
        batch_R: Tensor,
        node_R: Tensor,
        depth_R: Tensor,
        sharpness: float,
        k: int,
    ) -> Tensor:
        """Return the ``k`` best target token ids for each row of ``logits_RV``, best first: [R, k]."""
        if sharpness != 1:
            # Sharpness must not apply to greedy rows, nor to the bias that is added below.
            temperature_R = self.packed.temperature_T
            logits_RV = logits_RV * torch.ones_like(temperature_R).masked_fill_(temperature_R > 0, sharpness)[:, None]
        return self._joined(
            logits_RV,
            target_ids_V,
            lambda piece, moved_RV: piece.propose(moved_RV, target_ids_V, batch_R, node_R, depth_R, 1.0, k),
        )

    def choose(self, logits_TV: Tensor) -> Tensor:
        """Return the target's token [T] behind every packed row."""
        return self._joined(logits_TV, None, PackedSampler.choose)

    def _joined(
        self, logits_RV: Tensor, target_ids_V: Tensor | None, sample: Callable[[PackedSampler, Tensor], Tensor]
    ) -> Tensor:
        """Return the results of ``sample`` for all rows. It gets a piece of them with its adjusted logits at a time."""
        results = []
        for start in range(0, len(self.packed.next_T), ADJUSTED_AT_ONCE):
            here = slice(start, start + ADJUSTED_AT_ONCE)
            packed = _sampling_of(self.packed, here)
            moved_RV = self.adjustment.adjusted(logits_RV[here], target_ids_V, self.nodes[here], packed.next_T)
            results.append(sample(PackedSampler(packed, self.vocab_size), moved_RV))
        return results[0] if len(results) == 1 else torch.cat(results)


def _sampling_of(packed: PackedRows, here: slice) -> PackedRows:
    """Return packed rows whose sampling parameters and positions are those of a slice."""
    cuts = packed.truncation
    return replace(
        packed,
        next_T=packed.next_T[here],
        temperature_T=packed.temperature_T[here],
        seed_T=packed.seed_T[here],
        truncation=None if cuts is None else (cuts[0][here], cuts[1][here], cuts[2][here]),
    )


# Multi-round sampling in a captured step, with tensors of fixed sizes.
#
# It is equivalent to `MultiRound` (sampling/sampler.py). Greedy rows of the batch propose and accept as
# in other steps.


class GraphRounds:
    """Multi-round sampling of one captured step.

    It stores the distributions that the draft passes draw from until `accept` uses them. The children of a node without
    a stored distribution are treated as deterministic.

    Args of the constructor: key and static tables of the step, its rows, the adjustment of its logits (None if there is
    none), and the size of the target's vocabulary.
    """

    def __init__(
        self, key: GraphKey, at: Mapping[str, Tensor], rows: StepRows, adjustment: Adjustment | None, vocab_size: int
    ) -> None:
        self._key, self._at, self._rows = key, at, rows
        self._adjustment, self.vocab_size = adjustment, vocab_size
        self._logq_B1NV: Tensor | None = None
        self._drawn_B1N: Tensor | None = None

    def sampler(self, packed: PackedRows, nodes: PassNodes) -> RoundsSampler:
        """Return the sampler of one draft pass."""
        return RoundsSampler(self, packed, nodes)

    def logp(self, logits_RV: Tensor, ids_V: Tensor | None, packed: PackedRows, nodes: PassNodes) -> Tensor:
        """Return log-probabilities [R, V] after adjustment, temperature and truncation.

        The values of greedy rows have no meaning.
        """
        adjusted_RV = self._adjusted(logits_RV, ids_V, packed, nodes)
        temperature_R = torch.where(packed.temperature_T > 0, packed.temperature_T, 1.0)
        cuts = packed.truncation or (packed.next_T, packed.next_T)  # not read unless a request truncates
        return op.processed(adjusted_RV, temperature_R, *cuts, truncated=packed.truncation is not None)

    def greedy(self, packed: PackedRows, nodes: PassNodes) -> Proposer:
        """Return the sampler of a pass that treats all rows as greedy."""
        greedy = replace(packed, temperature_T=torch.zeros_like(packed.temperature_T), truncation=None)
        if self._adjustment is None:
            return PackedSampler(greedy, self.vocab_size)
        return AdjustedSampler(greedy, nodes, self._adjustment, self.vocab_size)

    def store(self, logq_RV: Tensor, drawn_R: Tensor, sequence_R: Tensor, node_R: Tensor) -> None:
        """Store log q behind verified nodes. ``drawn_R`` marks the rows whose proposals were drawn from it."""
        rows, nodes = self._key.rows, self._key.tokens_per_row
        if self._logq_B1NV is None or self._drawn_B1N is None:
            self._logq_B1NV = logq_RV.new_full((rows + 1, nodes, self.vocab_size), -torch.inf)
            self._drawn_B1N = torch.zeros(rows + 1, nodes, dtype=torch.bool, device=logq_RV.device)
        # Shadow nodes, which are not verified, are stored in the row of padding.
        sequence_R = torch.where(node_R < nodes, sequence_R, rows)
        node_R = node_R.clamp(max=nodes - 1)
        self._logq_B1NV[sequence_R, node_R] = logq_RV
        self._drawn_B1N[sequence_R, node_R] = drawn_R

    def accept(self, packed: PackedRows, nodes: PassNodes, logits_TV: Tensor) -> tuple[Tensor, Tensor]:
        """Accept or reject the children of each node in turn.

        Returns:
            Tokens of the accepted nodes, -2 for all others, and the token behind each accepted node and each root, -1
            elsewhere; both [T]. A walk along the second accepts exactly the nodes of the first.
        """
        query_start, width = self._at["query_start"], self._key.tokens_per_row
        starts_B1, counts_B1 = query_start[:-1, None], (query_start[1:] - query_start[:-1])[:, None]
        node_N = torch.arange(width, device=query_start.device)
        real_BN = node_N < counts_B1
        row_BN = torch.where(real_BN, starts_B1 + node_N, 0)
        tokens_BN = torch.where(real_BN, packed.tokens_T[row_BN], -2)
        accepted = multi_round(
            self._at["node_verified_parent"][:, :width],
            tokens_BN,
            self._target_logp(logits_TV, packed, nodes)[row_BN],
            None if self._logq_B1NV is None else self._logq_B1NV[:-1],
            self._at["seed"][:-1],
            self._rows.roots_B1[:-1],
            self._key.depth,
            drawn_BN=None if self._drawn_B1N is None else self._drawn_B1N[:-1],
            width=self._key.features.rounds,
        )
        path_BD = torch.nn.functional.pad(accepted.path_BD.clamp(min=0), (1, 0))
        path_tokens_BD = tokens_BN.gather(1, path_BD[:, 1:])
        emitted_BD = torch.nn.functional.pad(path_tokens_BD, (0, 1))
        emitted_BD = emitted_BD.scatter(1, accepted.count_B[:, None], accepted.bonus_B[:, None])
        on_path_BD = torch.arange(path_BD.shape[1], device=path_BD.device) <= accepted.count_B[:, None]
        # Entries that are on no path are written behind the last token.
        place_BD = torch.where(on_path_BD & (counts_B1 > 0), starts_B1 + path_BD, len(logits_TV))
        accepted_T = _placed(path_tokens_BD, place_BD[:, 1:], len(logits_TV), -2)
        return accepted_T, _placed(emitted_BD, place_BD, len(logits_TV), -1)

    def _target_logp(self, logits_TV: Tensor, packed: PackedRows, nodes: PassNodes) -> Tensor:
        """Return the target's log-probabilities [T, V]. In greedy rows the chosen token has all of the probability."""
        logp_TV = self.logp(logits_TV, None, packed, nodes)
        best_T1 = self._adjusted(logits_TV, None, packed, nodes).argmax(-1, keepdim=True)
        certain_TV = torch.full_like(logp_TV, -torch.inf).scatter_(1, best_T1, 0.0)
        return torch.where(packed.temperature_T[:, None] > 0, logp_TV, certain_TV)

    def _adjusted(self, logits_RV: Tensor, ids_V: Tensor | None, packed: PackedRows, nodes: PassNodes) -> Tensor:
        if self._adjustment is None:
            return logits_RV
        pieces = [
            self._adjustment.adjusted(
                logits_RV[start : start + ADJUSTED_AT_ONCE],
                ids_V,
                nodes[start : start + ADJUSTED_AT_ONCE],
                packed.next_T[start : start + ADJUSTED_AT_ONCE],
            )
            for start in range(0, len(logits_RV), ADJUSTED_AT_ONCE)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


@dataclass(frozen=True, slots=True)
class RoundsSampler:
    """`Proposer` of one draft pass: sampled rows draw without replacement, greedy rows take the best tokens."""

    rounds: GraphRounds
    packed: PackedRows
    nodes: PassNodes

    def propose(
        self,
        logits_RV: Tensor,
        target_ids_V: Tensor | None,
        batch_R: Tensor,
        node_R: Tensor,
        depth_R: Tensor,
        sharpness: float,
        k: int,
    ) -> Tensor:
        """Return ``k`` target token ids [R, k] for each row. ``sharpness`` was fitted for coupled sampling."""
        rounds, packed = self.rounds, self.packed
        logq_RV = rounds.logp(logits_RV, target_ids_V, packed, self.nodes)
        noise = gumbel(packed.seed_T, packed.next_T, rounds.vocab_size, PROPOSAL_STREAM)
        drawn_RK = (logq_RV + (noise if target_ids_V is None else noise[:, target_ids_V])).topk(k, dim=-1).indices
        if target_ids_V is not None:
            drawn_RK = target_ids_V[drawn_RK]
            wide_RV = logq_RV.new_full((len(logq_RV), rounds.vocab_size), -torch.inf)
            logq_RV = wide_RV.index_copy_(1, target_ids_V, logq_RV)
        sampled_R = packed.temperature_T > 0
        rounds.store(logq_RV, sampled_R, batch_R, node_R)
        greedy = rounds.greedy(packed, self.nodes)
        best_RK = greedy.propose(logits_RV, target_ids_V, batch_R, node_R, depth_R, 1.0, k)
        return torch.where(sampled_R[:, None], drawn_RK, best_RK)


def _placed(values_BD: Tensor, place_BD: Tensor, size: int, padding: int) -> Tensor:
    """Return ``values_BD`` at their places of a row of ``size`` values; the place ``size`` absorbs the others."""
    row = torch.full((size + 1,), padding, dtype=torch.int64, device=values_BD.device)
    row[place_BD.flatten()] = values_BD.flatten()
    return row[:size]


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
        nodes_BD = torch.nn.functional.pad(out[:, depth + 1 : 2 * depth + 1].clamp(min=0), (1, 0))
        rows_T = (query_start[:-1, None] + nodes_BD).flatten().clamp(max=len(logits_TV) - 1)
        tokens_T = out[:, : depth + 1].flatten().clamp(min=0)
        for start in range(0, len(rows_T), ROWS_AT_ONCE):
            here = slice(start, start + ROWS_AT_ONCE)
            logprob_T, rank_T, best_TK, logprobs_TK = logprobs_of(logits_TV[rows_T[here]], tokens_T[here], self._top)
            self.ints_TK[here].copy_(torch.cat((tokens_T[here, None], rank_T[:, None], best_TK), dim=1))
            self.floats_TK[here].copy_(torch.cat((logprob_T[:, None], logprobs_TK), dim=1))

    def queue_read(self, rows: Sequence[Row]) -> RowLogprobs | None:
        """Queue the copy of the rows that asked for log-probabilities to the host; None if none did."""
        tops = {b: top for b, row in enumerate(rows) if (top := row.request.submit.sampling.logprobs) is not None}
        if not tops:
            return None
        asked_A = to_device(list(tops), self.ints_TK.device)
        ints, floats = (
            table_TK.view(self._rows, self._columns, -1)[asked_A].flatten(0, 1)
            for table_TK in (self.ints_TK, self.floats_TK)
        )
        (ints, floats), host_copy = to_host((ints, floats))
        logprobs = TokenLogprobs(ints[:, 0], floats[:, 0], ints[:, 1], ints[:, 2:], floats[:, 1:], host_copy)
        return RowLogprobs(tuple(tops), tuple(tops.values()), (self._columns,) * len(tops), logprobs)


# One decode step that can be captured in a CUDA graph: draft, verify, accept and commit over fixed-size tables.
#
# The graph key alone determines the size of every tensor. A key can also be that of the draft passes alone, or of what
# follows them. The step is equivalent to the eager path of the step launcher
# and the drafters for decoding rows. No call here may wait for the device, read a device value on the host, or make a
# size depend on a device value; tests/unit/worker/engine/graphs/test_capturable.py checks this.


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
