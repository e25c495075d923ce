"""A head before its first step: shape and weights taken from the target, so that training starts near language.

The layer starts as the target's last one; its query, key and value matrices read the state's half of the pair, those
of the target's first layer the embedding's half, which is what that layer was made to read. The fused state starts as
the deepest of the three, the output rows as the target's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdecode_worker.models.config import Eagle3Config, LlamaConfig
from specdecode_worker.models.eagle3 import Eagle3Head
from specdecode_worker.models.llama import Llama
from specdecode_worker.training.shards import read_shard


@torch.inference_mode()
def frequent_tokens(shards: Iterable[Path], output_VE: Tensor, size: int, *, every: int = 4) -> Tensor:
    """[size] rising ids of the tokens that the target says most often, by the probability that it gives them.

    Its probabilities at every fourth position say far more than the few tokens that were drawn there.
    """
    mass_V = torch.zeros(len(output_VE), dtype=torch.float64)
    for path in shards:
        for conversation in read_shard(path):
            states_RE = conversation.hidden_NE[conversation.answer_start :: every]
            mass_V += torch.softmax((states_RE @ output_VE.T).float(), dim=-1).sum(dim=0)
            mass_V += torch.bincount(conversation.tokens_N.long(), minlength=len(mass_V)) / every
    return mass_V.topk(size).indices.sort().values


def head_config(target: LlamaConfig, draft_vocab_size: int) -> Eagle3Config:
    """One layer of the target's own shape."""
    return Eagle3Config(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        rope_scaling=target.rope_scaling,
        max_position_embeddings=target.max_position_embeddings,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=False,
        aux_layers=target.aux_layers,
    )


def new_head(target: Llama, vocabulary: Tensor) -> Eagle3Head:
    """A trainable fp32 head whose draft vocabulary is ``vocabulary`` (target ids, rising)."""
    head = Eagle3Head(head_config(target.config, len(vocabulary)), target.model.embed_tokens)
    head.float()
    head.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
    with torch.no_grad():
        _copy_weights(head, target, vocabulary)
    return head


@torch.no_grad()
def continued_head(origin: Eagle3Head, target: Llama, vocabulary: Tensor) -> Eagle3Head:
    """``origin`` with another draft vocabulary, to be trained on; tokens that are new to it start as the target's."""
    head = new_head(target, vocabulary)
    own = origin.float().state_dict()
    rows_VE = target.lm_head.weight.float().clone()
    rows_VE[origin.target_ids] = own["lm_head.weight"]
    own |= {"lm_head.weight": rows_VE[vocabulary], "d2t": head.d2t}
    head.load_state_dict(own)
    return head


def _copy_weights(head: Eagle3Head, target: Llama, vocabulary: Tensor) -> None:
    first: Any = target.model.layers[0]
    last: Any = target.model.layers[-1]
    layer, width = head.midlayer, target.config.hidden_size
    head.fc.weight.zero_()
    head.fc.weight[:, 2 * width :].copy_(torch.eye(width))
    for name in ("q_proj", "k_proj", "v_proj"):
        mine: nn.Linear = getattr(layer.self_attn, name)
        mine.weight[:, :width].copy_(getattr(first.self_attn, name).weight)
        mine.weight[:, width:].copy_(getattr(last.self_attn, name).weight)
    layer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(layer.mlp, name).weight.copy_(getattr(last.mlp, name).weight)
    layer.hidden_norm.weight.copy_(last.input_layernorm.weight)
    layer.input_layernorm.weight.copy_(first.input_layernorm.weight)
    layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    head.norm.weight.copy_(target.model.norm.weight)
    head.lm_head.weight.copy_(target.lm_head.weight[vocabulary])
