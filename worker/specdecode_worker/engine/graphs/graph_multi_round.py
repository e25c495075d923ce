"""Multi-round sampling in a captured step, with tensors of fixed sizes.

It is equivalent to `MultiRound` (speculation/sampling/multi_round.py). Greedy rows of the batch propose and accept as
in other steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdecode_kernels.noise.op import gumbel
from specdecode_kernels.noise.reference import PROPOSAL_STREAM
from specdecode_kernels.sample import op
from specdecode_kernels.step_tables.tables import PackedRows, StepRows
from specdecode_kernels.verify.op import multi_round
from specdecode_worker.engine.graphs.adjustment import ROWS_AT_ONCE, AdjustedSampler, Adjustment, PassNodes
from specdecode_worker.engine.graphs.graph_key import GraphKey
from specdecode_worker.engine.graphs.graph_sampling import PackedSampler
from specdecode_worker.speculation.sampling.sampler import Proposer


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
                logits_RV[start : start + ROWS_AT_ONCE],
                ids_V,
                nodes[start : start + ROWS_AT_ONCE],
                packed.next_T[start : start + ROWS_AT_ONCE],
            )
            for start in range(0, len(logits_RV), ROWS_AT_ONCE)
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
