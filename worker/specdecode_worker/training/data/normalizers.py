"""What the target's probabilities of a recorded token sum to, per temperature, over its whole vocabulary.

Logits are never stored: training makes those of the draft's vocabulary anew from the hidden state. What it cannot make
from them is how much probability lies outside, so the logarithm of the sum over all tokens is kept for every
temperature of ``TEMPERATURES``, in a file beside each shard (``shards`` reads both).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdecode_worker.training.data.shards import normalisers_path, read_shard, shard_paths

TEMPERATURES = (0.3, 0.6, 0.8, 1.0)
"""0.3 stands for greedy: a distribution so sharp has nearly all of its mass on the first token, and still a slope."""
_ROWS = 256


def normalise(folder: Path, output_VE: Tensor, tell: Callable[[str], None] = lambda _: None) -> None:
    """Computes what is missing, shard by shard; goes on where a killed run stopped."""
    missing = [path for path in shard_paths(folder) if not normalisers_path(path).exists()]
    for done, path in enumerate(missing, start=1):
        found = torch.cat([normalisers(c.hidden_NE, output_VE, c.answer_start) for c in read_shard(path)])
        partial = normalisers_path(path).with_suffix(".partial")
        save_file({"normalisers": found}, partial)
        os.rename(partial, normalisers_path(path))
        if done % 8 == 0 or done == len(missing):
            tell(f"normalisers: {done} of {len(missing)} shards")


@torch.inference_mode()
def normalisers(hidden_NE: Tensor, output_VE: Tensor, answer_start: int) -> Tensor:
    """[N, temperatures] fp32: log of the sum of exp(logit / temperature); zero for the prompt, where no loss falls."""
    found_NT = torch.zeros(len(hidden_NE), len(TEMPERATURES))
    for start in range(answer_start, len(hidden_NE), _ROWS):
        rows = slice(start, start + _ROWS)
        logits_RV = (hidden_NE[rows].to(output_VE.dtype) @ output_VE.T).float()
        columns = [torch.logsumexp(logits_RV / temperature, dim=-1) for temperature in TEMPERATURES]
        found_NT[rows] = torch.stack(columns, dim=-1)
    return found_NT
