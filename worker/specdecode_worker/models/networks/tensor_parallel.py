"""A target split over several devices, so that each computes a part of every layer.

Megatron-LM's scheme (Shoeybi et al., arXiv 1909.08053): heads and the MLP's inner width are split by columns, what
follows them by rows and summed over the devices; the vocabulary is split where logits are made. Embeddings and norms
stand on every device. A device reads only its own slices of the files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from specdecode_worker.models.checkpoints.tensor_placement import unfilled
from specdecode_worker.models.checkpoints.weights import prepare_llama
from specdecode_worker.models.configs.target_config import LlamaConfig
from specdecode_worker.models.errors import ConfigMismatch
from specdecode_worker.models.networks.llama import Llama

_BY_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Rows of these matrices, and their biases, are split: each device makes its own heads and inner numbers."""
_BY_ROW = ("o_proj", "down_proj")
"""Columns of these are split: each device reads what it made itself, and the results are summed."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One of ``size`` devices."""

    rank: int
    size: int

    def part(self, count: int) -> slice:
        """This device's part of ``count``: equal ones, the last shorter where they cannot be."""
        width = -(-count // self.size)
        return slice(min(self.rank * width, count), min((self.rank + 1) * width, count))


def split_config(config: LlamaConfig, size: int) -> LlamaConfig:
    """The shape of one device's part; vocabulary and hidden size stay whole. Raises ConfigMismatch."""
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % size:
            raise ConfigMismatch(
                f"{name} {getattr(config, name)} cannot be split over tensor_parallel_size {size}; take a divisor of it"
            )
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // size,
        num_key_value_heads=config.num_key_value_heads // size,
        intermediate_size=config.intermediate_size // size,
    )


def split_network(config: LlamaConfig, shard: Shard) -> Llama:
    """One device's part, on the meta device and without its sums: names are those of the whole."""
    with unfilled():
        model = Llama(split_config(config, shard.size))
        if not config.tie_word_embeddings:
            rows = shard.part(config.vocab_size)
            model.lm_head = nn.Linear(config.hidden_size, rows.stop - rows.start, bias=False)
    return model


def load_shard(
    folder: Path, shard: Shard, *, dtype: torch.dtype, device: torch.device, max_model_len: int | None = None
) -> Llama:
    """One device's part of the target in ``folder``; every device must run it at once. Raises ConfigMismatch,
    WeightMismatch."""
    whole = prepare_llama(folder, max_model_len=max_model_len)
    whole.check()
    config = whole.network.config
    model = split_network(config, shard)

    def part(name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        return slices(name, shape, shard)

    placed = {
        name: tensor.to(device=device, dtype=dtype)
        for name, tensor in whole.checkpoint.read_all(whole.checkpoint.tensors, part)
    }
    model.load_state_dict(placed, strict=False, assign=True)
    if config.tie_word_embeddings:
        rows = model.model.embed_tokens.weight[shard.part(config.vocab_size)]
        model.lm_head = nn.Linear(config.hidden_size, len(rows), bias=False, device="meta")
        model.lm_head.weight = nn.Parameter(rows)
    model.requires_grad_(False)
    model.rope.to(device)
    join(model, shard)
    return model


def slices(name: str, shape: tuple[int, ...], shard: Shard) -> tuple[slice, ...]:
    """Which part of a tensor of the checkpoint this device holds, one slice a dimension."""
    whole = tuple(slice(0, size) for size in shape)
    owner = name.rsplit(".", 2)[-2]
    if owner in _BY_COLUMN or name == "lm_head.weight":
        return (shard.part(shape[0]), *whole[1:])
    if owner in _BY_ROW and len(shape) == 2:
        return (whole[0], shard.part(shape[1]))
    return whole


def join(model: Llama, shard: Shard) -> None:
    """Puts the sums behind what is split by rows, and gathers the logits. In place, once the weights are there."""
    for block in model.model.layers:
        for owner, name in ((block.self_attn, "o_proj"), (block.mlp, "down_proj")):
            linear: nn.Linear = getattr(owner, name)
            if shard.rank and linear.bias is not None:
                linear.bias.zero_()  # added once, by the first
            setattr(owner, name, Summed(linear))
    model.lm_head = Gathered(model.lm_head, model.config.vocab_size, shard)  # type: ignore[assignment]


class Summed(nn.Module):
    """A matrix split by columns: every device's result is the sum of all."""

    def __init__(self, part: nn.Linear) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.part(x)
        dist.all_reduce(out)
        return out


class Gathered(nn.Module):
    """The matrix that makes logits, split by the vocabulary. The first device gets all of them, the others none
    ([R, 0]): tokens are chosen there."""

    def __init__(self, part: nn.Module, vocab_size: int, shard: Shard) -> None:
        super().__init__()
        self.part = part
        self._vocab_size, self._shard = vocab_size, shard
        self._width = -(-vocab_size // shard.size)

    def forward(self, hidden_RE: Tensor) -> Tensor:
        own: Tensor = self.part(hidden_RE)
        own = F.pad(own, (0, self._width - own.shape[-1])).contiguous()
        if self._shard.rank:
            dist.gather(own, None, dst=0)
            return own[:, :0]
        found = [torch.empty_like(own) for _ in range(self._shard.size)]
        dist.gather(own, found, dst=0)
        return torch.cat(found, dim=-1)[:, : self._vocab_size]
