"""Causal language model: normalization, attention, MLPs and experts, the blocks of them, and the whole network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdecode_kernels.grouped_linear.op import group
from specdecode_kernels.rms_norm.op import rms_norm
from specdecode_kernels.rope_cache.reference import UNSCALED, Scales
from specdecode_worker.models.checkpoint import Entry, whole
from specdecode_worker.models.config import BlockConfig, CausalLMConfig, PassRotations, Rope
from specdecode_worker.models.fields import Fields
from specdecode_worker.models.linear import Linear, Split
from specdecode_worker.models.target_states import NO_STATES, TargetStates


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

    attention: type[Attention] = Attention
    """Attention of the layer, which is called as `Attention` is."""

    def __init__(self, config: BlockConfig, *, input_norm: bool = True, mlp: MLP | Experts | None = None) -> None:
        super().__init__()
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if input_norm else nn.Identity()
        self.input_layernorm = norm
        self.self_attn = self.attention(config, config.hidden_size)
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


# Decoder over a packed list of tokens, for targets and draft models, and the descriptor of an architecture.

# Parameter names are those of Hugging Face, so a checkpoint loads by name.


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Output of one pass of the target.

    ``hidden_TE`` is the last layer's output after the final norm. ``aux_TA`` concatenates the states that the pass's
    `TargetStates` names, in its order; it is None if `TargetStates` names none.
    """

    hidden_TE: Tensor
    aux_TA: Tensor | None


class DecoderStack(nn.Module):
    """Embedding, layers and final norm: the part named ``model.`` in a checkpoint."""

    def __init__(self, config: CausalLMConfig, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class CausalLM(nn.Module):
    """Target or draft model. Weights are random until a checkpoint is loaded.

    An architecture with other layers overrides `layer`. A layer is called as `Block` is; its matrices are `Linear`.
    """

    def __init__(self, config: CausalLMConfig) -> None:
        super().__init__()
        self.config = config
        self.form = ""
        """Format of most matrices in the checkpoint, or to which they were rounded; empty for plain numbers."""
        self.kv_scales: tuple[Scales, ...] = (UNSCALED,) * config.num_hidden_layers  # of a KV cache in fp8
        self.model = DecoderStack(config, (self.layer(config, index) for index in range(config.num_hidden_layers)))
        self.lm_head = Linear(config.hidden_size, config.vocab_size, split=Split.VOCABULARY)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.rope = Rope(config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling)
        # Position 0 is the rotation by no angle, for layers that do not rotate.
        rotating = all(config.kind(index).rotates for index in range(config.num_hidden_layers))
        self.no_rope = None if rotating else Rope(config.head_dim, 1, config.rope_theta, None)

    def layer(self, config: CausalLMConfig, index: int) -> nn.Module:
        """Return the layer ``index`` of a new network."""
        return Block(config)

    def arrange(self) -> None:
        """Bring the weights from the layout of the files to that of the layers, in place, once they are loaded."""

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, reads: TargetStates = NO_STATES
    ) -> TargetOutput:
        """Return the hidden states of the packed tokens and the auxiliary states that ``reads`` requests."""
        x_TE = self.model.embed_tokens(tokens_T)
        rope = self.rope.at(positions_T, x_TE.dtype)
        no_rope = rope
        if self.no_rope is not None:
            temperature = self.config.temperature
            factor_T11 = None if temperature is None else temperature.of(positions_T)
            no_rope = self.no_rope.at(torch.zeros_like(positions_T), x_TE.dtype, factor_T11)
        inputs: dict[int, Tensor] = {}
        for layer, block in enumerate(self.model.layers):
            if layer in reads.layers:
                inputs[layer] = x_TE
            x_TE = block(layer, x_TE, rope if self.config.kind(layer).rotates else no_rope, attend)
        inputs[len(self.model.layers)] = x_TE
        hidden_TE = self.model.norm(x_TE)
        parts = [inputs[layer] for layer in reads.layers] + [hidden_TE] * reads.final
        return TargetOutput(hidden_TE, torch.cat(parts, dim=-1) if parts else None)

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Return the logits [R, V] in the model's dtype.

        Callers select the rows first, so that no unused row is multiplied.
        """
        return self.lm_head(hidden_RE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Everything that an architecture of targets and draft models brings. Its module defines it, `arch` lists it."""

    name: str
    """Name in ``architectures`` of config.json."""
    model_type: str
    """Name in ``model_type``, which counts where ``architectures`` is absent."""
    read: Callable[[Fields, int | None], CausalLMConfig]
    """Reader of config.json for texts of up to so many tokens; None stands for the model's own limit."""
    network: Callable[[CausalLMConfig], CausalLM] = CausalLM
    """Network with random weights."""
    tensor_name: Callable[[str], str | None] = str
    """Name in the network of a tensor of the files; None for a tensor that the text model has not."""
    entries: Callable[[str, tuple[int, ...]], Mapping[str, Entry]] = whole
    """Tensors of the network that one of the files holds, by that one's name and shape; empty if it is one itself."""
