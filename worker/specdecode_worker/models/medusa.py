"""Medusa heads (Cai et al., arXiv 2401.10774): head k predicts token k + 2 from the target's last hidden state.

A head is a stack of residual blocks x + SiLU(Wx + b) and a matrix to the vocabulary. Heads read no tokens and have no
cache. Weights and arithmetic follow FasterDecoding's medusa_model.py. Parameter names are vLLM's (``blocks``,
``lm_heads``); FasterDecoding's names are converted when a checkpoint is loaded. Medusa's typical acceptance is not
implemented, because it is not lossless.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdecode_worker.models.config import MedusaConfig
from specdecode_worker.models.linear import Linear
from specdecode_worker.models.target_states import TargetStates


class ResidualBlocks(nn.Module):
    """Stack of ``num_layers`` residual blocks x + SiLU(Wx + b)."""

    def __init__(self, config: MedusaConfig, *, bias: bool) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleList(Linear(size, size, bias=bias) for _ in range(config.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(nn.Module):
    """All Medusa heads of a checkpoint.

    ``bias`` is true for FasterDecoding's blocks; vLLM's have a bias if ``medusa_fc_bias`` is set.
    """

    reads = TargetStates((), final=True)
    token_map: Tensor | None

    def __init__(self, config: MedusaConfig, *, bias: bool = True) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(ResidualBlocks(config, bias=bias) for _ in range(config.num_heads))
        self.lm_heads = nn.ModuleList(
            Linear(config.hidden_size, config.draft_vocab_size) for _ in range(config.num_heads)
        )
        truncated = config.draft_vocab_size < config.vocab_size
        self.register_buffer(
            "token_map", torch.zeros(config.draft_vocab_size, dtype=torch.int64) if truncated else None
        )

    @property
    def count(self) -> int:
        """Number of heads, which is the draft depth."""
        return self.config.num_heads

    @property
    def target_ids(self) -> Tensor | None:
        """Target ids of the columns of ``logits``, [draft vocabulary]; None if they are the target's vocabulary."""
        return self.token_map

    def logits(self, hidden_BE: Tensor) -> Tensor:
        """Return the logits [heads, B, draft vocabulary].

        ``hidden_BE`` is the target's final hidden state after the norm. Row k of the result predicts the token k + 2
        positions after that state.
        """
        return torch.stack([self.head_logits(hidden_BE, head) for head in range(self.count)])

    def head_logits(self, hidden_BE: Tensor, head: int) -> Tensor:
        """Return the logits of one head, [B, draft vocabulary], from states as for `logits`."""
        logits_BV: Tensor = self.lm_heads[head](self.blocks[head](hidden_BE))
        return logits_BV
