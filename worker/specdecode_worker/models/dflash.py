"""The DFlash draft head (block diffusion, arXiv 2602.06036): decoder layers over a block of mask slots.

The target's states are fused once and injected into every layer as keys and values of the committed tokens. The block
holds the root's embedding and one mask token for each drafted token; all of its slots see each other. The mask slot k
positions behind the root proposes the token of its own position. Embeddings and lm_head are the target's, or the head's
own copies, with an lm_head over some of the target's tokens (layout of speculators). Names and arithmetic follow
z-lab/dflash (dflash/model.py) and vLLM (vllm-project/vllm, vllm/model_executor/models/qwen3_dflash.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdecode_worker.models.causal_lm import Attend, Attention, Block, CausalLM, RMSNorm
from specdecode_worker.models.config import DFlashConfig, PassRotations, Rope
from specdecode_worker.models.linear import Linear
from specdecode_worker.models.target_states import TargetStates


class InjectedAttention(Attention):
    """Attention whose keys and values come from the block, and from the target's states for committed tokens."""

    def join(self) -> None:
        """Leave the projections apart: committed tokens have keys and values alone."""

    def keys_and_values(self, fused_TE: Tensor, rope: PassRotations) -> tuple[Tensor, Tensor]:
        """Return rotated keys and the values, each [T, K, D], of committed tokens with these fused states."""
        assert self.k_norm is not None, "DFlash heads norm their keys"
        return rope.rotate(self.k_norm(self._heads(self.k_proj(fused_TE)))), self._heads(self.v_proj(fused_TE))


class DFlashLayer(Block):
    """Decoder layer with `InjectedAttention`."""

    attention = InjectedAttention


class DFlashHead(nn.Module):
    """DFlash draft head over the target's whole vocabulary, or over a part of it."""

    d2t: Tensor | None
    """Target id minus draft id of each token of the draft's vocabulary; None if the vocabularies are the same."""

    def __init__(
        self, config: DFlashConfig, target: CausalLM, *, own_embedding: bool = False, own_lm_head: bool = False
    ) -> None:
        """Create a head that reads the target's embeddings and output matrix unless it has its own."""
        super().__init__()
        mapped = config.draft_vocab_size < config.vocab_size
        assert own_lm_head or not mapped, "the target's output matrix has all tokens"
        self.config = config
        width, size = len(config.aux_layers) * config.hidden_size, config.hidden_size
        self.fc = Linear(width, size)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.rope = Rope(config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling)
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if own_embedding else None
        self.lm_head = Linear(size, config.draft_vocab_size) if own_lm_head else None
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64) if mapped else None)
        # A tuple keeps the target from being registered as a submodule. Its parts are read at call time, since the
        # target may be fused later.
        self._target = (target,)

    @property
    def target_ids(self) -> Tensor | None:
        """Target ids of the draft's vocabulary; None if the vocabularies are the same."""
        return None if self.d2t is None else torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @property
    def reads(self) -> TargetStates:
        """States of the target that ``context`` expects."""
        return TargetStates(self.config.aux_layers)

    def context(self, aux_TA: Tensor, positions_T: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values [T, K, D] of every layer for committed tokens at these positions.

        ``aux_TA`` are the target's states of the same tokens.
        """
        fused_TE = self.hidden_norm(self.fc(aux_TA))
        rope = self.rope.at(positions_T, fused_TE.dtype)
        return [layer.self_attn.keys_and_values(fused_TE, rope) for layer in self.layers]  # type: ignore[operator, union-attr]

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Return the states [T, E] of the slots of blocks, before the final norm."""
        embed_tokens = self._target[0].model.embed_tokens if self.embed_tokens is None else self.embed_tokens
        x_TE: Tensor = embed_tokens(tokens_T)
        rope = self.rope.at(positions_T, x_TE.dtype)
        for index, layer in enumerate(self.layers):
            x_TE = layer(index, x_TE, rope, attend)
        return x_TE

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Return the logits [T, draft vocabulary] of mask slots; ``target_ids`` maps their columns."""
        if self.lm_head is None:
            return self._target[0].logits(self.norm(hidden_TE))
        return self.lm_head(self.norm(hidden_TE))
