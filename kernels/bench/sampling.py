"""Sampling of Llama-3's vocabulary: choices of the target, with and without cuts, and proposals of a draft."""

from __future__ import annotations

from typing import Any

import torch
from timing import seconds

from specdecode_kernels.top_k.op import top_k
from specdecode_kernels.verify.op import choose

VOCABULARY, DRAFT_VOCABULARY = 128_256, 32_000


def measure(rows: int, rate: float) -> dict[str, Any]:
    """``rows`` of bf16 logits."""
    logits = 3 * torch.randn(rows, VOCABULARY, device="cuda", dtype=torch.bfloat16)
    draft, ids = logits[:, :DRAFT_VOCABULARY].contiguous(), torch.arange(DRAFT_VOCABULARY, device="cuda") * 4
    temperature, seeds = torch.ones(rows, device="cuda"), torch.arange(rows, device="cuda")
    cuts = (torch.full((rows,), 50, device="cuda"), torch.full((rows,), 0.95, device="cuda"), 0 * temperature)
    law = {"temperature_R": temperature, "seed_R": seeds, "position_R": seeds, "vocab_size": VOCABULARY}
    took = seconds(lambda: choose(logits, temperature, seeds, seeds))
    return {
        "rows": rows,
        "choice_microseconds": 1e6 * took,
        "share_of_copy_rate": 2 * logits.numel() / took / rate,
        "greedy_microseconds": 1e6 * seconds(lambda: choose(logits, 0 * temperature, seeds, seeds)),
        "cut_choice_microseconds": 1e6 * seconds(lambda: choose(logits, temperature, seeds, seeds, cuts)),
        "proposal_microseconds": 1e6 * seconds(lambda: top_k(draft, 8, ids_V=ids, **law)),
    }
