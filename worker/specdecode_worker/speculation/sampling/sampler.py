"""Interface of the samplers of a step: proposals for drafted nodes, and acceptance by the target.

`Coupling` emits exactly the text of plain decoding. `MultiRound` emits text from the same distribution with random
numbers of its own, and exists for comparison. One object serves one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from specdecode_worker.contract import Sampler as SamplerName
from specdecode_worker.speculation.acceptance import Outcome
from specdecode_worker.speculation.sampling.coupling import Coupling
from specdecode_worker.speculation.sampling.multi_round import MultiRound
from specdecode_worker.speculation.sampling.params import SamplingParams
from specdecode_worker.speculation.sampling.token_counts import BatchTokens
from specdecode_worker.speculation.sampling.token_masks import TokenMasks
from specdecode_worker.speculation.trees import Forest


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
