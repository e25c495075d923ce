"""The pieces that target and draft share: norm, rotary positions, attention projections, gated MLP.

Shape suffixes: T packed tokens, H query heads, K key-value heads, D head dimension, E hidden size.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdecode_worker.models.config import Eagle3Config, LlamaConfig, RopeScaling


class Attend(Protocol):
    """Attention of one layer over whatever keys the caller keeps.

    Given this pass's queries [T, H, D] and (rotated) keys and values [T, K, D], keeps the new keys and values as the
    caller sees fit and returns the attended values [T, H, D].
    """

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor: ...


class RMSNorm(nn.Module):
    """Root mean square norm; the mean is taken in fp32 at least (fp64 inputs stay fp64)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Rope(nn.Module):
    """Rotary positions in the half-split layout of Hugging Face checkpoints, with Llama 3's scaling.

    Tables hold ``positions`` rows and are made once; they are no weights and never loaded.
    """

    cos_PD: Tensor
    sin_PD: Tensor

    def __init__(self, head_dim: int, positions: int, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        # Made on the CPU even while a model is built on the meta device: no checkpoint brings these.
        frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
        if scaling is not None:
            frequency = _llama3_scaled(frequency, scaling)
        angle = torch.outer(torch.arange(positions, dtype=torch.float64, device="cpu"), frequency)
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos_PD", angle.cos().float(), persistent=False)
        self.register_buffer("sin_PD", angle.sin().float(), persistent=False)

    def tables(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, 1, D], shared by all layers of a pass."""
        return self.cos_PD[positions_T].unsqueeze(1), self.sin_PD[positions_T].unsqueeze(1)


def _llama3_scaled(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, between the two a linear blend (Llama 3.1)."""
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequency + (1 - keep) * frequency / scaling.factor


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x_THD.shape[-1] // 2
    turned = torch.cat((-x_THD[..., half:], x_THD[..., :half]), dim=-1)
    return (x_THD * cos + turned * sin).to(x_THD.dtype)


class Attention(nn.Module):
    """Projections around an Attend. ``inputs`` is 2E for an EAGLE-3 layer, which reads two states at once."""

    def __init__(self, config: LlamaConfig | Eagle3Config, inputs: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(inputs, queries, bias=False)
        self.k_proj = nn.Linear(inputs, keys, bias=False)
        self.v_proj = nn.Linear(inputs, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, layer: int, x_TE: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.reshape(*y.shape[:-1], -1, self.head_dim)

        q, k, v = heads(self.q_proj(x_TE)), heads(self.k_proj(x_TE)), heads(self.v_proj(x_TE))
        out_THD = attend(layer, rotate(q, *rope), rotate(k, *rope), v)
        result: Tensor = self.o_proj(out_THD.flatten(-2))
        return result


class MLP(nn.Module):
    """Down(SiLU(gate) * up)."""

    def __init__(self, config: LlamaConfig | Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result
