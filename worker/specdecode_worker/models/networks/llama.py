"""Llama over a packed list of tokens, for targets and draft models: Llama 2 and 3, Qwen 2 and 3, Mistral.

Parameter names are those of Hugging Face, so a checkpoint loads by name. `configs.target_config` lists the differences
between the families.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdecode_worker.models.configs.model_config import LlamaConfig
from specdecode_worker.models.configs.target_states import NO_STATES, TargetStates
from specdecode_worker.models.linear import Linear, Split
from specdecode_worker.models.networks.layers import Attend, Block, RMSNorm
from specdecode_worker.models.networks.rope import Rope
from specdecode_worker.models.networks.vocabulary_map import VocabularyMap


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Output of one pass of the target.

    ``hidden_TE`` is the last layer's output after the final norm. ``aux_TA`` concatenates the states that the pass's
    `TargetStates` names, in its order; it is None if `TargetStates` names none.
    """

    hidden_TE: Tensor
    aux_TA: Tensor | None


class LlamaModel(nn.Module):
    """Embedding, blocks and final norm: the part named ``model.`` in a checkpoint."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """Target or draft model. Weights are random until a checkpoint is loaded."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.vocabulary: VocabularyMap | None = None  # set for a draft model with another vocabulary than its target's
        self.model = LlamaModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, split=Split.VOCABULARY)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.rope = Rope(config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling)

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, reads: TargetStates = NO_STATES
    ) -> TargetOutput:
        """Return the hidden states of the packed tokens and the auxiliary states that ``reads`` requests."""
        x_TE = self.model.embed_tokens(tokens_T)
        rope = self.rope.at(positions_T, x_TE.dtype)
        inputs: dict[int, Tensor] = {}
        for layer, block in enumerate(self.model.layers):
            if layer in reads.layers:
                inputs[layer] = x_TE
            x_TE = block(layer, x_TE, rope, attend)
        inputs[len(self.model.layers)] = x_TE
        hidden_TE = self.model.norm(x_TE)
        parts = [inputs[layer] for layer in reads.layers] + [hidden_TE] * reads.final
        return TargetOutput(hidden_TE, torch.cat(parts, dim=-1) if parts else None)

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Return the logits [R, V] in the model's dtype.

        Callers select the rows first, so that no unused row is multiplied.
        """
        return self.lm_head(hidden_RE)
