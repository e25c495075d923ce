"""Validation during training: acceptance by depth and domain, and divergence, on held-out conversations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdecode_worker.contract import TreeShape
from specdecode_worker.models.checkpoints.draft_weights import Draft
from specdecode_worker.training.data.shards import Conversation
from specdecode_worker.training.evaluation.acceptance_replay import StepCounts, target_token_ranks
from specdecode_worker.training.heads.trainable_drafts import batch_for, max_depth
from specdecode_worker.training.optimization.objective import LossSettings, loss_of, root_counts

CHAIN = 3
_TEXTS = 8


@torch.inference_mode()
def validation_line(draft: Draft, conversations: Sequence[Conversation], output_VE: Tensor) -> dict[str, Any]:
    """Return the validation results of a draft as an entry of the history.

    Tokens per step and acceptance are those of a chain of depth 3 in greedy replay, overall and by domain.
    ``divergence`` is the cross entropy at the first depth, in nats per token.
    """
    depth = max_depth(draft, CHAIN)
    shape = TreeShape.chain(depth)
    counts_by_domain: dict[str, StepCounts] = defaultdict(StepCounts)
    divergence = 0.0
    slots = root_counts(conversations, 1)
    texts = sorted(conversations, key=lambda c: len(c.tokens_N))
    for start in range(0, len(texts), _TEXTS):
        part = texts[start : start + _TEXTS]
        for conversation, ranks in zip(part, target_token_ranks(draft, part, output_VE, depth), strict=True):
            counts_by_domain[""].walk(ranks, shape)
            counts_by_domain[conversation.domain].walk(ranks, shape)
        batch = batch_for(draft, part, output_VE.dtype)
        divergence += float(loss_of(draft, batch, output_VE, LossSettings(depth=1, decay=1.0), slots))
    overall = counts_by_domain.pop("", StepCounts())
    return {
        "divergence": round(divergence, 4),
        "acceptance": [round(a, 4) for a in overall.acceptance],
        "tokens_per_step": round(overall.tokens_per_step, 4),
        "domains": {
            name: {"tokens_per_step": round(t.tokens_per_step, 4), "acceptance": [round(a, 4) for a in t.acceptance]}
            for name, t in sorted(counts_by_domain.items())
        },
    }
