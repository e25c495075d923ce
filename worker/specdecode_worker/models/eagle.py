"""EAGLE draft heads: EAGLE-1 and 2, EAGLE-3, and P-EAGLE."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdecode_kernels import dispatch
from specdecode_kernels.draft_input.op import draft_input
from specdecode_worker.models.causal_lm import MLP, Attend, Attention, Block, CausalLM, RMSNorm, after_attention
from specdecode_worker.models.config import Eagle3Config, EagleConfig, PassRotations, PEagleConfig, Rope
from specdecode_worker.models.linear import Linear
from specdecode_worker.models.target_states import TargetStates

# The EAGLE-1 draft head, which EAGLE-2 uses too (Li et al., arXiv 2401.15077 and 2406.16858).
#
# Slot i reads the pair (embedding of token i, feature f[i-1]) through ``fc`` and returns the next feature. A feature is
# the target's final hidden state after its last norm; the target's lm_head turns it into logits. This matches
# SafeAILab's ea_model.py, which passes ``base_model.model(...)[0]`` to the head, and vLLM's llama_eagle.py, which
# passes the model's output; both are normed. Layers and names follow cnets1.py: the first layer has no norm on its
# input.


class EagleHead(nn.Module):
    """Draft head over the target's whole vocabulary.

    Embeddings and lm_head are shared with the target unless the checkpoint contains copies.
    """

    reads = TargetStates((), final=True)
    target_ids: None = None
    """Always None: logits are over the target's vocabulary already."""

    def __init__(
        self, config: EagleConfig, target: CausalLM, *, own_embedding: bool = False, own_lm_head: bool = False
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


# The EAGLE-3 draft head (Li et al., arXiv 2503.01840): one decoder layer over pairs of states.
#
# Slot i of the draft reads the pair (hidden state h[i-1], embedding of token i) and proposes token i + 1. Where the
# target has run, ``h`` is the target's state, fused from three layers by ``fc``; after that it is the head's own
# output. Further layers, if a head has them, are ordinary decoder layers (vLLM's llama_eagle3.py). Parameter names are
# SafeAILab's (``midlayer.*``); names of other families are converted when a checkpoint is loaded.


class Midlayer(nn.Module):
    """First decoder layer of the head.

    Its attention reads the embedding and the hidden state side by side; its residual is the hidden state.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, embed_tokens: nn.Embedding, tokens_T: Tensor, hidden_TE: Tensor, rope: PassRotations, attend: Attend
    ) -> Tensor:
        """Return the layer's output [T, E] for tokens [T] and hidden states [T, E]."""
        pair, residual_TE = self.pair(embed_tokens, tokens_T, hidden_TE)
        return after_attention(self, self.self_attn.attended(0, pair, rope, attend), residual_TE)

    def pair(self, embed_tokens: nn.Embedding, tokens_T: Tensor, hidden_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention input [T, 2 E] and the residual [T, E].

        On a GPU this is one kernel launch. On a CPU the norms may be the compiled ones.
        """
        token, hidden = self.input_layernorm, self.hidden_norm
        if not dispatch.on_gpu(hidden_TE):
            pair, normed_TE = normed_pair(token, hidden, embed_tokens(tokens_T).to(hidden_TE.dtype), hidden_TE)
            return pair, normed_TE if self.norm_before_residual else hidden_TE
        pair, plain_TE = draft_input(
            embed_tokens.weight,
            tokens_T,
            hidden_TE,
            token_weight_A=token.weight,
            hidden_weight_E=hidden.weight,
            eps=hidden.eps,
        )
        return pair, pair[:, -plain_TE.shape[1] :].contiguous() if self.norm_before_residual else plain_TE


def normed_pair(token: nn.Module, hidden: nn.Module, embedding_TE: Tensor, hidden_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention input [T, 2 E] and the normed state [T, E] by the norms of embedding and hidden state."""
    normed_TE: Tensor = hidden(hidden_TE)
    return torch.cat((token(embedding_TE), normed_TE), dim=-1), normed_TE


class Eagle3Head(nn.Module):
    """EAGLE-3 draft head.

    ``embed_tokens`` is shared with the target unless the checkpoint contains its own, which is then a parameter of the
    head. ``d2t`` [draft vocabulary] holds offsets: target id = draft id + d2t[draft id].
    """

    d2t: Tensor
    shares_output: bool = False
    """True if the checkpoint has no lm_head: its weight is the target's."""

    def __init__(self, config: Eagle3Config, embed_tokens: nn.Embedding, *, own_embedding: bool = False) -> None:
        super().__init__()
        self.config = config
        size, eps, states = config.target_hidden_size, config.rms_norm_eps, len(config.aux_layers)
        self.input_norm = RMSNorm(states * size, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in range(states)) if config.fc_norm else None
        if states:
            self.fc = Linear(states * size, config.hidden_size)
        self.midlayer = Midlayer(config)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(1, config.num_hidden_layers)})
        self.norm = RMSNorm(config.hidden_size, eps)
        self.lm_head = Linear(config.hidden_size, config.draft_vocab_size)
        self.rope = Rope(config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.embed_tokens = embed_tokens if own_embedding else None
        # A tuple keeps it from being registered as a parameter of this module.
        self._shared_embedding = (embed_tokens,)

    @property
    def reads(self) -> TargetStates:
        """States of the target that ``fuse`` expects."""
        return TargetStates(self.config.aux_layers, final=not self.config.aux_layers)

    def fuse(self, aux_TA: Tensor) -> Tensor:
        """Return the target's concatenated auxiliary states [T, A] as one hidden state [T, E]."""
        if self.input_norm is not None:
            aux_TA = self.input_norm(aux_TA)
        if self.fc_norm is not None:
            parts = aux_TA.chunk(len(self.fc_norm), dim=-1)
            aux_TA = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(aux_TA) if self.config.aux_layers else aux_TA

    def forward(self, hidden_TE: Tensor, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Return the hidden states [T, E] for the next slot, before the final norm (after it with ``norm_output``).

        ``positions_T`` are the positions of the slots. ``attend`` is called for layers 0 to num_hidden_layers - 1.
        """
        embed_tokens = self._shared_embedding[0] if self.embed_tokens is None else self.embed_tokens
        rope = self.rope.at(positions_T, hidden_TE.dtype)
        x_TE: Tensor = self.midlayer(embed_tokens, tokens_T, hidden_TE, rope, attend)
        for layer, block in enumerate(self.layers.values(), start=1):
            x_TE = block(layer, x_TE, rope, attend)
        return self.norm(x_TE) if self.config.norm_output else x_TE

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Return the logits [T, draft vocabulary]; ``target_ids`` maps its columns to the target's vocabulary."""
        return self.lm_head(hidden_TE if self.config.norm_output else self.norm(hidden_TE))

    @property
    def target_ids(self) -> Tensor:
        """Target ids of the draft's vocabulary, [draft vocabulary]."""
        return torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t


# The P-EAGLE draft head (arXiv 2602.01469): an EAGLE-3 head that drafts all positions in one pass.
#
# The first drafted position reads the pair (target's state, embedding of the root), as in EAGLE-3. Each further
# position reads a learned pair that is the same for all of them: the state ``mask_hidden``, which passes through ``fc``
# like the target's states, and the embedding of the mask token. Its query sees the committed slots up to the root and
# the drafted positions before it. Tensor names and shapes follow vLLM (vllm-project/vllm, vllm/model_executor/models/
# llama_eagle3.py: ``mask_hidden``) and the format ``peagle`` of speculators (vllm-project/speculators,
# src/speculators/models/peagle/core.py).


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
