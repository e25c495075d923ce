"""Medusa's heads (Cai et al., arXiv 2401.10774): head k guesses token k + 2 from the target's last hidden state.

A head is residual blocks x + SiLU(Wx + b) and a matrix to the vocabulary. Heads read no tokens and keep no cache.
Weights and arithmetic are FasterDecoding's medusa_model.py, names vLLM's (``blocks``, ``lm_heads``); the former's are
renamed on load. Its typical acceptance is not lossless and is not here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdecode_worker.models.configs.draft_config import MedusaConfig
from specdecode_worker.models.configs.target_states import Reads


class ResidualBlocks(nn.Module):
    """x + SiLU(Wx + b), some times over."""

    def __init__(self, config: MedusaConfig, *, bias: bool) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=bias) for _ in range(config.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(nn.Module):
    """All heads. ``bias``: FasterDecoding's blocks have one, vLLM's have one when ``medusa_fc_bias`` says so."""

    reads = Reads((), final=True)
    token_map: Tensor | None

    def __init__(self, config: MedusaConfig, *, bias: bool = True) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(ResidualBlocks(config, bias=bias) for _ in range(config.num_heads))
        self.lm_heads = nn.ModuleList(
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) for _ in range(config.num_heads)
        )
        truncated = config.draft_vocab_size < config.vocab_size
        self.register_buffer(
            "token_map", torch.zeros(config.draft_vocab_size, dtype=torch.int64) if truncated else None
        )

    @property
    def count(self) -> int:
        return self.config.num_heads

    @property
    def target_ids(self) -> Tensor | None:
        """[draft_vocab] target ids of the columns of ``logits``; None when they are the target's vocabulary."""
        return self.token_map

    def logits(self, hidden_BE: Tensor) -> Tensor:
        """[heads, B, V] from the target's final normed hidden state behind which head k's token k + 2 is to come."""
        return torch.stack(
            [matrix(blocks(hidden_BE)) for blocks, matrix in zip(self.blocks, self.lm_heads, strict=True)]
        )
