"""The EAGLE-1 draft head, which EAGLE-2 uses too (Li et al., arXiv 2401.15077 and 2406.16858).

Slot i reads the pair (embedding of token i, feature f[i-1]) through ``fc`` and returns the next feature. A feature is
the target's final hidden state after its last norm; the target's lm_head turns it into logits. This matches SafeAILab's
ea_model.py, which passes ``base_model.model(...)[0]`` to the head, and vLLM's llama_eagle.py, which passes the model's
output; both are normed. Layers and names follow cnets1.py: the first layer has no norm on its input.
"""

from __future__ import annotations

from torch import Tensor, nn

from specdecode_kernels.draft_input.op import draft_input
from specdecode_worker.models.configs.draft_config import EagleConfig
from specdecode_worker.models.configs.target_states import TargetStates
from specdecode_worker.models.linear import Linear
from specdecode_worker.models.networks.layers import Attend, Block
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.models.networks.rope import Rope


class EagleHead(nn.Module):
    """Draft head over the target's whole vocabulary.

    Embeddings and lm_head are shared with the target unless the checkpoint contains copies.
    """

    reads = TargetStates((), final=True)
    target_ids: None = None
    """Always None: logits are over the target's vocabulary already."""

    def __init__(
        self, config: EagleConfig, target: Llama, *, own_embedding: bool = False, own_lm_head: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=bool(config.fc_bias))
        self.layers = nn.ModuleList(Block(config, input_norm=i > 0) for i in range(config.num_hidden_layers))
        self.rope = Rope(config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling)
        vocab, size = config.vocab_size, config.hidden_size
        self.embed_tokens = nn.Embedding(vocab, size) if own_embedding else None
        self.lm_head = Linear(size, vocab) if own_lm_head else None
        # A tuple keeps the target from being registered as a submodule. Its parts are read at call time, since the
        # target may be fused later.
        self._target = (target,)

    def fuse(self, aux_TA: Tensor) -> Tensor:
        """Return the feature [T, E], which is the target's final hidden state."""
        return aux_TA

    def forward(self, hidden_TE: Tensor, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Return the features [T, E] for the next slot.

        ``positions_T`` are the positions of the slots. ``attend`` is called once per layer.
        """
        embed_tokens = self._target[0].model.embed_tokens if self.embed_tokens is None else self.embed_tokens
        x_TE: Tensor = self.fc(draft_input(embed_tokens.weight, tokens_T, hidden_TE)[0])
        rope = self.rope.at(positions_T, hidden_TE.dtype)
        for layer, block in enumerate(self.layers):
            x_TE = block(layer, x_TE, rope, attend)
        return x_TE

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Return the logits [T, V] of features, from the target's lm_head or the head's own copy."""
        return self._target[0].logits(hidden_TE) if self.lm_head is None else self.lm_head(hidden_TE)
