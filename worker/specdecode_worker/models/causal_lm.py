"""Decoder over a packed list of tokens, for targets and draft models, and the descriptor of an architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdecode_kernels.rope_cache.reference import UNSCALED, Scales
from specdecode_worker.models.checkpoint import Entry, whole
from specdecode_worker.models.config import CausalLMConfig, split_blocks
from specdecode_worker.models.fields import Fields
from specdecode_worker.models.layers import Attend, Block, RMSNorm
from specdecode_worker.models.linear import Linear, Split
from specdecode_worker.models.rope import Rope
from specdecode_worker.models.target_states import NO_STATES, TargetStates
from specdecode_worker.models.vocabulary import VocabularyMatch

# Tables of a draft model with another vocabulary than the target's, on the device of its weights.


class VocabularyMap(nn.Module):
    """Map between the target's token ids and the draft's. The tables are not part of a checkpoint."""

    draft_ids: Tensor
    """Draft's id of each target id, [target's vocabulary]."""
    proposed: Tensor
    """Draft ids that are proposed, [M], in ascending order."""
    target_ids: Tensor
    """Target's ids of ``proposed``, [M], all different."""

    def __init__(self, match: VocabularyMatch, device: torch.device) -> None:
        super().__init__()
        self.coverage = match.coverage
        pairs = sorted(match.proposals.items())
        for name, ids in (
            ("draft_ids", match.draft_ids),
            ("proposed", [draft for draft, _ in pairs]),
            ("target_ids", [target for _, target in pairs]),
        ):
            self.register_buffer(name, torch.tensor(ids, dtype=torch.int64, device=device), persistent=False)

    def inputs(self, tokens_T: Tensor) -> Tensor:
        """Return the draft's ids of target ids."""
        return self.draft_ids[tokens_T]

    def outputs(self, logits_RV: Tensor) -> Tensor:
        """Return the columns [R, M] of the draft's logits that are proposed; ``target_ids`` are their target ids."""
        return logits_RV.index_select(1, self.proposed)


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
        self.vocabulary: VocabularyMap | None = None  # set for a draft model with another vocabulary than its target's
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
    split: Callable[[CausalLMConfig, int], CausalLMConfig] = split_blocks
    """Shape of one of so many devices' part. Which matrices are split, the layers say themselves."""
    tensor_name: Callable[[str], str | None] = str
    """Name in the network of a tensor of the files; None for a tensor that the text model has not."""
    entries: Callable[[str, tuple[int, ...]], Mapping[str, Entry]] = whole
    """Tensors of the network that one of the files holds, by that one's name and shape; empty if it is one itself."""
