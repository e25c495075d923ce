"""The target: Llama 2 and 3 over a packed list of tokens.

Parameter names are Hugging Face's (LlamaForCausalLM), so a checkpoint loads by name alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdecode_worker.models.config import LlamaConfig
from specdecode_worker.models.layers import MLP, Attend, Attention, RMSNorm, Rope
from specdecode_worker.models.reads import NOTHING, Reads


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """``hidden_TE`` is the last layer's output after the final norm; ``aux_TA`` concatenates what was asked for beside
    it, in the order of ``Reads``, or is None when that was nothing."""

    hidden_TE: Tensor
    aux_TA: Tensor | None


class Block(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, layer: int, x_TE: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x_TE = x_TE + self.self_attn(layer, self.input_layernorm(x_TE), rope, attend)
        return x_TE + self.mlp(self.post_attention_layernorm(x_TE))  # type: ignore[no-any-return]


class Trunk(nn.Module):
    """Embedding, blocks and final norm: the part named ``model.`` in a checkpoint."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """A Llama target. Weights are random until loaded."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.rope = Rope(config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, reads: Reads = NOTHING) -> TargetOutput:
        x_TE = self.model.embed_tokens(tokens_T)
        cos, sin = self.rope.tables(positions_T)
        rope = (cos.to(x_TE.dtype), sin.to(x_TE.dtype))
        inputs: dict[int, Tensor] = {}
        for layer, block in enumerate(self.model.layers):
            if layer in reads.layers:
                inputs[layer] = x_TE
            x_TE = block(layer, x_TE, rope, attend)
        inputs[len(self.model.layers)] = x_TE
        hidden_TE = self.model.norm(x_TE)
        parts = [inputs[layer] for layer in reads.layers] + [hidden_TE] * reads.final
        return TargetOutput(hidden_TE, torch.cat(parts, dim=-1) if parts else None)

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """[R, V] in the model's dtype; callers pick the rows first, so that no unused row is multiplied."""
        result: Tensor = self.lm_head(hidden_RE)
        return result
