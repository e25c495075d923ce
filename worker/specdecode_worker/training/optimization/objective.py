"""The training loss: divergence from the target's distribution, then expected tokens per step.

Training starts with the divergence from the target's distribution at every unrolled depth. Deeper depths weigh less,
because they are reached only where the drafts before them were accepted. It ends with the quantity that coupled
sampling rewards. With S_k = sum of min(p, q) at depth k, the highest probability with which target and draft can agree
there, the expected tokens per step from a root are 1 + S_1 + S_1 S_2 + ..., and the loss is -log of them. p and q are
taken at a temperature of the served mix.

Shape suffixes: R rows (valid slots), V draft vocabulary, B texts, A answer slots, E hidden size, T temperatures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_worker.models.checkpoints.draft_weights import Draft
from specdecode_worker.training.data.normalizers import TEMPERATURES
from specdecode_worker.training.data.shards import Conversation
from specdecode_worker.training.heads.root_sampling import RootShare, all_roots, root_count
from specdecode_worker.training.heads.trainable_drafts import logits_of, unrolled, vocabulary_of
from specdecode_worker.training.heads.unroll import Batch, shifted_back
from specdecode_worker.training.optimization.overlap import overlap, soft_cross_entropy

_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Parameters of the loss of one training step.

    ``divergence`` is the weight of the divergence term, 0 to 1. The acceptance term gets the rest. ``decay`` is the
    factor by which the divergence weight of each depth falls from the depth before.
    """

    depth: int
    decay: float
    divergence: float = 1.0
    temperature: float = 1.0
    """Temperature of the acceptance term; one of ``normalizers.TEMPERATURES``."""
    sample_seed: int | None = None
    """Seed of the roots that are trained at deeper depths, see ``root_sampling``. None trains all roots."""


def root_counts(conversations: Sequence[Conversation], depth: int, share: RootShare = all_roots) -> list[int]:
    """Return for each depth k the number of roots in ``conversations`` that are trained at that depth.

    A root needs an answer slot k slots after it.
    """
    lengths = [len(c.tokens_N) - c.answer_start for c in conversations]
    return [sum(root_count(length, k, share) for length in lengths) for k in range(depth)]


@torch.no_grad()
def target_distribution(
    final_RE: Tensor,
    output_VE: Tensor,
    vocabulary: Tensor,
    *,
    temperature: float = 1.0,
    normaliser_R: Tensor | None = None,
) -> Tensor:
    """Return the target's probabilities over the draft vocabulary, [R, V], in the dtype of ``final_RE``.

    Args:
        final_RE: Hidden states of the target after its final norm.
        output_VE: Output matrix of the target over its whole vocabulary.
        vocabulary: Target ids of the draft vocabulary.
        temperature: Temperature of the softmax.
        normaliser_R: Log of the sum of exp(logit / temperature) over the target's whole vocabulary. With it, the
            probabilities are those of the whole vocabulary and sum to less than one. Without it, they are renormalized
            over the draft vocabulary.
    """
    output_VE = output_VE[vocabulary]
    normalisers = torch.split(normaliser_R, _ROWS) if normaliser_R is not None else None
    parts = []
    for i, x in enumerate(torch.split(final_RE, _ROWS)):
        logits = (x @ output_VE.T).float().div_(temperature)
        known = logits.sub_(normalisers[i][:, None]).exp_() if normalisers else torch.softmax(logits, dim=-1)
        parts.append(known.to(x.dtype))
    return torch.cat(parts)


def loss_of(
    draft: Draft, batch: Batch, output_VE: Tensor, aim: LossSettings, counts: Sequence[int] | None = None
) -> Tensor:
    """Return the scalar loss of one batch, averaged over ``counts``.

    Args:
        draft: Draft in training.
        batch: Recorded texts, see ``make_batch``.
        output_VE: Output matrix of the target.
        aim: Parameters of the loss.
        counts: ``root_counts`` of all batches of the optimizer step, so that the losses of its batches add up to the
            mean of the step. Default: the counts of this batch.
    """
    valid_R = batch.valid_BA.flatten()
    unrolls = [
        (logits_of(draft, state_BAE[rooted_BA], k), rooted_BA)
        for k, (state_BAE, rooted_BA) in enumerate(unrolled(draft, batch, aim.depth, aim.sample_seed))
    ]
    counts = counts or [max(1, int(rooted_BA.sum())) for _, rooted_BA in unrolls]
    vocabulary = vocabulary_of(draft, len(output_VE))
    total = torch.zeros((), device=output_VE.device)
    if aim.divergence > 0:
        target_RV = _target(batch, output_VE, vocabulary, 1.0)
        total = total + aim.divergence * _divergence(unrolls, target_RV, valid_R, aim, counts)
    if aim.divergence < 1:
        target_RV = _target(batch, output_VE, vocabulary, aim.temperature)
        total = total + (1 - aim.divergence) * _acceptance(unrolls, target_RV, batch.valid_BA, aim, counts)
    return total


def _target(batch: Batch, output_VE: Tensor, vocabulary: Tensor, temperature: float) -> Tensor:
    """Return the target's probabilities at the valid slots of ``batch``, [R, V]."""
    valid_R = batch.valid_BA.flatten()
    normaliser_R = None
    if batch.normalisers_BAT is not None:
        normaliser_R = batch.normalisers_BAT[:, :, TEMPERATURES.index(temperature)].flatten()[valid_R]
    final_RE = batch.final_BAE.flatten(0, 1)[valid_R]
    return target_distribution(final_RE, output_VE, vocabulary, temperature=temperature, normaliser_R=normaliser_R)


def _divergence(
    unrolls: Sequence[tuple[Tensor, Tensor]],
    target_RV: Tensor,
    valid_R: Tensor,
    aim: LossSettings,
    counts: Sequence[int],
) -> Tensor:
    """Return the cross entropy per answer token, averaged over the depths with weights that sum to one."""
    weights = [aim.decay**k for k in range(aim.depth)]
    total = torch.zeros((), device=target_RV.device)
    for k, (logits_RV, rooted_BA) in enumerate(unrolls):
        weight_R = torch.full((len(logits_RV),), weights[k] / sum(weights) / max(1, counts[k]), device=total.device)
        total = total + soft_cross_entropy(logits_RV, target_RV[rooted_BA.flatten()[valid_R]], weight_R)
    return total


def _acceptance(
    unrolls: Sequence[tuple[Tensor, Tensor]],
    target_RV: Tensor,
    valid_BA: Tensor,
    aim: LossSettings,
    counts: Sequence[int],
) -> Tensor:
    """Return -log of the expected tokens per step, averaged over the roots."""
    path_BA = torch.ones(valid_BA.shape, device=valid_BA.device)
    expected_BA = torch.ones_like(path_BA)
    for k, (logits_RV, rooted_BA) in enumerate(unrolls):
        own_RV = target_RV[rooted_BA[valid_BA]]
        overlap_BA = torch.zeros_like(path_BA).masked_scatter(rooted_BA, overlap(logits_RV, own_RV, aim.temperature))
        # Depth k of root i was computed at slot i + k. Beyond the end of the text, and where the root was dropped,
        # every draft counts as rejected.
        path_BA = path_BA * shifted_back(overlap_BA, k)
        expected_BA = expected_BA + path_BA
    return -expected_BA.log()[valid_BA].sum() / max(1, counts[0])
