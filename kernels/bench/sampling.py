"""Sampling over Llama-3's vocabulary: target choices with and without truncation, and draft proposals."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from timing import DEVICE, buffers, seconds

from specdecode_kernels.sample.reference import Truncation
from specdecode_kernels.top_k.op import top_k
from specdecode_kernels.verify.op import choose

VOCABULARY, DRAFT_VOCABULARY = 128_256, 32_000


def measure(rows: int, rate: float, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """Measure ``rows`` of bf16 logits. ``rate`` is the copy rate in bytes per second, 0 if unknown."""
    proposed = min(DRAFT_VOCABULARY, vocabulary // 4)
    logits = 3 * torch.randn(rows, vocabulary, device=DEVICE, dtype=torch.bfloat16)
    many = [logits, *(logits.clone() for _ in range(buffers(logits.nbytes) - 1))]
    drafts, ids = [one[:, :proposed].contiguous() for one in many], torch.arange(proposed, device=DEVICE) * 4
    temperature, seeds = torch.ones(rows, device=DEVICE), torch.arange(rows, device=DEVICE)
    cuts = Truncation(torch.full((rows,), 50, device=DEVICE), torch.full((rows,), 0.95, device=DEVICE), 0 * temperature)
    law = {"temperature_R": temperature, "seed_R": seeds, "position_R": seeds, "vocab_size": vocabulary}
    greedy = 0 * temperature
    took = seconds(*(partial(choose, one, temperature, seeds, seeds) for one in many))
    return {
        "rows": rows,
        "choice_microseconds": 1e6 * took,
        "share_of_copy_rate": 2 * logits.numel() / took / rate if rate else None,
        "greedy_microseconds": 1e6 * seconds(*(partial(choose, one, greedy, seeds, seeds) for one in many)),
        "cut_choice_microseconds": 1e6
        * seconds(*(partial(choose, one, temperature, seeds, seeds, cuts) for one in many)),
        "proposal_microseconds": 1e6 * seconds(*(partial(top_k, one, 8, ids_V=ids, **law) for one in drafts)),
    }
