"""Blocks and heads on the compiled bf16 kernels of ``specdecode_kernels.cpu``, for CPUs that support bf16.

They compute the same function as the plain modules, but round once where those round twice. Each row is computed
independently of the rest of the batch, with bit-identical results. Therefore speculation does not change the text in
bf16 either.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdecode_kernels.cpu import matrix
from specdecode_kernels.cpu.native import library
from specdecode_kernels.cpu.ops import HEAD_SIZES, Entry, Heads, Norm, Tail
from specdecode_worker.models.causal_lm import MLP, Attend, Attention, Block, RMSNorm
from specdecode_worker.models.config import PassRotations
from specdecode_worker.models.eagle import Midlayer, normed_pair
from specdecode_worker.models.linear import Linear, runs_compiled


class NativeNorm(nn.Module):
    """RMSNorm that makes a single pass over each row."""

    def __init__(self, origin: RMSNorm) -> None:
        super().__init__()
        self.weight = origin.weight
        self._run = Norm(origin.weight.detach(), origin.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._run(x)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(normed, summed)`` of ``x + residual``, as `RMSNorm.of_sum` does."""
        summed = x + residual
        return self._run(summed), summed


class NativeBlock(nn.Module):
    """Block in three calls: norm and query, key and value projections; attention; output projection and MLP."""

    def __init__(self, origin: Block) -> None:
        super().__init__()
        norm = origin.input_layernorm
        self._entry = _entry(origin.self_attn, norm if isinstance(norm, RMSNorm) else None)
        assert isinstance(origin.mlp, MLP), "it suits"
        self._tail = _tail(origin.self_attn, origin.post_attention_layernorm, origin.mlp)

    def forward(self, layer: int, x_TE: Tensor, rope: PassRotations, attend: Attend) -> Tensor:
        q_THD, k_TKD, v_TKD = self._entry(x_TE, rope.tables)
        return self._tail(attend(layer, rope.scaled(q_THD), k_TKD, v_TKD), x_TE)


class NativeMidlayer(nn.Module):
    """Compiled Midlayer.

    Its two input norms run as separate calls, because their results are concatenated before the projections.
    """

    def __init__(self, origin: Midlayer) -> None:
        super().__init__()
        self.norm_before_residual = origin.norm_before_residual
        self.input_layernorm, self.hidden_norm = NativeNorm(origin.input_layernorm), NativeNorm(origin.hidden_norm)
        self._entry = _entry(origin.self_attn, None)
        self._tail = _tail(origin.self_attn, origin.post_attention_layernorm, origin.mlp)

    def forward(
        self, embed_tokens: nn.Embedding, tokens_T: Tensor, hidden_TE: Tensor, rope: PassRotations, attend: Attend
    ) -> Tensor:
        embedding_TE = embed_tokens(tokens_T).to(hidden_TE.dtype)
        pair, normed_TE = normed_pair(self.input_layernorm, self.hidden_norm, embedding_TE, hidden_TE)
        residual_TE = normed_TE if self.norm_before_residual else hidden_TE
        return self._tail(attend(0, *self._entry(pair, rope.tables)), residual_TE)


def run_norms_natively(model: nn.Module) -> None:
    """Replace every norm in bf16 on a CPU by its compiled version, in place."""
    if library() is None:
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, RMSNorm) and (child.weight.dtype, child.weight.device.type) == (torch.bfloat16, "cpu"):
                setattr(module, name, NativeNorm(child))


def run_blocks_natively(model: nn.Module) -> None:
    """Replace every supported block by its compiled version, in place.

    Blocks with replaced projections (tensor parallelism, quantization), and those of a subclass, are left unchanged.
    """
    for name, child in list(model.named_children()):
        if type(child) is Block and _suits(child.self_attn, child.mlp):
            setattr(model, name, NativeBlock(child))
        elif type(child) is Midlayer and _suits(child.self_attn, child.mlp):
            setattr(model, name, NativeMidlayer(child))
        else:
            run_blocks_natively(child)


def _suits(attention: Attention, mlp: nn.Module) -> bool:
    if not isinstance(mlp, MLP):
        return False
    parts = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    parts += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return attention.head_dim in HEAD_SIZES and all(part.is_plain and runs_compiled(part.weight) for part in parts)


def _entry(attention: Attention, norm: RMSNorm | None) -> Entry:
    joined = Linear.joined((attention.q_proj, attention.k_proj, attention.v_proj))
    return Entry(
        matrix.pack(joined.weight, joined.bias),
        Heads(attention.queries, attention.keys, attention.head_dim),
        norm_weight=None if norm is None else norm.weight.detach(),
        norm_eps=0.0 if norm is None else norm.eps,
        head_norm_HD=attention.joined_norm(),
        head_eps=0.0 if attention.q_norm is None else attention.q_norm.eps,
    )


def _tail(attention: Attention, norm: RMSNorm, mlp: MLP) -> Tail:
    return Tail(
        matrix.pack(attention.o_proj.weight, attention.o_proj.bias),
        matrix.pack_gated(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.gate_proj.bias, mlp.up_proj.bias),
        matrix.pack(mlp.down_proj.weight, mlp.down_proj.bias),
        norm_weight=norm.weight.detach(),
        norm_eps=norm.eps,
    )
