"""Cross entropy and overlap of a draft's and the target's distribution, with gradients computed in the forward pass.

Over a vocabulary of thousands both operations are bound by memory bandwidth. Autograd's own versions read and write the
whole matrix about a dozen times. Shape suffixes: R rows (slots), V draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Rows of logits processed at once: [256, 8192] in fp32 (8 MiB) stays in the processor's cache.
_ROWS = 256


class _SoftCrossEntropy(torch.autograd.Function):
    """Sum over rows of weight * cross entropy(target, softmax(logits))."""

    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, target_RV: Tensor, weight_R: Tensor) -> Tensor:
        gradient = torch.empty_like(logits_RV)
        loss = torch.zeros((), device=logits_RV.device)
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
    """Return the weighted sum over rows of the cross entropy of softmax(``logits_RV``), a scalar.

    ``target_RV`` are probabilities. They sum to less than one in a row where the draft vocabulary lacks some tokens.
    """
    loss: Tensor = _SoftCrossEntropy.apply(logits_RV, target_RV, weight_R)
    return loss


class _Overlap(torch.autograd.Function):
    """Sum over the vocabulary of min(p, q) for each row."""

    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, target_RV: Tensor, temperature: float) -> Tensor:
        gradient = torch.empty_like(logits_RV)
        overlap_R = torch.empty(len(logits_RV), device=logits_RV.device)
        for start in range(0, len(logits_RV), _ROWS):
            here = slice(start, start + _ROWS)
            q = torch.softmax(logits_RV[here].float() / temperature, dim=-1)
            target = target_RV[here].float()
            wanting = q * (q < target)  # draft probability of the tokens where raising it raises the overlap
            overlap_R[here] = torch.minimum(q, target).sum(dim=-1)
            gradient[here] = wanting.sub_(q.mul_(wanting.sum(dim=-1, keepdim=True))).div_(temperature)
        ctx.save_for_backward(gradient)
        return overlap_R

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(grad_outputs[0][:, None]), None, None


def overlap(logits_RV: Tensor, target_RV: Tensor, temperature: float) -> Tensor:
    """Return the sum over v of min(p, q) with q = softmax(logits / temperature), [R].

    This is the probability that an optimal coupling of draft and target draws the same token.
    """
    overlap_R: Tensor = _Overlap.apply(logits_RV, target_RV, temperature)
    return overlap_R
