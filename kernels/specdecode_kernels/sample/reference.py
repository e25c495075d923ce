"""Reference implementation of logit penalties and truncation in plain PyTorch.

Order and meaning are those of vLLM (vllm/v1/sample/sampler.py, vllm/model_executor/layers/utils.py): blocked tokens,
bias, repetition, frequency and presence penalties; then temperature, min-p, top-k, top-p. Rows are independent: the
parameters of one row change no bit of another.

Tensor suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Truncation(NamedTuple):
    """Top-k, top-p and min-p of rows, int64 and floats; see `processed`."""

    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor

    def of(self, rows: slice | Tensor) -> Truncation:
        """Return those of some rows."""
        return Truncation(self.top_k_R[rows], self.top_p_R[rows], self.min_p_R[rows])


def adjusted(
    logits_RV: Tensor,
    *,
    bias_RV: Tensor,
    blocked_RV: Tensor,
    prompt_RV: Tensor,
    counts_RV: Tensor,
    repetition_R: Tensor,
    frequency_R: Tensor,
    presence_R: Tensor,
) -> Tensor:
    """Return logits [R, V] (at least fp32) after the adjustments that also affect greedy decoding.

    Args:
        logits_RV: Logits of the target.
        bias_RV: Values that are added to the logits.
        blocked_RV: Bool mask of tokens that cannot be chosen.
        prompt_RV: Bool mask of tokens that occur in the prompt.
        counts_RV: Number of occurrences of each token in the answer so far.
        repetition_R: Repetition penalty (1: none). It divides positive and multiplies negative logits of tokens that
            occur in the prompt or the answer.
        frequency_R: Penalty subtracted for every occurrence in the answer.
        presence_R: Penalty subtracted once for every token that occurs in the answer.
    """
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    logits = (logits_RV.to(wide) + bias_RV.to(wide)).masked_fill(blocked_RV, -math.inf)
    repetition_R1 = repetition_R.to(wide)[:, None]
    repeated = torch.where(logits > 0, logits / repetition_R1, logits * repetition_R1)
    logits = torch.where(prompt_RV | (counts_RV > 0), repeated, logits)
    logits = logits - frequency_R.to(wide)[:, None] * counts_RV.to(wide)
    return logits - presence_R.to(wide)[:, None] * (counts_RV > 0)


def processed(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor | None = None
) -> Tensor:
    """Return log-probabilities [R, V] (at least fp32), -inf where a token is cut.

    ``temperature`` 0 is greedy: all mass is on the first of the largest logits. ``min_p`` 0 or None, ``top_k`` 0 and
    ``top_p`` 1 cut nothing. Min-p keeps tokens with at least that share of the probability of the best token. Top-k
    keeps all tokens that tie with the k-th logit. Top-p keeps the fewest tokens, best first, that together reach a
    share p of the mass left by min-p and top-k.
    """
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    logits = logits_RV.to(wide)
    greedy_R = temperature_R == 0
    scaled = logits / torch.where(greedy_R, 1.0, temperature_R).to(wide)[:, None]
    truncated = _top_p(_top_k(_min_p(scaled, min_p_R), top_k_R), top_p_R)
    best = torch.full_like(logits, -math.inf).scatter(-1, logits.argmax(-1, keepdim=True), 0.0)
    return torch.where(greedy_R[:, None], best, torch.log_softmax(truncated, dim=-1))


def _min_p(logits_RV: Tensor, min_p_R: Tensor | None) -> Tensor:
    """Set logits below the min-p floor to -inf."""
    if min_p_R is None:
        return logits_RV
    floor_R1 = logits_RV.amax(-1, keepdim=True) + min_p_R.to(logits_RV.dtype).log()[:, None]
    return logits_RV.masked_fill(logits_RV < floor_R1, -math.inf)


def _top_k(logits_RV: Tensor, top_k_R: Tensor) -> Tensor:
    """Set logits below the k-th largest to -inf."""
    size = logits_RV.shape[-1]
    k = torch.where((top_k_R <= 0) | (top_k_R > size), size, top_k_R)
    lowest = logits_RV.sort(dim=-1, descending=True).values.gather(-1, (k - 1)[:, None])
    return logits_RV.masked_fill(logits_RV < lowest, -math.inf)


def _top_p(logits_RV: Tensor, top_p_R: Tensor) -> Tensor:
    """Set logits outside of the top-p nucleus to -inf."""
    order = torch.sort(logits_RV, dim=-1, descending=True, stable=True).indices
    mass = torch.softmax(logits_RV, dim=-1).gather(-1, order)
    before = mass.cumsum(-1) - mass
    cut = (before >= top_p_R[:, None].to(before.dtype)) & (top_p_R < 1)[:, None]
    cut[:, 0] = False
    return logits_RV.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), -math.inf)
