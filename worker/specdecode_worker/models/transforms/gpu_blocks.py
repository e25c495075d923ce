"""Decoder layers for GPUs: gates and residual sums run inside of matrix products where these have few rows.

With more rows, or matrices that the fused product does not serve, a layer runs the library's products. The residual sum
after attention is then part of the next norm, and the one after the MLP part of the last product. If devices share a
matrix, the first of them adds the residual to its part of the product, before the parts are summed.
"""

from __future__ import annotations

from typing import TypeGuard, cast

from torch import Tensor, nn

from specdecode_kernels import dispatch
from specdecode_kernels.silu_mul.op import silu_mul
from specdecode_kernels.small_linear.op import fits, small_linear
from specdecode_worker.models.networks import collectives
from specdecode_worker.models.networks.eagle3 import Midlayer
from specdecode_worker.models.networks.layers import Attend, Block, RMSNorm, normed_linear
from specdecode_worker.models.networks.rope import PassRotations
from specdecode_worker.models.networks.tensor_parallel import RowParallelLinear
from specdecode_worker.models.transforms.fused_layers import FusedAttention, FusedMLP


class GpuBlock(nn.Module):
    """Block of a target or a draft."""

    def __init__(self, origin: Block) -> None:
        super().__init__()
        norm = origin.input_layernorm
        self.input_layernorm = norm if isinstance(norm, RMSNorm) else None
        self.self_attn = cast(FusedAttention, origin.self_attn)
        self.post_attention_layernorm = origin.post_attention_layernorm
        self.mlp = cast(FusedMLP, origin.mlp)

    def forward(self, layer: int, x_TE: Tensor, rope: PassRotations, attend: Attend) -> Tensor:
        projected = normed_linear(self.input_layernorm, self.self_attn.qkv_proj, x_TE)
        attended = self.self_attn.attended(layer, projected, rope, attend)
        return _tail(self, attended, x_TE)


class GpuMidlayer(nn.Module):
    """First layer of an EAGLE-3 head."""

    def __init__(self, origin: Midlayer) -> None:
        super().__init__()
        # A tuple keeps the origin from being registered as a submodule, which would list its parameters twice.
        self._origin = (origin,)
        self.input_layernorm, self.hidden_norm = origin.input_layernorm, origin.hidden_norm
        self.self_attn = cast(FusedAttention, origin.self_attn)
        self.post_attention_layernorm = origin.post_attention_layernorm
        self.mlp = cast(FusedMLP, origin.mlp)

    def forward(
        self, embed_tokens: nn.Embedding, tokens_T: Tensor, hidden_TE: Tensor, rope: PassRotations, attend: Attend
    ) -> Tensor:
        pair, residual_TE = self._origin[0].pair(embed_tokens, tokens_T, hidden_TE)
        projected = normed_linear(None, self.self_attn.qkv_proj, pair)
        return _tail(self, self.self_attn.attended(0, projected, rope, attend), residual_TE)


def use_gpu_blocks(model: nn.Module) -> None:
    """Replace every decoder layer on a GPU, in place. Projections must have been joined before."""
    for name, child in list(model.named_children()):
        if isinstance(child, Block) and dispatch.on_gpu(child.post_attention_layernorm.weight):
            setattr(model, name, GpuBlock(child))
        elif isinstance(child, Midlayer) and dispatch.on_gpu(child.post_attention_layernorm.weight):
            setattr(model, name, GpuMidlayer(child))
        else:
            use_gpu_blocks(child)


def _tail(layer: GpuBlock | GpuMidlayer, attended: Tensor, residual_TE: Tensor) -> Tensor:
    """Return the layer's output [T, E]: the output projection of its attention, and its MLP."""
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    output: nn.Module = layer.self_attn.o_proj
    joined = cast(nn.Linear, mlp.gate_up_proj)  # `_few` asks whether it is quantised
    down: nn.Module = mlp.down_proj
    if not (_few(output, attended) and _few(joined, residual_TE) and _is_plain(_part(down))):
        normed_TE, x_TE = norm.of_sum(output(attended), residual_TE)
        return _add_linear(x_TE, down, silu_mul(joined(normed_TE)))
    x_TE = _add_few(residual_TE, output, attended)
    inner = small_linear(norm(x_TE), joined.weight, joined.bias, gated=True)
    return _add_few(x_TE, down, inner) if _few(down, inner) else _add_linear(x_TE, down, inner)


def _part(linear: nn.Module) -> nn.Module:
    """Return the matrix of this device: a part if ``linear`` is split over devices by its inputs, else all of it."""
    return linear.part if isinstance(linear, RowParallelLinear) else linear


def _is_plain(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether the matrix is neither quantised nor split over devices."""
    return type(linear) is nn.Linear


def _few(linear: nn.Module, x_TK: Tensor) -> bool:
    part = _part(linear)
    return _is_plain(part) and fits(x_TK, part.weight)


def _add_few(x_TE: Tensor, linear: nn.Module, inner: Tensor) -> Tensor:
    """Return ``x + linear(inner)`` of few rows. If devices share the matrix, the first one adds ``x`` to its part."""
    part = cast(nn.Linear, _part(linear))
    added_TE = x_TE if part is linear or cast(RowParallelLinear, linear).first else None
    result = small_linear(inner, part.weight, part.bias, residual_TN=added_TE)
    if part is not linear:
        collectives.all_reduce(result)
    return result


def _add_linear(x_TE: Tensor, linear: nn.Module, inner: Tensor) -> Tensor:
    """Return ``x + linear(inner)``. ``x_TE``, which no caller reads again, is overwritten by plain matrices."""
    part = _part(linear)
    if not _is_plain(part) or getattr(part, "bias", None) is not None:
        result: Tensor = x_TE + linear(inner)
        return result
    if isinstance(linear, RowParallelLinear) and not linear.first:
        return cast(Tensor, linear(inner))  # the first device adds x before the sum
    x_TE.addmm_(inner, part.weight.t())
    if part is not linear:
        collectives.all_reduce(x_TE)
    return x_TE
