"""Tables of a draft model with another vocabulary than the target's, on the device of its weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdecode_worker.models.vocabulary.vocabulary_match import VocabularyMatch


class VocabularyMap(nn.Module):
    """Map between the target's token ids and the draft's. The tables are not part of a checkpoint."""

    draft_ids: Tensor
    """Draft's id of each target id, [target's vocabulary]."""
    proposed: Tensor
    """Draft ids that are proposed, [M], in ascending order."""
    target_ids: Tensor
    """Target's ids of ``proposed``, [M], all different."""

    def __init__(self, match: VocabularyMatch, device: torch.device) -> None:
        super().__init__()
        self.coverage = match.coverage
        pairs = sorted(match.proposals.items())
        for name, ids in (
            ("draft_ids", match.draft_ids),
            ("proposed", [draft for draft, _ in pairs]),
            ("target_ids", [target for _, target in pairs]),
        ):
            self.register_buffer(name, torch.tensor(ids, dtype=torch.int64, device=device), persistent=False)

    def inputs(self, tokens_T: Tensor) -> Tensor:
        """Return the draft's ids of target ids."""
        return self.draft_ids[tokens_T]

    def outputs(self, logits_RV: Tensor) -> Tensor:
        """Return the columns [R, M] of the draft's logits that are proposed; ``target_ids`` are their target ids."""
        return logits_RV.index_select(1, self.proposed)
