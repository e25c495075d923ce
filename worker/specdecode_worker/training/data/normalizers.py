"""Log normalizers of the target's distribution at recorded tokens, by temperature.

Logits are not stored: training recomputes those of the draft vocabulary from the hidden state. The probability outside
the draft vocabulary cannot be recomputed that way. A file next to each shard therefore stores the log of the sum over
all tokens for every temperature of ``TEMPERATURES``. Module ``shards`` reads both files.
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
"""Temperatures of the stored normalizers. 0.3 represents greedy requests.

At 0.3 nearly all probability is on the first token, but the distribution still has a gradient.
"""
_ROWS = 256


def normalise(folder: Path, output_VE: Tensor, log: Callable[[str], None] = lambda _: None) -> None:
    """Compute missing normalizer files shard by shard. A killed run resumes with the next shard."""
    missing = [path for path in shard_paths(folder) if not normalisers_path(path).exists()]
    for done, path in enumerate(missing, start=1):
        values = torch.cat([normalisers(c.hidden_NE, output_VE, c.answer_start) for c in read_shard(path)])
        partial = normalisers_path(path).with_suffix(".partial")
        save_file({"normalisers": values}, partial)
        os.rename(partial, normalisers_path(path))
        if done % 8 == 0 or done == len(missing):
            log(f"normalisers: {done} of {len(missing)} shards")


@torch.inference_mode()
def normalisers(hidden_NE: Tensor, output_VE: Tensor, answer_start: int) -> Tensor:
    """Return log sum exp(logit / temperature) at every token, [N, temperatures] fp32.

    Prompt tokens get zero, because no loss is computed there.
    """
    normalisers_NT = torch.zeros(len(hidden_NE), len(TEMPERATURES))
    for start in range(answer_start, len(hidden_NE), _ROWS):
        rows = slice(start, start + _ROWS)
        logits_RV = (hidden_NE[rows].to(output_VE) @ output_VE.T).float()
        columns = [torch.logsumexp(logits_RV / temperature, dim=-1) for temperature in TEMPERATURES]
        normalisers_NT[rows] = torch.stack(columns, dim=-1).cpu()
    return normalisers_NT
