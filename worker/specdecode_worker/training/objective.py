"""What the head is trained to do: at every unrolled depth, give the target's own distribution of the next token.

The target's distribution is taken over the draft vocabulary and renormalised there; how much of it lies outside is
reported, never hidden. Deeper steps weigh less: they are reached only where the ones before were right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdecode_worker.models.eagle3 import Eagle3Head
from specdecode_worker.training.unroll import Batch, unroll

# Rows of logits worked on at once: [256, 8192] in fp32 stays in the processor's cache.
_ROWS = 256


class _SoftCrossEntropy(torch.autograd.Function):
    """Sum over rows of weight * cross entropy(target, softmax(logits)), its gradient made in the forward pass.

    With 8192 columns this is bound by memory: autograd's own version goes over the whole matrix a dozen times.
    """

    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, target_RV: Tensor, weight_R: Tensor) -> Tensor:
        gradient = torch.empty_like(logits_RV)
        loss = torch.zeros(())
        for start in range(0, len(logits_RV), _ROWS):
            here = slice(start, start + _ROWS)
            log_p = torch.log_softmax(logits_RV[here], dim=-1, dtype=torch.float32)
            target, weight = target_RV[here].float(), weight_R[here]
            loss -= torch.linalg.vecdot(log_p, target) @ weight
            gradient[here] = log_p.exp_().sub_(target).mul_(weight[:, None])
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(grad_outputs[0]), None, None


def soft_cross_entropy(logits_RV: Tensor, target_RV: Tensor, weight_R: Tensor) -> Tensor:
    """Scalar; ``target_RV`` are probabilities."""
    loss: Tensor = _SoftCrossEntropy.apply(logits_RV, target_RV, weight_R)
    return loss


@torch.no_grad()
def target_distribution(final_RE: Tensor, output_VE: Tensor, vocabulary: Tensor) -> Tensor:
    """The target's probabilities [R, draft vocabulary], renormalised; ``final_RE`` comes after its last norm."""
    output_VE = output_VE[vocabulary]
    parts = [torch.softmax((x @ output_VE.T).float(), dim=-1).to(x.dtype) for x in torch.split(final_RE, _ROWS)]
    return torch.cat(parts)


def loss_of(head: Eagle3Head, batch: Batch, output_VE: Tensor, *, depth: int, decay: float) -> Tensor:
    """Mean loss per answer token, weighted over the unrolled depths with weights that sum to one."""
    weights = [decay**k for k in range(depth)]
    valid_R = batch.valid_BA.flatten()
    target_RV = target_distribution(batch.final_BAE.flatten(0, 1)[valid_R], output_VE, head.target_ids)
    total = torch.zeros(())
    for weight, (state_BAE, rooted_BA) in zip(weights, unroll(head, batch, depth), strict=True):
        logits_RV = head.logits(state_BAE.flatten(0, 1)[valid_R])
        weight_R = rooted_BA.flatten()[valid_R].float() / rooted_BA.sum() * (weight / sum(weights))
        total = total + soft_cross_entropy(logits_RV, target_RV, weight_R)
    return total
