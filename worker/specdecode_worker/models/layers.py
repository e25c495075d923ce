"""Layers that targets and drafts share: RMS norm, attention projections, gated MLP, decoder block.

Shape suffixes: T packed tokens, H query heads, K key-value heads, D head dimension, E hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdecode_kernels.grouped_linear.op import group
from specdecode_kernels.rms_norm.op import rms_norm
from specdecode_worker.models.config import BlockConfig
from specdecode_worker.models.linear import Linear, Split
from specdecode_worker.models.rope import PassRotations


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


class UnitNorm(RMSNorm):
    """RMSNorm without weights, which no checkpoint has. Kernels that expect weights read ones."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        del self.weight
        # As with the tables of `Rope`: on the CPU even while a model is built on the meta device.
        self.register_buffer("weight", torch.ones(size, device="cpu"), persistent=False)


class Attention(nn.Module):
    """Query, key, value and output projections around an `Attend`.

    ``inputs`` is the width of the input: E, or 2E for an EAGLE-3 layer, which reads two states at once.
    """

    qkv_proj: Linear | None
    """The three projections that read the input, once they are joined."""
    head_norm_HD: Tensor | None

    def __init__(self, config: BlockConfig, inputs: int) -> None:
        super().__init__()
        self.qkv_proj, self.head_norm_HD = None, None
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.queries, self.keys = config.num_attention_heads, config.num_key_value_heads
        queries, keys = self.queries * config.head_dim, self.keys * config.head_dim
        self.q_proj = Linear(inputs, queries, bias=config.qkv_bias, split=Split.OUTPUTS)
        self.k_proj = Linear(inputs, keys, bias=config.qkv_bias, split=Split.OUTPUTS)
        self.v_proj = Linear(inputs, keys, bias=config.qkv_bias, split=Split.OUTPUTS)
        self.o_proj = Linear(queries, config.hidden_size, bias=config.o_bias, split=Split.INPUTS)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def join(self) -> None:
        """Make one matrix of the three projections; their names in the checkpoint no longer apply."""
        self.qkv_proj = Linear.joined((self.q_proj, self.k_proj, self.v_proj))
        del self.head_norm_HD
        self.register_buffer("head_norm_HD", self.joined_norm())
        del self.q_proj, self.k_proj, self.v_proj

    def forward(self, layer: int, x_TE: Tensor, rope: PassRotations, attend: Attend) -> Tensor:
        """Return the attention output [T, E] of ``layer`` for its normed input [T, inputs]."""
        return self.o_proj(self.attended(layer, x_TE, rope, attend))

    def attended(self, layer: int, x_TE: Tensor, rope: PassRotations, attend: Attend) -> Tensor:
        """Return the attended values [T, H * D], which the output projection reads."""
        if self.qkv_proj is None:
            q_THD, k_TKD, v_TKD = self._separately(x_TE)
            return attend(layer, rope.scaled(rope.rotate(q_THD)), rope.rotate(k_TKD), v_TKD).flatten(-2)
        heads_THD = self._heads(self.qkv_proj(x_TE))
        v_TKD = heads_THD[:, self.queries + self.keys :]
        turning_THD = heads_THD[:, : self.queries + self.keys]
        if self.head_norm_HD is not None:
            turning_THD = F.rms_norm(turning_THD, (self.head_dim,), None, self.eps) * self.head_norm_HD
        if isinstance(attend, RotatingAttend):
            q_THD, k_TKD = rope.scaled(turning_THD[:, : self.queries]), turning_THD[:, self.queries :]
            out_THD = attend.rotate_and_attend(layer, q_THD, k_TKD, v_TKD, rope)
        else:
            turned_THD = rope.rotate(turning_THD)
            q_THD, k_TKD = rope.scaled(turned_THD[:, : self.queries]), turned_THD[:, self.queries :]
            out_THD = attend(layer, q_THD, k_TKD, v_TKD)
        return out_THD.flatten(-2)

    def joined_norm(self) -> Tensor | None:
        """Return the norm weights [queries + keys, D] of all heads, or None if they have no norms."""
        if self.q_norm is None or self.k_norm is None:
            return None
        q_D, k_D = self.q_norm.weight.detach(), self.k_norm.weight.detach()
        return torch.cat((q_D.expand(self.queries, -1), k_D.expand(self.keys, -1)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)

    def _separately(self, x_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (self._heads(part(x_TE)) for part in parts)
        return (q, k, v) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k), v)


class MLP(nn.Module):
    """Gated MLP: ``down(SiLU(gate) * up)``."""

    gate_up_proj: Linear | None
    """Gate and up, once they are joined."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.gate_up_proj = None
        size, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(size, width, bias=bias, split=Split.OUTPUTS)
        self.up_proj = Linear(size, width, bias=bias, split=Split.OUTPUTS)
        self.down_proj = Linear(width, size, bias=bias, split=Split.INPUTS)

    def join(self) -> None:
        """Make one matrix of gate and up; their names in the checkpoint no longer apply."""
        self.gate_up_proj = Linear.joined((self.gate_proj, self.up_proj))
        del self.gate_proj, self.up_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.inner(x))

    def plus(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return ``residual + mlp(x)``; ``residual`` may be overwritten."""
        return self.down_proj.plus(residual, self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        """Return the gated channels, which ``down_proj`` reads."""
        if self.gate_up_proj is not None:
            return self.gate_up_proj.gated(x)
        return F.silu(self.gate_proj(x)) * self.up_proj(x)


class Experts(nn.Module):
    """Mixture of a shared MLP and one expert for each token: ``shared(x) + expert(score * x)``.

    The router chooses the expert by its largest logit, whose sigmoid is the score. Devices split every expert as they
    split an MLP, and sum the shared and the chosen part together.
    """

    gate_up_proj: Linear | None
    """Gate and up of all experts, one above the other, once they are stacked for the kernels of GPUs."""
    down_proj: Linear | None

    def __init__(self, config: BlockConfig, count: int) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = None, None
        self.router = Linear(config.hidden_size, count)
        self.shared_expert = MLP(config)
        self.experts = nn.ModuleList(MLP(config) for _ in range(count))

    def forward(self, x_TE: Tensor) -> Tensor:
        logits_TX, down = self.router(x_TE), self.shared_expert.down_proj
        own_TE = down.own(self.shared_expert.inner(x_TE))
        if self.gate_up_proj is None or self.down_proj is None:
            top_T, expert_T = logits_TX.max(-1)
            score_T1 = top_T.float().sigmoid().to(x_TE.dtype).unsqueeze(-1)
            own_TE = own_TE + self._chosen(x_TE * score_T1, expert_T)
        else:
            groups = group(logits_TX)
            inner_TN = self.gate_up_proj.grouped(x_TE, groups, scored=True, gated=True)
            own_TE = self.down_proj.grouped(inner_TN, groups, residual_TN=own_TE)
        out_TE: Tensor = down.combined(own_TE)
        return out_TE

    def plus(self, residual_TE: Tensor, x_TE: Tensor) -> Tensor:
        """Return ``residual + experts(x)``, as `MLP.plus` does."""
        out_TE: Tensor = residual_TE + self(x_TE)
        return out_TE

    def stack(self) -> None:
        """Stack the joined matrices of all experts where the kernels serve them; their names no longer apply."""
        experts = [cast(MLP, one) for one in self.experts]
        gates, downs = [cast(Linear, one.gate_up_proj) for one in experts], [one.down_proj for one in experts]
        if all(one.is_groupable for one in (*gates, *downs)):
            gate_up, down = Linear.joined(gates), Linear.joined(downs)
            if gate_up.is_groupable and down.is_groupable:
                del self.experts
                self.gate_up_proj, self.down_proj = gate_up, down

    def _chosen(self, x_TE: Tensor, expert_T: Tensor) -> Tensor:
        """Return this device's part of each token's expert. Its numbers are read on the host."""
        out_TE = torch.empty_like(x_TE)
        for index in sorted(set(expert_T.tolist())):
            chosen = self.experts[index]
            rows = (expert_T == index).nonzero()[:, 0]
            out_TE[rows] = chosen.down_proj.own(chosen.inner(x_TE[rows]))
        return out_TE


class Block(nn.Module):
    """One pre-norm decoder layer.

    ``input_norm`` is false for the first layer of an EAGLE-1 head, which reads the fused pair without a norm. ``mlp``
    takes the place of the MLP of ``config``.
    """

    def __init__(self, config: BlockConfig, *, input_norm: bool = True, mlp: MLP | Experts | None = None) -> None:
        super().__init__()
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if input_norm else nn.Identity()
        self.input_layernorm = norm
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp or MLP(config)

    def forward(self, layer: int, x_TE: Tensor, rope: PassRotations, attend: Attend) -> Tensor:
        """Return the layer's output [T, E]."""
        attended = self.self_attn.attended(layer, self.input_layernorm(x_TE), rope, attend)
        return after_attention(self, attended, x_TE)


class DecoderLayer(Protocol):
    """Layer that ends with the output projection of its attention and an MLP."""

    self_attn: Attention
    post_attention_layernorm: RMSNorm

    @property
    def mlp(self) -> MLP | Experts: ...


def after_attention(layer: DecoderLayer, attended: Tensor, residual_TE: Tensor) -> Tensor:
    """Return the layer's output [T, E] for the attended values [T, H * D].

    On a GPU, the residual sums run inside of the matrix products where these have few rows. Else the one after
    attention is part of the norm. ``residual_TE`` may be overwritten.
    """
    output, norm, mlp = layer.self_attn.o_proj, layer.post_attention_layernorm, layer.mlp
    if output.few(attended):
        x_TE = output.plus(residual_TE, attended)
        normed_TE: Tensor = norm(x_TE)
    else:
        normed_TE, x_TE = norm.of_sum(output(attended), residual_TE)
    return mlp.plus(x_TE, normed_TE)
