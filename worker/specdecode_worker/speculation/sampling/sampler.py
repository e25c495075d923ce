"""What a step asks of a sampler: proposals behind drafted nodes, and which of them the target accepts.

`Coupling` emits the text of plain decoding, token for token. `MultiRound` emits its law, with coins of its own, and is
there to be compared. One object serves one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from specdecode_worker.contract import Sampler as SamplerName
from specdecode_worker.speculation.acceptance import Outcome
from specdecode_worker.speculation.sampling.coupling import Coupling
from specdecode_worker.speculation.sampling.multi_round import MultiRound
from specdecode_worker.speculation.sampling.params import Law
from specdecode_worker.speculation.sampling.token_counts import Texts
from specdecode_worker.speculation.trees import Forest


class Sampler(Protocol):
    """R rows of logits belong to nodes (``batch_R``, ``node_R``) of ``depth_R`` in the forest of the step."""

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
        """[R, k] target ids for the children of these nodes, best first and all different: siblings take them in
        turn. The tokens on the nodes' paths stand in the step's ``Texts`` by now.

        ``target_ids_V`` maps the draft's vocabulary (None: the target's own). ``sharpness`` was fitted for coupling.
        Who proposes without logits (ngram) does not call this.
        """
        ...

    def accept(
        self,
        forest: Forest,
        tokens_BN: Tensor,
        logits_RV: Tensor,
        batch_R: Tensor,
        node_R: Tensor,
        depth_R: Tensor,
        ranked_BNK: Tensor | None,
        kept_depth_B: Tensor | None,
    ) -> Outcome:
        """Which nodes stay and what is emitted. ``tokens_BN`` are the verified nodes' tokens (-2 as padding), the
        target's logits behind each of them are ``logits_RV``; ``ranked_BNK`` (-1 where nothing was ranked) and
        ``kept_depth_B`` are as in accept.py."""
        ...


SamplerOf = Callable[[Sequence[Law], Texts, Forest, int], Sampler]
"""Laws, texts and trees of a step's rows that choose, and the size of the target's vocabulary."""

SAMPLERS: dict[SamplerName, SamplerOf] = {"coupled": Coupling, "mss": MultiRound}
