"""The P-EAGLE draft head (arXiv 2602.01469): an EAGLE-3 head that drafts all positions in one pass.

The first drafted position reads the pair (target's state, embedding of the root), as in EAGLE-3. Each further position
reads a learned pair that is the same for all of them: the state ``mask_hidden``, which passes through ``fc`` like the
target's states, and the embedding of the mask token. Its query sees the committed slots up to the root and the drafted
positions before it. Tensor names and shapes follow vLLM (vllm-project/vllm, vllm/model_executor/models/
llama_eagle3.py: ``mask_hidden``) and the format ``peagle`` of speculators (vllm-project/speculators,
src/speculators/models/peagle/core.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdecode_worker.models.configs.peagle_config import PEagleConfig
from specdecode_worker.models.networks.eagle3 import Eagle3Head


class PEagleHead(Eagle3Head):
    """P-EAGLE draft head. ``mask_hidden`` [1, 1, A] replaces the target's states at drafted positions."""

    config: PEagleConfig

    def __init__(self, config: PEagleConfig, embed_tokens: nn.Embedding, *, own_embedding: bool = False) -> None:
        super().__init__(config, embed_tokens, own_embedding=own_embedding)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, self.reads.width(config.target_hidden_size)))

    @property
    def mask_state(self) -> Tensor:
        """State that the head reads at a mask slot, [1, E]."""
        return self.fuse(self.mask_hidden.view(1, -1))

    def masked_states(self, aux_TA: Tensor, masked_T: Tensor) -> Tensor:
        """Return the states that the head reads [T, E]: ``mask_hidden`` at masked positions, else the target's."""
        mask_A = self.mask_hidden.flatten().to(aux_TA.dtype)
        return self.fuse(torch.where(masked_T[:, None], mask_A, aux_TA))
