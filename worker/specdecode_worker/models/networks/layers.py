"""Layers that targets and drafts share: RMS norm, attention projections, gated MLP, decoder block.

Shape suffixes: T packed tokens, H query heads, K key-value heads, D head dimension, E hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdecode_kernels.rms_norm.op import rms_norm
from specdecode_kernels.small_linear.op import fits, small_linear
from specdecode_worker.models.configs.target_config import BlockConfig
from specdecode_worker.models.networks.rope import PassRotations


class Attend(Protocol):
    """Attention of one layer over the keys and values that the caller caches.

    Takes the queries [T, H, D], keys and values [T, K, D] of this pass; queries and keys are already rotated. Stores
    the new keys and values in the caller's cache and returns the attended values [T, H, D].
    """

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor: ...


class RotatingAttend(ABC):
    """Attention that also applies the rotary embedding, fused into the kernel that writes the keys."""

    @abstractmethod
    def rotate_and_attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rope: PassRotations) -> Tensor:
        """Return the attended values as `Attend` does, for queries and keys that are not rotated yet."""


class RMSNorm(nn.Module):
    """Root mean square norm. The mean is computed in fp32 at least; fp64 inputs stay fp64."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)[0]

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(normed, summed)`` of ``x + residual``."""
        return rms_norm(x, self.weight, self.eps, residual)


def normed_linear(norm: nn.Module | None, linear: nn.Module, x_TK: Tensor) -> Tensor:
    """Return ``linear(norm(x))``, on a GPU by the product of few rows if it serves the matrix."""
    normed_TK: Tensor = x_TK if norm is None else norm(x_TK)
    if type(linear) is nn.Linear and fits(normed_TK, linear.weight):
        return small_linear(normed_TK, linear.weight, linear.bias)
    result: Tensor = linear(normed_TK)
    return result


class Attention(nn.Module):
    """Query, key, value and output projections around an `Attend`.

    ``inputs`` is the width of the input: E, or 2E for an EAGLE-3 layer, which reads two states at once.
    """

    def __init__(self, config: BlockConfig, inputs: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(inputs, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(inputs, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(inputs, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, layer: int, x_TE: Tensor, rope: PassRotations, attend: Attend) -> Tensor:
        """Return the attention output [T, E] of ``layer`` for its normed input [T, inputs]."""

        def heads(y: Tensor) -> Tensor:
            return y.reshape(*y.shape[:-1], -1, self.head_dim)

        q, k, v = heads(self.q_proj(x_TE)), heads(self.k_proj(x_TE)), heads(self.v_proj(x_TE))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out_THD = attend(layer, rope.rotate(q), rope.rotate(k), v)
        result: Tensor = self.o_proj(out_THD.flatten(-2))
        return result


class MLP(nn.Module):
    """Gated MLP: ``down(SiLU(gate) * up)``."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Block(nn.Module):
    """One pre-norm decoder layer.

    ``input_norm`` is false for the first layer of an EAGLE-1 head, which reads the fused pair without a norm.
    """

    def __init__(self, config: BlockConfig, *, input_norm: bool = True) -> None:
        super().__init__()
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if input_norm else nn.Identity()
        self.input_layernorm = norm
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, layer: int, x_TE: Tensor, rope: PassRotations, attend: Attend) -> Tensor:
        """Return the layer's output [T, E]."""
        attended_TE = self.self_attn(layer, self.input_layernorm(x_TE), rope, attend)
        normed_TE, x_TE = self.post_attention_layernorm.of_sum(attended_TE, x_TE)
        return x_TE + self.mlp(normed_TE)  # type: ignore[no-any-return]
