"""Step counts of two drafts on the same recorded answers.

Recorded text does not depend on the draft. One teacher-forced pass per draft and depth therefore gives the number of
steps exactly, at any temperature, and the difference of the drafts has no variance from different texts.

Shape suffixes: R rows, A answer slots, I roots, K depths or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_worker.capture import Record
from specdecode_worker.contract import TreeShape
from specdecode_worker.models.checkpoints.draft_weights import Draft
from specdecode_worker.training.data.shards import Conversation
from specdecode_worker.training.distillation.record_replay import RecordPositions
from specdecode_worker.training.evaluation.acceptance_replay import RANKS, StepCounts
from specdecode_worker.training.heads.trainable_drafts import batch_for, logits_of, unrolled, vocabulary_of

_ROWS = 64


@dataclass(frozen=True, slots=True)
class Sample:
    """Replayed record with the states that drafts read."""

    record: Record
    conversation: Conversation


@dataclass(frozen=True, slots=True)
class CalibratedDraft:
    """Draft head and the factors on its logits by depth for sampled text.

    The last factor applies to all deeper depths; without factors it is 1.
    """

    head: Draft
    sharpness: tuple[float, ...] = ()

    def factor(self, depth: int) -> float:
        """Return the factor on the logits at ``depth``."""
        return self.sharpness[min(depth, len(self.sharpness) - 1)] if self.sharpness else 1.0


@torch.inference_mode()
def count_steps(
    drafts: Sequence[CalibratedDraft], sample: Sample, shape: TreeShape, eos_token_ids: tuple[int, ...], vocab_size: int
) -> list[StepCounts]:
    """Return for each draft the step counts of ``shape`` through one answer.

    ``StepCounts.tokens`` excludes the first token of the answer.
    """
    first = sample.record.prompt_length
    count = len(sample.conversation.tokens_N) - first
    states = [_states(draft.head, sample.conversation, max(shape.depths)) for draft in drafts]
    ranks_by_draft: list[list[Tensor]] = [[] for _ in drafts]
    for start in range(0, count, _ROWS):
        here = slice(start, min(start + _ROWS, count))
        rows = RecordPositions(sample.record, first + start, here.stop - start, eos_token_ids, vocab_size)
        wanted_R = torch.tensor(sample.record.tokens[first + start + 1 : first + here.stop + 1])
        for ranks, draft, states_KAE in zip(ranks_by_draft, drafts, states, strict=True):
            by_depth = [_ranks(draft, rows, state_AE[here], k, wanted_R) for k, state_AE in enumerate(states_KAE)]
            ranks.append(torch.stack(by_depth, dim=1))
    return [_count_steps_of_ranks(_by_root(torch.cat(ranks)), shape) for ranks in ranks_by_draft]


def _states(head: Draft, conversation: Conversation, depth: int) -> list[Tensor]:
    """Return the head's states by depth, [A, E], at every slot of the answer."""
    batch = batch_for(head, [conversation], next(head.parameters()).dtype)
    return [state_BAE[0] for state_BAE, _ in unrolled(head, batch, depth)]


def _ranks(draft: CalibratedDraft, rows: RecordPositions, state_RE: Tensor, depth: int, wanted_R: Tensor) -> Tensor:
    """Return the rank of the recorded token among the draft's proposals, [R], or ``RANKS`` for a miss."""
    logits_RV = logits_of(draft.head, state_RE, depth).cpu()
    k = min(RANKS, logits_RV.shape[-1])
    target_ids_V = vocabulary_of(draft.head, logits_RV.shape[-1]).cpu()
    best_RK = rows.propose(logits_RV, target_ids_V, draft.factor(depth), k)
    hit_RK = best_RK == wanted_R[:, None]
    return torch.where(hit_RK.any(dim=-1), hit_RK.int().argmax(dim=-1), RANKS)


def _by_root(by_slot_AK: Tensor) -> Tensor:
    """Return ranks by root, [roots, depth], from ranks by slot.

    Depth k of root i was computed at slot i + k. Beyond the end of the answer every entry is a miss.
    """
    ranks_by_draft = torch.full_like(by_slot_AK, RANKS)
    for k in range(by_slot_AK.shape[1]):
        ranks_by_draft[: len(ranks_by_draft) - k, k] = by_slot_AK[k:, k]
    return ranks_by_draft


def _count_steps_of_ranks(ranks_IK: Tensor, shape: TreeShape) -> StepCounts:
    """Return the step counts of ``shape`` through one answer."""
    counts = StepCounts()
    counts.walk(ranks_IK, shape)
    # The last step may emit a token beyond the end of the answer, which no client receives.
    counts.tokens = len(ranks_IK)
    return counts
