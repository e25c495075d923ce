"""Coupled sampling from static tensors, for use in a captured step.

It is equivalent to Coupling for requests without logits processors (penalties, logit bias, minimum length).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_kernels.top_k.op import top_k
from specdecode_kernels.verify.op import choose
from specdecode_worker.speculation.acceptance import Outcome, accept
from specdecode_worker.speculation.trees import Forest


@dataclass(frozen=True, slots=True)
class TableSampler:
    """`Sampler` (see speculation/sampling/sampler.py) of one captured step.

    Row B of every [B + 1] tensor is padding; ``accept`` leaves it out of its outcome. ``truncation`` holds top-k, top-p
    and min-p, each [B + 1]; it is None if no request of the step truncates its distribution.
    """

    temperature_B1: Tensor
    seed_B1: Tensor
    roots_B1: Tensor
    truncation: tuple[Tensor, Tensor, Tensor] | None
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
            temperature_R=self.temperature_B1[batch_R],
            seed_R=self.seed_B1[batch_R],
            position_R=self.roots_B1[batch_R] + 1 + depth_R,
            vocab_size=self.vocab_size,
            ids_V=target_ids_V,
            sharpness=sharpness,
            truncation=self._cuts(batch_R),
        )

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
        """Sample the target's token behind every packed node, and walk each tree along the tokens that match."""
        position_R = self.roots_B1[batch_R] + 1 + depth_R
        seed_R, temperature_R = self.seed_B1[batch_R], self.temperature_B1[batch_R]
        chosen_R = choose(logits_RV, temperature_R, seed_R, position_R, self._cuts(batch_R))
        rows, nodes = forest.parents_BN.shape
        chosen_B1N = torch.full((rows + 1, nodes), -1, dtype=torch.int64, device=chosen_R.device)
        chosen_B1N[batch_R, node_R] = chosen_R
        return accept(forest, tokens_BN, chosen_B1N[:rows], ranked_BNK, depth_limit_B)

    def _cuts(self, batch_R: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        if self.truncation is None:
            return None
        top_k_B1, top_p_B1, min_p_B1 = self.truncation
        return top_k_B1[batch_R], top_p_B1[batch_R], min_p_B1[batch_R]
