"""Temperature, min-p, top-k and top-p on a GPU without a sort: one threshold per row (README.md).

`verify` and `top_k` read the thresholds and never compute probabilities; `processed` writes the probabilities for
callers that need them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
ROOM = 8192
"""Maximum number of listed candidates of a row. A row with more candidates is searched over its whole vocabulary."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Truncation thresholds of a batch of rows of scaled logits.

    A row keeps the logits above ``threshold_R`` (fp32) and, of those equal to it, the tokens up to ``last_R`` (int32).
    ``lse_R`` (fp32) is the natural log-sum-exp of the logits that pass the cuts.
    """

    threshold_R: Tensor
    last_R: Tensor
    lse_R: Tensor


@triton.jit
def scaled(logits_V, token, inside, temperature, sharpness):
    """Load logits and scale them by sharpness and temperature, in fp32; -inf outside.

    The rounding is the same in every kernel that calls this. Greedy rows (temperature 0) are not divided. Adding 0
    turns -0 into +0.
    """
    x = tl.load(logits_V + token, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.math.div_rn(x * sharpness, tl.where(temperature > 0, temperature, 1.0)) + 0.0


@triton.jit
def passes_cuts(x, token, threshold, last):
    """Return whether tokens pass the cuts of a row: its threshold, and its last token among equal logits."""
    return (x > threshold) | ((x == threshold) & (token <= last))


@triton.jit
def _key(x):
    """Map fp32 numbers to int32 keys of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _number(key):
    """Map an int32 key back to its fp32 number."""
    key = key.to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _bin(x, top):
    """Return the distance below the best logit in eighths of a nat; 255 means any larger distance."""
    return tl.minimum((top - x) * 8.0, 255.0).to(tl.int32)


@triton.jit
def _members(logits_V, list_C, listed, start, length, temperature, sharpness, floor, BLOCK: tl.constexpr):
    """Load the next (tokens, scaled logits), from the candidate list if there is one, else from the whole row."""
    place = start + tl.arange(0, BLOCK)
    token = tl.where(listed > 0, tl.load(list_C + place, mask=place < listed, other=0), place)
    x = scaled(logits_V, token, place < length, temperature, sharpness)
    return token, tl.where(x >= floor, x, float("-inf"))


@triton.jit
def _search(
    logits_V,
    list_C,
    listed,
    length,
    temperature,
    sharpness,
    floor,
    top,
    wanted,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the largest threshold at which the candidates from it on reach ``wanted``, by count or by mass."""
    low, high = _key(floor).to(tl.int64), _key(top).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        reached = tl.zeros([1], tl.float32)
        for start in range(0, length, BLOCK):
            _, x = _members(logits_V, list_C, listed, start, length, temperature, sharpness, floor, BLOCK)
            weight = tl.exp(x - top) if MASS else (x > float("-inf")).to(tl.float32)
            reached += tl.sum(tl.where(_key(x).to(tl.int64) >= middle, weight, 0.0), 0)
        enough = tl.sum(reached, 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return _number(low)


@triton.jit(do_not_specialize=["temperature_R", "top_k_R", "top_p_R", "min_p_R"])
def _cuts_kernel(
    logits_RV,
    temperature_R,
    top_k_R,
    top_p_R,
    min_p_R,
    lists_RC,
    threshold_R,
    last_R,
    lse_R,
    vocab_size,
    row_stride,
    sharpness,
    TRUNCATED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Compute threshold, last token and log-sum-exp of one row."""
    row = tl.program_id(0).to(tl.int64)
    logits_V, list_C = logits_RV + row * row_stride, lists_RC + row * ROOM
    temperature = tl.load(temperature_R + row)
    v = tl.arange(0, BLOCK)
    top = float("-inf")
    for start in range(0, vocab_size, BLOCK):
        x = scaled(logits_V, start + v, start + v < vocab_size, temperature, sharpness)
        top = tl.maximum(top, tl.max(x, 0))
    floor, top_p = float("-inf"), 1.0
    top_k = tl.zeros([1], tl.int64)
    if TRUNCATED:
        floor = top + tl.log(tl.load(min_p_R + row))
        top_p = tl.load(top_p_R + row)
        top_k += tl.load(top_k_R + row)
    k = tl.sum(top_k, 0)
    by_k, by_p = (k > 0) & (k < vocab_size), top_p < 1.0

    # Total mass that min-p leaves, and the number of tokens at each distance from the best.
    total = 0.0
    counts_H = tl.zeros([256], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        x = scaled(logits_V, start + v, start + v < vocab_size, temperature, sharpness)
        total += tl.sum(tl.where(x >= floor, tl.exp(x - top), 0.0), 0)
        if TRUNCATED and by_k | by_p:
            counts_H += tl.histogram(_bin(x, top), 256)
    threshold, last = floor, vocab_size
    if TRUNCATED and by_k | by_p:
        # Smallest distance that certainly contains enough tokens; tokens farther away are no candidates.
        h = tl.arange(0, 256)
        least_H = tl.cumsum(counts_H.to(tl.float32) * tl.exp((h + 1) * -0.125), 0)
        enough_H = tl.where(by_k, tl.cumsum(counts_H, 0) >= k, least_H >= top_p * total * 1.001)
        far = tl.min(tl.where(enough_H, h, 255), 0)
        near_count = tl.sum(tl.where(h <= far, counts_H, 0), 0)
        listed = tl.where((near_count <= ROOM) & (far < 255), near_count, 0)
        length = tl.where(listed > 0, near_count, vocab_size)
        if listed > 0:
            written = 0
            for start in range(0, vocab_size, BLOCK):
                x = scaled(logits_V, start + v, start + v < vocab_size, temperature, sharpness)
                near = (_bin(x, top) <= far) & (start + v < vocab_size)
                place = written + tl.cumsum(near.to(tl.int32), 0) - 1
                tl.store(list_C + place, start + v, mask=near)
                written += tl.sum(near.to(tl.int32), 0)
            tl.debug_barrier()
        if by_k:
            threshold = _search(
                logits_V, list_C, listed, length, temperature, sharpness, floor, top, k.to(tl.float32), False, BLOCK
            )
            total = 0.0
            for start in range(0, length, BLOCK):
                _, x = _members(logits_V, list_C, listed, start, length, temperature, sharpness, threshold, BLOCK)
                total += tl.sum(tl.exp(x - top), 0)
        if by_p:
            wanted = top_p * total
            threshold = _search(
                logits_V, list_C, listed, length, temperature, sharpness, threshold, top, wanted, True, BLOCK
            )
            # Of the tokens equal to the threshold, only as many as needed are kept, lower token ids first.
            above, seen = 0.0, 0
            for start in range(0, length, BLOCK):
                _, x = _members(logits_V, list_C, listed, start, length, temperature, sharpness, threshold, BLOCK)
                above += tl.sum(tl.where(x > threshold, tl.exp(x - top), 0.0), 0)
            each = tl.exp(threshold - top)
            equals = tl.maximum(tl.ceil((wanted - above) / each).to(tl.int32), 1)
            last = -1
            for start in range(0, length, BLOCK):
                token, x = _members(logits_V, list_C, listed, start, length, temperature, sharpness, threshold, BLOCK)
                equal = x == threshold
                place = seen + tl.cumsum(equal.to(tl.int32), 0)
                last = tl.maximum(last, tl.max(tl.where(equal & (place <= equals), token, -1), 0))
                seen += tl.sum(equal.to(tl.int32), 0)
            total = above + tl.minimum(equals, seen) * each
    tl.store(threshold_R + row, threshold)
    tl.store(last_R + row, last)
    tl.store(lse_R + row, top + tl.log(total))


@triton.jit(do_not_specialize=["temperature_R"])
def _apply_kernel(
    logits_RV,
    temperature_R,
    threshold_R,
    last_R,
    lse_R,
    out_RV,
    vocab_size,
    row_stride,
    BLOCK: tl.constexpr,
):
    """Write the log-probabilities of one block of a row."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    x = scaled(logits_RV + row * row_stride, token, inside, tl.load(temperature_R + row), 1.0)
    keep_mask = passes_cuts(x, token, tl.load(threshold_R + row), tl.load(last_R + row))
    tl.store(
        out_RV + row * vocab_size + token, tl.where(keep_mask, x - tl.load(lse_R + row), float("-inf")), mask=inside
    )


def cuts(
    logits_RV: Tensor,
    temperature_R: Tensor,
    truncation: tuple[Tensor, Tensor, Tensor] | None,
    *,
    sharpness: float = 1.0,
    block: int = BLOCK,
    room: int = ROOM,
) -> Cuts:
    """Compute the thresholds of rows of temperature > 0.

    ``truncation`` is (top-k, top-p, min-p) per row, int64 and fp32; None truncates nothing. One program serves one row,
    so the result does not depend on the other rows of the batch. A row's logits must be contiguous.
    """
    rows, vocab_size = logits_RV.shape
    assert logits_RV.stride(1) == 1, "a row's logits must be contiguous"
    device = logits_RV.device
    threshold_R = torch.empty(rows, dtype=torch.float32, device=device)
    last_R = torch.empty(rows, dtype=torch.int32, device=device)
    lse_R = torch.empty(rows, dtype=torch.float32, device=device)
    lists_RC = torch.empty(rows if truncation else 1, room, dtype=torch.int32, device=device)
    top_k_R, top_p_R, min_p_R = truncation or (last_R, threshold_R, lse_R)  # placeholders, not read without truncation
    if rows:
        _cuts_kernel[(rows,)](
            logits_RV,
            temperature_R,
            top_k_R,
            top_p_R,
            min_p_R,
            lists_RC,
            threshold_R,
            last_R,
            lse_R,
            vocab_size,
            logits_RV.stride(0),
            sharpness,
            TRUNCATED=truncation is not None,
            BLOCK=block,
            ROOM=room,
            num_warps=8,
        )
    return Cuts(threshold_R, last_R, lse_R)


def processed(logits_RV: Tensor, temperature_R: Tensor, row_cuts: Cuts, *, block: int = BLOCK) -> Tensor:
    """Return fp32 log-probabilities [R, V], -inf where a token is cut."""
    rows, vocab_size = logits_RV.shape
    out_RV = torch.empty(rows, vocab_size, dtype=torch.float32, device=logits_RV.device)
    if rows:
        _apply_kernel[(rows, triton.cdiv(vocab_size, block))](
            logits_RV,
            temperature_R,
            row_cuts.threshold_R,
            row_cuts.last_R,
            row_cuts.lse_R,
            out_RV,
            vocab_size,
            logits_RV.stride(0),
            BLOCK=block,
            num_warps=8,
        )
    return out_RV
