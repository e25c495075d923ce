"""Logit penalties and truncation as the engine calls them.

On a CPU the results equal the reference bit for bit; work that no row needs is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.noise.op import LARGE, gumbel, gumbel_row
from specdecode_kernels.sample.reference import Truncation

_SAFE = 1e-4
"""Below this value, 1 - top_p is too close to the rounding error of sums to derive a bound from it."""


def adjusted(
    logits_RV: Tensor,
    *,
    allowed: tuple[Tensor, Tensor] | None = None,
    bias: tuple[Tensor, Tensor] | None = None,
    blocked: tuple[Tensor, Tensor] | None = None,
    prompt_RV: Tensor | None = None,
    counts_RV: Tensor | None = None,
    repetition_R: Tensor | None = None,
    frequency_R: Tensor | None = None,
    presence_R: Tensor | None = None,
) -> Tensor:
    """Adjust logits as `reference.adjusted` does; None means that no row uses the adjustment.

    ``allowed`` is (token ids [R, K], bool [R, 1]: whether other tokens are blocked), ``bias`` (token ids, values) and
    ``blocked`` (token ids, bool: blocked now), both [R, K]. A token that occurs twice in a row of ``bias`` adds twice;
    one that occurs twice in a row of ``blocked`` must have the same value both times. ``logits_RV`` is not modified.
    """
    logits = torch.empty_like(logits_RV, dtype=torch.promote_types(logits_RV.dtype, torch.float32)).copy_(logits_RV)
    if allowed is not None:
        kept_RK = logits.gather(1, allowed[0])
        logits.masked_fill_(allowed[1], -math.inf).scatter_(1, allowed[0], kept_RK)
    if bias is not None:
        logits.scatter_add_(1, bias[0], bias[1].to(logits.dtype))
    if blocked is not None:
        logits.scatter_(1, blocked[0], logits.gather(1, blocked[0]).masked_fill_(blocked[1], -math.inf))
    if repetition_R is not None:
        assert prompt_RV is not None
        assert counts_RV is not None
        repetition_R1 = repetition_R.to(logits.dtype)[:, None]
        repeated = torch.where(logits > 0, logits / repetition_R1, logits * repetition_R1)
        logits = torch.where(prompt_RV | (counts_RV > 0), repeated, logits)
    if frequency_R is not None:
        assert counts_RV is not None
        logits -= frequency_R.to(logits.dtype)[:, None] * counts_RV.to(logits.dtype)
    if presence_R is not None:
        assert counts_RV is not None
        logits -= presence_R.to(logits.dtype)[:, None] * (counts_RV > 0)
    return logits


def processed(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor | None = None,
    *,
    truncated: bool,
    waits: bool = False,
) -> Tensor:
    """Compute log-probabilities as `reference.processed` does, for rows of temperature > 0.

    ``truncated`` must be True if any row truncates; the host knows this without waiting for the device. With ``waits``
    the rows that do are read, and others are not sorted, on a CPU.
    """
    if dispatch.on_gpu(logits_RV) and logits_RV.dtype != torch.float64:
        from specdecode_kernels.sample import kernel

        least_R = torch.zeros_like(top_p_R) if min_p_R is None else min_p_R
        truncation = Truncation(top_k_R, top_p_R, least_R) if truncated else None
        row_cuts = kernel.cuts(logits_RV, temperature_R, truncation)
        return kernel.processed(logits_RV, temperature_R, row_cuts)
    wide = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    scaled = wide / temperature_R.to(wide.dtype)[:, None]
    if truncated:
        cuts = top_k_R, top_p_R, torch.zeros_like(top_p_R) if min_p_R is None else min_p_R
        scaled = (_cut_by_row if is_large(scaled) else _cut_some if waits else _cut)(scaled, *cuts)
    return torch.log_softmax(scaled, dim=-1)


def is_large(logits_RV: Tensor) -> bool:
    """Return whether rows of these logits are processed one by one: on a CPU, with a large vocabulary."""
    return logits_RV.device.type == "cpu" and logits_RV.shape[1] >= LARGE


def scores(
    logits_RV: Tensor,
    temperature_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
    truncation: Truncation | None,
    ids_V: Tensor | None = None,
    vocab_size: int = 0,
    noise_RV: Tensor | None = None,
    sharpness: float = 1.0,
) -> Tensor:
    """Return log p + noise [R, V] of rows of temperature > 0 and the logits of the others, without a kernel.

    ``ids_V`` and ``vocab_size`` are as for `sampled_scores`. ``noise_RV`` is the noise over the whole vocabulary if it
    was drawn before, on a CPU; then the parameters of rows may be read. ``sharpness`` multiplies the logits of rows of
    temperature > 0.
    """
    waits = noise_RV is not None
    if noise_RV is None:
        noise_RV = gumbel(seed_R, position_R, logits_RV.shape[1] if ids_V is None else vocab_size)
    greedy_R = temperature_R == 0
    cuts = truncation or (position_R, position_R)  # not read without truncation
    safe_R = temperature_R.masked_fill(greedy_R, 1.0)
    sharp_RV = logits_RV if sharpness == 1 else logits_RV * sharpness
    logp_RV = processed(sharp_RV, safe_R, *cuts, truncated=truncation is not None, waits=waits)
    return torch.where(greedy_R[:, None], logits_RV, logp_RV + (noise_RV if ids_V is None else noise_RV[:, ids_V]))


def sampled_scores(
    logits_RV: Tensor,
    temperature_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
    truncation: Truncation | None,
    ids_V: Tensor | None = None,
    vocab_size: int = 0,
) -> Iterator[tuple[int, Tensor]]:
    """Yield (row, log p + noise [V]) of every row of temperature > 0, on a CPU.

    ``ids_V`` are the target ids of the columns, of a vocabulary of ``vocab_size`` tokens; None if the columns are ids.
    """
    temperatures, seeds, positions = temperature_R.tolist(), seed_R.tolist(), position_R.tolist()
    for row in [row for row, temperature in enumerate(temperatures) if temperature > 0]:
        here = slice(row, row + 1)
        cuts = (position_R[here],) * 2 if truncation is None else truncation.of(here)
        logp_RV = processed(logits_RV[here], temperature_R[here], *cuts, truncated=truncation is not None)
        size = logits_RV.shape[1] if ids_V is None else vocab_size
        noise_V = gumbel_row(seeds[row], positions[row], size)
        yield row, logp_RV[0] + (noise_V if ids_V is None else noise_V[ids_V])


def _cut_by_row(logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Truncate row by row, and only with the parameters that a row uses.

    On a CPU, a full sort costs more than the rest of sampling together.
    """
    top_p, log_min_p = top_p_R.to(logits_RV.dtype).tolist(), min_p_R.to(logits_RV.dtype).log().tolist()
    for row_V, k, p, log_least in zip(logits_RV, top_k_R.tolist(), top_p, log_min_p, strict=True):
        if log_least > -math.inf:
            row_V.masked_fill_(row_V < row_V.max() + log_least, -math.inf)
        if 0 < k < len(row_V):
            row_V.masked_fill_(row_V < row_V.topk(k).values[-1], -math.inf)
        if p < 1:
            row_V.masked_fill_(_beyond(row_V, p), -math.inf)
    return logits_RV


def _beyond(logits_V: Tensor, top_p: float) -> Tensor:
    """Return a bool mask [V] of the tokens that top-p cuts.

    All tokens with less than (1 - p) / V have less than 1 - p together, so none of them is kept, and only the others
    are sorted. Half of that bound leaves room for rounding. Equal tokens are ordered as in the reference.
    """
    mass_V = torch.softmax(logits_V, dim=-1)
    bound = (1 - top_p) / len(logits_V) / 2 if 1 - top_p > _SAFE else 0.0
    candidates_C = torch.nonzero(~(mass_V < bound))[:, 0]  # all of a row without any token, whose masses are NaN
    order_C = torch.sort(logits_V[candidates_C], descending=True, stable=True).indices
    mass_C = mass_V[candidates_C[order_C]]
    keep_mask_C = mass_C.cumsum(-1) - mass_C < top_p
    keep_mask_C[0] = True
    return torch.ones_like(logits_V, dtype=torch.bool).index_fill_(0, candidates_C[order_C[keep_mask_C]], False)


def _cut_some(logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Truncate the rows that have a parameter for it."""
    here_T = torch.nonzero((top_k_R > 0) | (top_p_R < 1) | (min_p_R > 0))[:, 0]
    cut_TV = _cut(logits_RV[here_T], top_k_R[here_T], top_p_R[here_T], min_p_R[here_T])
    return logits_RV.index_copy_(0, here_T, cut_TV)


def _cut(logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Truncate all rows with one sort.

    No size depends on the data, so the host does not wait for an accelerator.
    """
    size = logits_RV.shape[-1]
    floor_R1 = logits_RV.amax(-1, keepdim=True) + min_p_R.to(logits_RV.dtype).log()[:, None]
    logits_RV = logits_RV.masked_fill(logits_RV < floor_R1, -math.inf)
    ordered, order = torch.sort(logits_RV, dim=-1, descending=True, stable=True)
    k_R = torch.where((top_k_R <= 0) | (top_k_R > size), size, top_k_R)
    logits_RV = logits_RV.masked_fill_(logits_RV < ordered.gather(-1, (k_R - 1)[:, None]), -math.inf)
    mass = torch.softmax(logits_RV, dim=-1).gather(-1, order)
    cut = (mass.cumsum(-1) - mass >= top_p_R[:, None].to(mass.dtype)) & (top_p_R < 1)[:, None]
    cut[:, 0] = False
    return logits_RV.masked_fill_(torch.zeros_like(cut).scatter_(-1, order, cut), -math.inf)
