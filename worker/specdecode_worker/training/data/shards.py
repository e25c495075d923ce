"""Recorded conversations on disk: tokens and the target's hidden states, in safetensors shards.

A shard is written at once and never changed, so a killed rollout resumes with the next one. ``state_recording`` writes
shards, ``batches`` reads them. The states are stored because the target computes them anyway during generation;
computing them again would cost as much as a training step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

SHARD_TOKENS = 16384
"""Tokens at which a shard is written. They bound the states held in memory: 32 KiB a token for a target of 8B."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Conversation with its hidden states. The answer starts at token ``answer_start``.

    ``tokens_N`` is int32. ``aux_NA`` [N, 3E] and ``hidden_NE`` [N, E] are the target's states at each token. The token
    after the last (an end of text, or text that was cut) is not stored: no slot reads it.
    """

    tokens_N: Tensor
    aux_NA: Tensor
    hidden_NE: Tensor
    answer_start: int
    temperature: float
    domain: str
    normalisers_NT: Tensor | None = None
    """Log normalizers [N, temperatures] fp32, see ``normalizers``; None if not computed."""


def write_shard(folder: Path, index: int, conversations: list[Conversation]) -> Path:
    """Write shard ``index`` through a temporary file and one rename, and return its path."""
    path = folder / f"shard-{index:05}.safetensors"
    partial = path.with_suffix(".partial")
    lengths = [len(c.tokens_N) for c in conversations]
    tensors = {
        "tokens": torch.cat([c.tokens_N for c in conversations]).to(torch.int32),
        "aux": torch.cat([c.aux_NA for c in conversations]),
        "hidden": torch.cat([c.hidden_NE for c in conversations]),
        "lengths": torch.tensor(lengths, dtype=torch.int64),
        "answer_starts": torch.tensor([c.answer_start for c in conversations], dtype=torch.int64),
        "temperatures": torch.tensor([c.temperature for c in conversations], dtype=torch.float32),
    }
    save_file(tensors, partial, {"domains": json.dumps([c.domain for c in conversations])})
    os.rename(partial, path)
    return path


def shard_paths(folder: Path) -> list[Path]:
    """Return the paths of the shards in ``folder``, in order."""
    return sorted(folder.glob("shard-*.safetensors"))


def normalisers_path(shard: Path) -> Path:
    """Return the path of the file with a shard's normalizers, which are in the shard's order."""
    return shard.with_name(shard.name.replace("shard-", "normalisers-"))


def read_shard(path: Path) -> Iterator[Conversation]:
    """Yield the conversations of a shard, with normalizers if their file exists.

    The states are mapped from the file, so they take memory that the system can reclaim, however many shards are read.
    """
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a safe_open is no dict
        domains: list[str] = json.loads(file.metadata()["domains"])
    lengths = tensors["lengths"].tolist()
    parts = [tensors[name].split(lengths) for name in ("tokens", "aux", "hidden")]
    normalisers_file = normalisers_path(path)
    normalisers = (
        torch.split(load_file(normalisers_file)["normalisers"], lengths) if normalisers_file.exists() else None
    )
    for i, domain in enumerate(domains):
        yield Conversation(
            tokens_N=parts[0][i],
            aux_NA=parts[1][i],
            hidden_NE=parts[2][i],
            answer_start=int(tensors["answer_starts"][i]),
            temperature=float(tensors["temperatures"][i]),
            domain=domain,
            normalisers_NT=normalisers[i] if normalisers else None,
        )
