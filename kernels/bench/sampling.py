"""Sampling over Llama-3's vocabulary: target choices with and without truncation, and draft proposals."""

from __future__ import annotations

from typing import Any

import torch
from timing import DEVICE, seconds

from specdecode_kernels.top_k.op import top_k
from specdecode_kernels.verify.op import choose

VOCABULARY, DRAFT_VOCABULARY = 128_256, 32_000


def measure(rows: int, rate: float, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """Measure ``rows`` of bf16 logits. ``rate`` is the copy rate in bytes per second, 0 if unknown."""
    proposed = min(DRAFT_VOCABULARY, vocabulary // 4)
    logits = 3 * torch.randn(rows, vocabulary, device=DEVICE, dtype=torch.bfloat16)
    draft, ids = logits[:, :proposed].contiguous(), torch.arange(proposed, device=DEVICE) * 4
    temperature, seeds = torch.ones(rows, device=DEVICE), torch.arange(rows, device=DEVICE)
    cuts = (torch.full((rows,), 50, device=DEVICE), torch.full((rows,), 0.95, device=DEVICE), 0 * temperature)
    law = {"temperature_R": temperature, "seed_R": seeds, "position_R": seeds, "vocab_size": vocabulary}
    took = seconds(lambda: choose(logits, temperature, seeds, seeds))
    return {
        "rows": rows,
        "choice_microseconds": 1e6 * took,
        "share_of_copy_rate": 2 * logits.numel() / took / rate if rate else None,
        "greedy_microseconds": 1e6 * seconds(lambda: choose(logits, 0 * temperature, seeds, seeds)),
        "cut_choice_microseconds": 1e6 * seconds(lambda: choose(logits, temperature, seeds, seeds, cuts)),
        "proposal_microseconds": 1e6 * seconds(lambda: top_k(draft, 8, ids_V=ids, **law)),
    }
