"""The two measures of a draft's distribution against the target's, each with its gradient made in the forward pass.

Over a vocabulary of thousands both are bound by memory: autograd's own versions go over the whole matrix a dozen times.
Shape suffixes: R rows (slots), V draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Rows of logits worked on at once: [256, 8192] in fp32 stays in the processor's cache.
_ROWS = 256


class _SoftCrossEntropy(torch.autograd.Function):
    """Sum over rows of weight * cross entropy(target, softmax(logits))."""

    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, target_RV: Tensor, weight_R: Tensor) -> Tensor:
        gradient = torch.empty_like(logits_RV)
        loss = torch.zeros(())
        for start in range(0, len(logits_RV), _ROWS):
            here = slice(start, start + _ROWS)
            log_p = torch.log_softmax(logits_RV[here], dim=-1, dtype=torch.float32)
            target, weight = target_RV[here].float(), weight_R[here]
            loss -= torch.linalg.vecdot(log_p, target) @ weight
            known_R1 = target.sum(dim=-1, keepdim=True)
            gradient[here] = log_p.exp_().mul_(known_R1).sub_(target).mul_(weight[:, None])
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(grad_outputs[0]), None, None


def soft_cross_entropy(logits_RV: Tensor, target_RV: Tensor, weight_R: Tensor) -> Tensor:
    """Scalar; ``target_RV`` are probabilities, which sum to less than one where the draft does not know all tokens."""
    loss: Tensor = _SoftCrossEntropy.apply(logits_RV, target_RV, weight_R)
    return loss


class _Overlap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, target_RV: Tensor, temperature: float) -> Tensor:
        gradient = torch.empty_like(logits_RV)
        found_R = torch.empty(len(logits_RV))
        for start in range(0, len(logits_RV), _ROWS):
            here = slice(start, start + _ROWS)
            q = torch.softmax(logits_RV[here].float() / temperature, dim=-1)
            target = target_RV[here].float()
            wanting = q * (q < target)  # where more of the draft's probability would overlap
            found_R[here] = torch.minimum(q, target).sum(dim=-1)
            gradient[here] = wanting.sub_(q.mul_(wanting.sum(dim=-1, keepdim=True))).div_(temperature)
        ctx.save_for_backward(gradient)
        return found_R

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(grad_outputs[0][:, None]), None, None


def overlap(logits_RV: Tensor, target_RV: Tensor, temperature: float) -> Tensor:
    """[R] sum over v of min(p, q), q = softmax(logits / temperature): the chance that an optimal coupling agrees."""
    found_R: Tensor = _Overlap.apply(logits_RV, target_RV, temperature)
    return found_R
