"""Tensor parallelism of a target: each device computes a part of every layer.

Each layer says how its matrices are split (`linear.Split`), and each matrix which part it holds. Embeddings and norms
are replicated on every device. A device reads only its own slices of the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch

from specdecode_worker.models.arch import new_network
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.config import split_config
from specdecode_worker.models.linear import Linear, Shard, Split
from specdecode_worker.models.unloaded import meta_init
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
            part = cast(Linear, model.get_submodule(name))
            part.source = linear.source
            part.share(shard, linear.out_features)
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
    model = whole.fill(dtype=dtype, device=device, stored=stored, own=split_network(whole.network, shard))
    if model.config.tie_word_embeddings:
        vocabulary = model.config.vocab_size
        rows = model.model.embed_tokens.weight[shard.part(vocabulary)]
        model.lm_head = Linear.of(rows, split=Split.VOCABULARY)
        model.lm_head.share(shard, vocabulary)
    model.arrange()
    return model
