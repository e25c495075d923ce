"""Temperature, min-p, top-k and top-p on a GPU without a sort: one threshold per row (README.md).

`verify` reads the thresholds and never computes probabilities; `processed` writes the probabilities for callers that
need them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.sample.reference import Truncation

SLICE = 4096
"""Tokens of one slice of a row. It is the same for every batch, so that no sum depends on the batch."""
BLOCK = 2048
ROOM = 12288
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
def _scale(x, temperature, sharpness):
    return tl.math.div_rn(x.to(tl.float32) * sharpness, tl.where(temperature > 0, temperature, 1.0)) + 0.0


@triton.jit
def scaled(logits_V, token, inside, temperature, sharpness):
    """Load logits and scale them by sharpness and temperature, in fp32; -inf outside.

    The rounding is the same in every kernel that calls this. Greedy rows (temperature 0) are not divided. Adding 0
    turns -0 into +0.
    """
    return _scale(tl.load(logits_V + token, mask=inside, other=float("-inf")), temperature, sharpness)


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
    """Return the bins of logits, in the order of their distance below the best: 32 for every doubling of 1 + distance.

    Bin 255 has all that are 247 nats or more below.
    """
    return tl.minimum(((top - x + 1.0).to(tl.int32, bitcast=True) >> 18) - 4064, 255)


@triton.jit
def _heaviest(h):
    """Return the greatest mass of a token in bin ``h``, up to rounding. The best token has mass 1."""
    return tl.exp(1.0 - ((h + 4064) << 18).to(tl.float32, bitcast=True))


@triton.jit
def _stat(stats_RQS, row, which: tl.constexpr, slices, other, BLOCK_S: tl.constexpr):
    """Load a statistic of all slices: best logit, mass, mass above the candidates, worst and best candidate."""
    s = tl.arange(0, BLOCK_S)
    return tl.load(stats_RQS + (row * 5 + which) * slices + s, mask=s < slices, other=other)


@triton.jit
def _limits(
    stats_RQS, top_k_R, top_p_R, min_p_R, row, slices, vocab_size, TRUNCATED: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Return best scaled logit, min-p floor, top-k (0: all) and top-p (1: all) of a row."""
    top = tl.max(_stat(stats_RQS, row, 0, slices, float("-inf"), BLOCK_S), 0)
    floor, k, top_p = float("-inf"), 0, 1.0
    if TRUNCATED:
        floor, k, top_p = top + tl.log(tl.load(min_p_R + row)), tl.load(top_k_R + row), tl.load(top_p_R + row)
        k = tl.where(k < vocab_size, k, 0).to(tl.int32)
    return top, floor, k, top_p


@triton.jit(do_not_specialize=["temperature_R"])
def _top_kernel(logits_RV, temperature_R, stats_RQS, vocab_size, row_stride, BLOCK: tl.constexpr):
    """Write the best scaled logit of a slice of a row. Scaling rounds, but never changes an order."""
    row, piece, slices = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = piece * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_RV + row * row_stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    tl.store(stats_RQS + row * 5 * slices + piece, _scale(tl.max(x, 0), tl.load(temperature_R + row), 1.0))


@triton.jit(do_not_specialize=["temperature_R", "top_k_R", "top_p_R", "min_p_R"])
def _mass_kernel(
    logits_RV,
    temperature_R,
    top_k_R,
    top_p_R,
    min_p_R,
    stats_RQS,
    counts_RSH,
    vocab_size,
    row_stride,
    TRUNCATED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Sum the mass that min-p leaves of a slice of a row, and count its tokens in each bin."""
    row, piece, slices = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    top, floor, k, top_p = _limits(stats_RQS, top_k_R, top_p_R, min_p_R, row, slices, vocab_size, TRUNCATED, BLOCK_S)
    token = piece * BLOCK + tl.arange(0, BLOCK)
    x = scaled(logits_RV + row * row_stride, token, token < vocab_size, tl.load(temperature_R + row), 1.0)
    alive = (x >= floor) & (x > float("-inf"))
    tl.store(stats_RQS + (row * 5 + 1) * slices + piece, tl.sum(tl.where(alive, tl.exp(x - top), 0.0), 0))
    if TRUNCATED and (k > 0) | (top_p < 1.0):
        counts_H = tl.histogram(_bin(x, top), 256, mask=alive)
        tl.store(counts_RSH + (row * slices + piece) * 256 + tl.arange(0, 256), counts_H.to(tl.int16))


@triton.jit(do_not_specialize=["top_k_R", "top_p_R", "min_p_R"])
def _region_kernel(
    top_k_R, top_p_R, min_p_R, stats_RQS, counts_RSH, region_RN, vocab_size, slices, BLOCK_S: tl.constexpr
):
    """Find the bins of one row that can contain its thresholds; their tokens are the candidates.

    The counts bound the mass of a bin from both sides. The bins are those from the first at which the kept mass may be
    enough to the first at which it certainly is, judged by the mass above a threshold and by the mass below it.

    ``region_RN`` receives first bin, last bin, rank of the k-th token among the candidates (0: top-k cuts nothing),
    number of candidates, and the number of candidates before each slice.
    """
    row = tl.program_id(0).to(tl.int64)
    _top, _floor, k, top_p = _limits(stats_RQS, top_k_R, top_p_R, min_p_R, row, slices, vocab_size, True, BLOCK_S)
    s, h = tl.arange(0, BLOCK_S), tl.arange(0, 256)
    out_N = region_RN + row * (4 + slices)
    near, far = 256, -1
    if (k > 0) | (top_p < 1.0):
        total = tl.sum(_stat(stats_RQS, row, 1, slices, 0.0, BLOCK_S), 0)
        place_SH = (row * slices + s[:, None]) * 256 + h[None, :]
        counts_SH = tl.load(counts_RSH + place_SH, mask=place_SH < (row + 1) * slices * 256, other=0).to(tl.int32)
        counts_H = tl.sum(counts_SH, 0)
        reached_H = tl.cumsum(counts_H, 0)
        k = tl.where(k < tl.sum(counts_H, 0), k, 0)
        far = tl.min(tl.where(reached_H >= k, h, 255), 0)
        most_H, least_H = counts_H * _heaviest(h), counts_H * _heaviest(h + 1)
        # Top-p is a share of what top-k leaves: the best token, all above its last bin, and some of that bin.
        least = tl.where(k > 0, tl.maximum(tl.sum(tl.where(h < far, least_H, 0.0), 0), 1.0), total)
        most_above_H, least_above_H = tl.cumsum(most_H, 0), tl.cumsum(least_H, 0)
        below, slack = (1.0 - top_p) * total, 1e-5 * total
        may_H = most_above_H >= top_p * least - slack
        may_H &= (k > 0) | (tl.sum(least_H, 0) - least_above_H <= below + slack)
        must_H = (least_above_H >= top_p * total + slack) | (tl.sum(most_H, 0) - most_above_H <= below - slack)
        far = tl.where(k > 0, far, tl.min(tl.where(must_H, h, 255), 0))
        near = tl.where(top_p < 1.0, tl.minimum(tl.min(tl.where(may_H, h, 255), 0), far), far)
        candidates_S = tl.sum(tl.where(((h >= near) & (h <= far))[None, :], counts_SH, 0), 1)
        tl.store(out_N + 2, tl.where(k > 0, k - tl.sum(tl.where(h < near, counts_H, 0), 0), 0))
        tl.store(out_N + 3, tl.sum(candidates_S, 0))
        tl.store(out_N + 4 + s, tl.cumsum(candidates_S, 0) - candidates_S, mask=s < slices)
    tl.store(out_N, near)
    tl.store(out_N + 1, far)


@triton.jit(do_not_specialize=["temperature_R", "min_p_R"])
def _list_kernel(
    logits_RV,
    temperature_R,
    min_p_R,
    stats_RQS,
    region_RN,
    lists_RC,
    vocab_size,
    row_stride,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ROOM: tl.constexpr,
):
    """List the candidates of a slice of a row in the order of tokens, with their logits."""
    row, piece, slices = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    region_N = region_RN + row * (4 + slices)
    near, far = tl.load(region_N), tl.load(region_N + 1)
    if near <= far:
        top = tl.max(_stat(stats_RQS, row, 0, slices, float("-inf"), BLOCK_S), 0)
        token = piece * BLOCK + tl.arange(0, BLOCK)
        x = scaled(logits_RV + row * row_stride, token, token < vocab_size, tl.load(temperature_R + row), 1.0)
        alive = (x >= top + tl.log(tl.load(min_p_R + row))) & (x > float("-inf"))
        h = tl.where(alive, _bin(x, top), 256)
        here = (h >= near) & (h <= far)
        out = stats_RQS + (row * 5 + 2) * slices + piece
        tl.store(out, tl.sum(tl.where(h < near, tl.exp(x - top), 0.0), 0))
        tl.store(out + slices, tl.min(tl.where(here, x, float("inf")), 0))
        best = tl.max(tl.where(here, x, float("-inf")), 0)
        tl.store(out + 2 * slices, best)
        if (best > float("-inf")) & (tl.load(region_N + 3) <= ROOM):
            listed = here.to(tl.int32)
            place = tl.load(region_N + 4 + piece) + tl.cumsum(listed, 0) - 1
            entry = (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | token
            tl.store(lists_RC + row * ROOM + place, entry, mask=listed > 0)


@triton.jit
def _members(source, start, least, most, BLOCK: tl.constexpr):
    """Load the next (tokens, scaled logits) of the candidates; -inf for others than those from least to most.

    They are read from their list, or from the whole row if they did not fit in the list.
    """
    logits_V, list_C, listed, vocab_size, temperature = source
    place = start + tl.arange(0, BLOCK)
    if listed > 0:
        entry = tl.load(list_C + place, mask=place < listed, other=0x7FC00000 << 32)  # no number
        token, x = entry.to(tl.int32), (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        token, x = place, scaled(logits_V, place, place < vocab_size, temperature, 1.0)
    return token, tl.where((x >= least) & (x <= most), x, float("-inf"))


@triton.jit
def _search(source, length, least, most, top, wanted, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest threshold at which the candidates from it on reach ``wanted``, by count or by mass."""
    low, high = _key(least).to(tl.int64), _key(most).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        reached = tl.zeros([BLOCK], tl.float32)
        for start in range(0, length, BLOCK):
            _, x = _members(source, start, _number(middle), most, BLOCK)
            reached += tl.exp(x - top) if MASS else (x > float("-inf")).to(tl.float32)
        enough = tl.sum(reached, 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return _number(low)


@triton.jit(do_not_specialize=["temperature_R", "top_p_R", "min_p_R"])
def _cuts_kernel(
    logits_RV,
    temperature_R,
    top_p_R,
    min_p_R,
    stats_RQS,
    region_RN,
    lists_RC,
    threshold_R,
    last_R,
    lse_R,
    vocab_size,
    row_stride,
    slices,
    TRUNCATED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Compute threshold, last token and log-sum-exp of one row from its slices and candidates."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.max(_stat(stats_RQS, row, 0, slices, float("-inf"), BLOCK_S), 0)
    total = tl.sum(_stat(stats_RQS, row, 1, slices, 0.0, BLOCK_S), 0)
    threshold, last = float("-inf"), vocab_size
    if TRUNCATED:
        threshold = top + tl.log(tl.load(min_p_R + row))
        region_N = region_RN + row * (4 + slices)
        if tl.load(region_N) <= tl.load(region_N + 1):
            k, candidates, top_p = tl.load(region_N + 2), tl.load(region_N + 3), tl.load(top_p_R + row)
            above = tl.sum(_stat(stats_RQS, row, 2, slices, 0.0, BLOCK_S), 0)
            least = tl.min(_stat(stats_RQS, row, 3, slices, float("inf"), BLOCK_S), 0)
            most = tl.max(_stat(stats_RQS, row, 4, slices, float("-inf"), BLOCK_S), 0)
            listed = tl.where(candidates <= ROOM, candidates, 0)
            length = tl.where(listed > 0, listed, vocab_size)
            temperature = tl.load(temperature_R + row)
            source = (logits_RV + row * row_stride, lists_RC + row * ROOM, listed, vocab_size, temperature)
            if k > 0:
                least = _search(source, length, least, most, top, k.to(tl.float32), False, BLOCK)
                threshold = least
                total = above
                for start in range(0, length, BLOCK):
                    _, x = _members(source, start, least, most, BLOCK)
                    total += tl.sum(tl.exp(x - top), 0)
            if top_p < 1.0:
                wanted = top_p * total - above
                threshold = _search(source, length, least, most, top, wanted, True, BLOCK)
                # Of the tokens equal to the threshold, only as many as needed are kept, lower token ids first.
                better, seen = 0.0, 0
                for start in range(0, length, BLOCK):
                    _, x = _members(source, start, threshold, most, BLOCK)
                    better += tl.sum(tl.where(x > threshold, tl.exp(x - top), 0.0), 0)
                each = tl.exp(threshold - top)
                equals = tl.maximum(tl.ceil((wanted - better) / each).to(tl.int32), 1)
                last = -1
                for start in range(0, length, BLOCK):
                    token, x = _members(source, start, threshold, most, BLOCK)
                    equal = x == threshold
                    place = seen + tl.cumsum(equal.to(tl.int32), 0)
                    last = tl.maximum(last, tl.max(tl.where(equal & (place <= equals), token, -1), 0))
                    seen += tl.sum(equal.to(tl.int32), 0)
                total = above + better + tl.minimum(equals, seen) * each
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
    truncation: Truncation | None,
    *,
    size: int = SLICE,
    block: int = BLOCK,
    room: int = ROOM,
) -> Cuts:
    """Compute the thresholds of rows of temperature > 0.

    ``truncation`` None truncates nothing. All sizes and sums of a row are independent of the other rows of the batch. A
    row's logits must be contiguous.
    """
    rows, vocab_size = logits_RV.shape
    assert logits_RV.stride(1) == 1, "a row's logits must be contiguous"
    device, slices = logits_RV.device, triton.cdiv(vocab_size, size)
    threshold_R = torch.empty(rows, dtype=torch.float32, device=device)
    last_R = torch.empty(rows, dtype=torch.int32, device=device)
    lse_R = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return Cuts(threshold_R, last_R, lse_R)
    grid, block_s, listing = (rows, slices), triton.next_power_of_2(slices), rows if truncation else 1
    stats_RQS = torch.empty(rows, 5, slices, dtype=torch.float32, device=device)
    counts_RSH = torch.empty(listing, slices, 256, dtype=torch.int16, device=device)
    region_RN = torch.empty(listing, 4 + slices, dtype=torch.int32, device=device)
    lists_RC = torch.empty(listing, room, dtype=torch.int64, device=device)
    top_k_R, top_p_R, min_p_R = truncation or (last_R, threshold_R, lse_R)  # placeholders, not read without truncation
    limits = (top_k_R, top_p_R, min_p_R, stats_RQS, counts_RSH)
    whole = (vocab_size, logits_RV.stride(0))
    sizes = {"BLOCK": size, "BLOCK_S": block_s, "num_warps": 8}
    truncated = truncation is not None
    _top_kernel[grid](logits_RV, temperature_R, stats_RQS, *whole, BLOCK=size, num_warps=8)
    _mass_kernel[grid](logits_RV, temperature_R, *limits, *whole, TRUNCATED=truncated, **sizes)
    if truncated:
        _region_kernel[(rows,)](*limits, region_RN, vocab_size, slices, BLOCK_S=block_s, num_warps=8)
        _list_kernel[grid](
            logits_RV, temperature_R, min_p_R, stats_RQS, region_RN, lists_RC, *whole, ROOM=room, **sizes
        )
    _cuts_kernel[(rows,)](
        logits_RV,
        temperature_R,
        top_p_R,
        min_p_R,
        stats_RQS,
        region_RN,
        lists_RC,
        threshold_R,
        last_R,
        lse_R,
        *whole,
        slices,
        TRUNCATED=truncated,
        BLOCK=block,
        BLOCK_S=block_s,
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
