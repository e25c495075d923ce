"""Coupled sampling from the packed rows of a captured pass.

It is equivalent to Coupling for requests without logits processors (penalties, logit bias, minimum length).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdecode_kernels.step_tables.tables import PackedRows
from specdecode_kernels.top_k.op import top_k
from specdecode_kernels.verify.op import choose


@dataclass(frozen=True, slots=True)
class PackedSampler:
    """`Proposer` (see speculation/sampling/sampler.py) of one captured pass.

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
