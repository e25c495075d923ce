"""Samplers of a worker: coupled sampling, or multi-round sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from specdecode_kernels.noise.op import gumbel
from specdecode_kernels.noise.reference import PROPOSAL_STREAM
from specdecode_kernels.transfer import to_device
from specdecode_kernels.verify.op import multi_round
from specdecode_worker.contract import Sampler as SamplerName
from specdecode_worker.sampling.acceptance import Outcome, outcome
from specdecode_worker.sampling.columns import BatchTokens
from specdecode_worker.sampling.coupling import Coupling
from specdecode_worker.sampling.logits import LogitsProcessor
from specdecode_worker.sampling.masks import TokenMasks
from specdecode_worker.sampling.params import SamplingParams
from specdecode_worker.sampling.trees import Forest, Nodes

# Multi-round speculative sampling (SpecInfer, arXiv 2305.09781; the method of arXiv 2508.08192), for comparison.
#
# Siblings are drawn from the draft without replacement and tried in turn. The emitted text follows the target's
# distribution, but it is not the text of plain decoding. Proposals, acceptance coins and residual draws use separate
# noise streams, indexed by position. Greedy requests behave as under coupled sampling.


class MultiRound:
    """Multi-round choices of one step for a batch; a `Sampler` (see sampler.py).

    The draft distributions are stored from `propose` until `accept`. The children of a node without a stored
    distribution are treated as deterministic.
    """

    def __init__(
        self,
        batch_params: Sequence[SamplingParams],
        texts: BatchTokens,
        forest: Forest,
        vocab_size: int,
        masks: TokenMasks | None = None,
    ) -> None:
        self._processing = LogitsProcessor(batch_params, texts, forest, vocab_size, masks)
        greedy = [params if params.greedy else replace(params, temperature=0.0) for params in batch_params]
        self._greedy = Coupling(greedy, texts, forest, vocab_size, masks)
        self._roots_B, self._size = texts.roots_B, vocab_size
        self._seed_B = to_device([params.seed for params in batch_params], texts.roots_B.device)
        self._width = max(max(tree.ranks) for tree in forest.trees) + 1
        self._drawn: list[tuple[Nodes, Tensor, Tensor | None]] = []

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
        """Return proposals [R, k]: drawn from q without replacement in sampled rows, the top k in greedy rows.

        ``sharpness`` has no effect on sampled rows. The other arguments are those of `Sampler.propose`.
        """

        def best() -> Tensor:
            return self._greedy.propose(logits_RV, target_ids_V, batch_R, node_R, depth_R, sharpness, k)

        if not self._processing.sampled.any:
            return best()
        part = self._processing.sampled.of(batch_R)
        at = part.nodes(Nodes(batch_R, node_R, depth_R))
        meant_R = part.mask_R if part.rows is None else None
        return part.merge(self._draw(part.of(logits_RV), target_ids_V, at, meant_R, k), best)

    def accept(
        self,
        forest: Forest,
        tokens_BN: Tensor,
        logits_RV: Tensor,
        batch_R: Tensor,
        node_R: Tensor,
        depth_R: Tensor,
        ranked_BNK: Tensor | None,
        depth_limit_B: Tensor | None,
    ) -> Outcome:
        """Accept or reject the children of each node in turn, as `Sampler.accept`."""
        if not self._processing.sampled.any:
            return self._greedy.accept(
                forest, tokens_BN, logits_RV, batch_R, node_R, depth_R, ranked_BNK, depth_limit_B
            )
        at = Nodes(batch_R, node_R, depth_R)
        logp_RV = self._target_logp(logits_RV, at)
        logp_BNV = logp_RV.new_zeros(*tokens_BN.shape, self._size)
        logp_BNV[batch_R, node_R] = logp_RV
        logq_BNV, drawn_BN = self._proposed(forest, logp_BNV)
        accepted = multi_round(
            forest.parents_BN,
            tokens_BN,
            logp_BNV,
            logq_BNV,
            self._seed_B,
            self._roots_B,
            forest.depth,
            drawn_BN=drawn_BN,
            width=self._width,
        )
        path_tokens_BD = tokens_BN.gather(1, accepted.path_BD.clamp(min=0))
        emitted_BD = torch.nn.functional.pad(path_tokens_BD, (0, 1))
        emitted_BD = emitted_BD.scatter(1, accepted.count_B[:, None], accepted.bonus_B[:, None])
        return outcome(accepted, emitted_BD, ranked_BNK, depth_limit_B)

    def _draw(self, logits_RV: Tensor, ids_V: Tensor | None, at: Nodes, meant_R: Tensor | None, k: int) -> Tensor:
        """Draw k tokens [R, k] per row without replacement (Gumbel top-k) and store log q for `accept`.

        ``meant_R`` is the mask of the rows that are sampled (None: all).
        """
        logq_RV = self._processing.logp(self._processing.adjusted(logits_RV, ids_V, at), at)
        position_R = self._roots_B[at.batch_R] + at.depth_R + 1
        noise = gumbel(self._seed_B[at.batch_R], position_R, self._size, PROPOSAL_STREAM)
        best = (logq_RV + (noise if ids_V is None else noise[:, ids_V])).topk(k, dim=-1).indices
        if ids_V is not None:
            best = ids_V[best]
            logq_RV = logq_RV.new_full((len(logq_RV), self._size), -torch.inf).index_copy_(1, ids_V, logq_RV)
        self._drawn.append((at, logq_RV, meant_R))
        return best

    def _target_logp(self, logits_RV: Tensor, at: Nodes) -> Tensor:
        """Return the target's log-probabilities [R, V].

        In greedy rows the chosen token has all of the probability.
        """
        adjusted_RV = self._processing.adjusted(logits_RV, None, at)
        part = self._processing.sampled.of(at.batch_R)
        sampled_RV = self._processing.logp(part.of(adjusted_RV), part.nodes(at))

        def certain() -> Tensor:
            best_R1 = adjusted_RV.argmax(-1, keepdim=True)
            nothing = torch.full_like(adjusted_RV, -torch.inf, dtype=sampled_RV.dtype)
            return nothing.scatter_(1, best_R1, 0.0)

        return part.merge(sampled_RV, certain)

    def _proposed(self, forest: Forest, like_BNV: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the stored draft distributions, or (None, None) if there are none.

        Returns:
            log q of the children of each verified node [B, N, V], and the mask [B, N] of the nodes for which it is
            valid.
        """
        if not self._drawn:
            return None, None
        nodes = max(len(tree.parents) for tree in forest.trees)
        logq_BNV = like_BNV.new_full((len(like_BNV), nodes, self._size), -torch.inf)
        drawn_BN = torch.zeros(len(like_BNV), nodes, dtype=torch.bool, device=like_BNV.device)
        for at, logq_RV, meant_R in self._drawn:
            logq_BNV[at.batch_R, at.node_R] = logq_RV.to(logq_BNV.dtype)
            drawn_BN[at.batch_R, at.node_R] = True if meant_R is None else meant_R
        return logq_BNV[:, : like_BNV.shape[1]], drawn_BN[:, : like_BNV.shape[1]]


# Interface of the samplers of a step: proposals for drafted nodes, and acceptance by the target.
#
# `Coupling` emits exactly the text of plain decoding. `MultiRound` emits text from the same distribution with random
# numbers of its own, and exists for comparison. One object serves one step.


class Proposer(Protocol):
    """Part of a sampler that chooses the tokens of drafted nodes.

    The R rows of logits belong to nodes (``batch_R``, ``node_R``) at ``depth_R`` in the forest of the step.
    """

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
        """Return distinct target ids [R, k] for the children of these nodes, best first.

        Siblings take the ids in order of rank. The tokens on the paths of the nodes must already be in the step's
        ``BatchTokens``. Methods that propose without logits (ngram) do not call this function.

        Args:
            logits_RV: Logits of the draft.
            target_ids_V: Target id of each draft token; None if the draft uses the target's vocabulary.
            batch_R: Sequence of each row.
            node_R: Node of each row.
            depth_R: Depth of each node.
            sharpness: Factor on the draft's logits, fitted for coupled sampling.
            k: Number of proposals per row.
        """
        ...


class Sampler(Proposer, Protocol):
    """Sampler of one step."""

    def accept(
        self,
        forest: Forest,
        tokens_BN: Tensor,
        logits_RV: Tensor,
        batch_R: Tensor,
        node_R: Tensor,
        depth_R: Tensor,
        ranked_BNK: Tensor | None,
        depth_limit_B: Tensor | None,
    ) -> Outcome:
        """Return the accepted nodes and the emitted tokens.

        Args:
            forest: Trees of the step.
            tokens_BN: Tokens of the verified nodes, -2 as padding.
            logits_RV: Logits of the target after each of these nodes.
            batch_R: Sequence of each row.
            node_R: Node of each row.
            depth_R: Depth of each node.
            ranked_BNK: The draft's best tokens after each node, -1 where there are none; see acceptance.py.
            depth_limit_B: Synthetic limit on accepted nodes; see acceptance.py.
        """
        ...


SamplerFactory = Callable[[Sequence[SamplingParams], BatchTokens, Forest, int, TokenMasks | None], Sampler]
"""Constructor of a sampler.

Its arguments are the sampling parameters, texts and trees of a step's rows, the target's vocabulary size, and the masks
of the rows whose answers follow a grammar (None if there are none).
"""

SAMPLERS: dict[SamplerName, SamplerFactory] = {"coupled": Coupling, "mss": MultiRound}
"""Constructor of each sampler by its name in the configuration."""
