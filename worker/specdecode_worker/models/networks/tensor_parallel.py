"""Tensor parallelism of a target: each device computes a part of every layer.

Megatron-LM's scheme (Shoeybi et al., arXiv 1909.08053). Attention heads and the inner width of the MLP are split by
columns; the following matrices are split by rows, and their results are summed over the devices. lm_head is split by
vocabulary. Embeddings and norms are replicated on every device. A device reads only its own slices of the files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdecode_worker.models.checkpoints.tensor_placement import meta_init
from specdecode_worker.models.checkpoints.weights import prepare_llama
from specdecode_worker.models.configs.target_config import LlamaConfig
from specdecode_worker.models.errors import ConfigMismatch
from specdecode_worker.models.networks import collectives
from specdecode_worker.models.networks.llama import Llama

_BY_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Projections with split output features and biases: each device computes its own heads and MLP channels."""
_BY_ROW = ("o_proj", "down_proj")
"""Projections with split input features: each device reads its own activations, and the results are summed."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Position of one device among ``size`` devices."""

    rank: int
    size: int

    def part(self, count: int) -> slice:
        """Return this device's slice of ``count`` entries.

        Slices have equal width; the last ones are shorter if ``count`` is not divisible.
        """
        width = -(-count // self.size)
        return slice(min(self.rank * width, count), min((self.rank + 1) * width, count))


def split_config(config: LlamaConfig, size: int) -> LlamaConfig:
    """Return the shape of one device's part; vocabulary and hidden size stay whole.

    Raises:
        ConfigMismatch: a dimension is not divisible by ``size``.
    """
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
    """Build one device's part on the meta device, before `join` adds the collectives.

    Parameter names are those of the whole network.
    """
    with meta_init():
        model = Llama(split_config(config, shard.size))
        if not config.tie_word_embeddings:
            rows = shard.part(config.vocab_size)
            model.lm_head = nn.Linear(config.hidden_size, rows.stop - rows.start, bias=False)
    return model


def load_shard(
    folder: Path, shard: Shard, *, dtype: torch.dtype, device: torch.device, max_model_len: int | None = None
) -> Llama:
    """Load one device's part of the target in ``folder``.

    Every device must call this; the returned module contains collectives.

    Raises:
        ConfigMismatch: the target cannot be split over this number of devices.
        WeightMismatch: the checkpoint does not fit config.json.
    """
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
    """Return the part of a checkpoint tensor that this device holds, one slice per dimension."""
    whole = tuple(slice(0, size) for size in shape)
    owner = name.rsplit(".", 2)[-2]
    if owner in _BY_COLUMN or name == "lm_head.weight":
        return (shard.part(shape[0]), *whole[1:])
    if owner in _BY_ROW and len(shape) == 2:
        return (whole[0], shard.part(shape[1]))
    return whole


def join(model: Llama, shard: Shard) -> None:
    """Add an all-reduce after each row-split matrix, and a gather after lm_head.

    Changes the model in place, after its weights are loaded.
    """
    for block in model.model.layers:
        for owner, name in ((block.self_attn, "o_proj"), (block.mlp, "down_proj")):
            linear: nn.Linear = getattr(owner, name)
            if shard.rank and linear.bias is not None:
                linear.bias.zero_()  # only the first device adds the bias, before the sum
            setattr(owner, name, RowParallelLinear(linear, first=shard.rank == 0))
    model.lm_head = GatheredLMHead(model.lm_head, model.config.vocab_size, shard)  # type: ignore[assignment]


class RowParallelLinear(nn.Module):
    """Matrix split by input features. Each device computes a partial product, and the results are summed.

    The ``first`` device adds what is added only once: the bias, and a residual if the caller fuses it.
    """

    def __init__(self, part: nn.Linear, *, first: bool) -> None:
        super().__init__()
        self.part, self.first = part, first

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.part(x)
        collectives.all_reduce(out)
        return out


class GatheredLMHead(nn.Module):
    """lm_head split by vocabulary, with the logits gathered on the first device.

    The first device gets all logits [R, V], because it chooses the tokens. The other devices get [R, 0].
    """

    def __init__(self, part: nn.Module, vocab_size: int, shard: Shard) -> None:
        super().__init__()
        self.part = part
        self._vocab_size, self._shard = vocab_size, shard
        self._width = -(-vocab_size // shard.size)

    def forward(self, hidden_RE: Tensor) -> Tensor:
        own: Tensor = self.part(hidden_RE).contiguous()
        if own.shape[-1] < self._width:  # the last device may have a shorter part
            own = F.pad(own, (0, self._width - own.shape[-1]))
        if self._shard.rank:
            collectives.send_to_first(own)
            return own[:, :0]
        gathered_NRV = collectives.gather(own, self._shard.size)
        return gathered_NRV.transpose(0, 1).reshape(len(own), -1)[:, : self._vocab_size]
