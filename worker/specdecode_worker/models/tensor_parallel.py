"""Tensor parallelism of a target: each device computes a part of every layer.

Each layer says how its matrices are split (`linear.Split`). Embeddings and norms are replicated on every device. A
device reads only its own slices of the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import nn

from specdecode_worker.models.arch import new_network, split_config
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.linear import Linear, Shard, Split
from specdecode_worker.models.unloaded import load_quantized, meta_init, place_tables
from specdecode_worker.models.weights import prepare_causal_lm


def split_network(whole: CausalLM, shard: Shard) -> CausalLM:
    """Build one device's part on the meta device. Names of parameters are those of the whole network."""
    config = whole.config
    with meta_init():
        model = new_network(split_config(config, shard.size))
        if not config.tie_word_embeddings:
            rows = shard.part(config.vocab_size)
            model.lm_head = Linear(config.hidden_size, rows.stop - rows.start, split=Split.VOCABULARY)
    model.kv_scales, model.form = whole.kv_scales, whole.form
    for name, linear in whole.named_modules():
        if isinstance(linear, Linear):
            cast(Linear, model.get_submodule(name)).source = linear.source
    return model


def load_shard(
    folder: Path,
    shard: Shard,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
    stored: bool | None = None,
) -> CausalLM:
    """Load one device's part of the target in ``folder``; ``stored`` as in `UnloadedNetwork.fill`.

    Every device must call this; the returned module contains collectives.

    Raises:
        ConfigMismatch: the target cannot be split over this number of devices.
        WeightMismatch: the checkpoint does not fit config.json.
    """
    whole = prepare_causal_lm(folder, max_model_len=max_model_len)
    whole.check()
    config = whole.network.config
    model = split_network(whole.network, shard)
    splits, own = splits_of(model), model.state_dict()

    def part(name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        split, place = splits.get(name, Split.WHOLE), shard
        if split is Split.OUTPUTS:  # devices share a part where there are fewer key-value heads than devices
            parts = shape[0] // own[name].shape[0]
            place = Shard(shard.rank * parts // shard.size, parts)
        return slices(split, shape, place)

    model.load_state_dict(whole.placed(dtype, device, part), strict=False, assign=True)
    if config.tie_word_embeddings:
        rows = model.model.embed_tokens.weight[shard.part(config.vocab_size)]
        model.lm_head = Linear.of(rows, split=Split.VOCABULARY)
    share(model, shard)
    load_quantized(model, dtype=dtype, device=device, stored=stored)
    model.requires_grad_(False)
    place_tables(model, device, dtype)
    model.arrange()
    return model


def splits_of(model: nn.Module) -> dict[str, Split]:
    """Return how devices share each parameter of the matrices of ``model``, by name."""
    return {
        f"{name}.{parameter}": linear.split
        for name, linear in model.named_modules()
        if isinstance(linear, Linear)
        for parameter, _ in linear.named_parameters()
    }


def slices(split: Split, shape: tuple[int, ...], shard: Shard) -> tuple[slice, ...]:
    """Return the part of a checkpoint tensor that this device holds, one slice per dimension."""
    first, *rest = (slice(0, size) for size in shape)
    match split:
        case Split.OUTPUTS | Split.VOCABULARY:
            return (shard.part(shape[0]), *rest)
        case Split.INPUTS if len(shape) == 2:
            return (first, shard.part(shape[1]))
    return (first, *rest)


def share(model: CausalLM, shard: Shard) -> None:
    """Make the matrices of ``model`` parts of those of all devices, in place, once their weights are loaded."""
    for linear in model.modules():
        if isinstance(linear, Linear):
            linear.share(shard, model.config.vocab_size if linear is model.lm_head else None)
