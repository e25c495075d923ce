"""Draft networks before training: initial weights, and heads that are trained further."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdecode_worker.contract import Method
from specdecode_worker.models.arch import new_network
from specdecode_worker.models.causal_lm import MLP, Block, CausalLM
from specdecode_worker.models.config import (
    CausalLMConfig,
    DFlashConfig,
    Eagle3Config,
    EagleConfig,
    MedusaConfig,
    PEagleConfig,
)
from specdecode_worker.models.dflash import DFlashHead
from specdecode_worker.models.drafts import Draft, load_draft
from specdecode_worker.models.eagle import Eagle3Head, EagleHead, PEagleHead
from specdecode_worker.models.headers import infer_method, read_tensor_headers
from specdecode_worker.models.medusa import MedusaHeads
from specdecode_worker.training.errors import DraftNotTrainable

# Kinds of drafts that `distill` trains further, with loading by the kind that a folder holds.

Distillable = Eagle3Head | DFlashHead
"""Draft that `distill` trains further. A P-EAGLE head is an Eagle3Head."""


def load_distillable(
    folder: Path, target: CausalLM, target_folder: Path, dtype: torch.dtype, device: torch.device
) -> Distillable:
    """Load the head in ``folder`` for ``target``.

    Raises:
        DraftNotTrainable: The folder holds a draft of a kind that is not distilled.
        ModelError: The head cannot be loaded, or does not fit the target.
    """
    method = method_in(folder)
    kind = NEW_DRAFTS.get(method)
    if kind is None or not kind.distilled:
        *names, last = [name for name, kind in NEW_DRAFTS.items() if kind.distilled]
        raise DraftNotTrainable(
            f"{folder} holds a draft of method {method}; {', '.join(names)} and {last} are distilled, others are "
            "trained further with `train --draft`"
        )
    draft = load_draft(method, folder, target, target_folder=target_folder, dtype=dtype, device=device)
    assert isinstance(draft, Eagle3Head | DFlashHead)
    return draft


def method_in(folder: Path) -> Method:
    """Return the method of the draft in ``folder``, or eagle3 if it holds no known draft; loading then says so."""
    return infer_method(read_tensor_headers(folder)) or "eagle3"


# Initial drafts whose shape and weights come from the target, so that training starts close to a language model.
#
# An EAGLE-3 layer starts as the target's last one. Its query, key and value matrices for the state half of the pair are
# those of the target's last layer, and those for the embedding half are the ones of the first layer, which was trained
# on embeddings. The fused state starts as the deepest of the three states, the output rows as the target's own.
# Existing drafts are prepared by ``prepare_draft``.


def head_config(target: CausalLMConfig, draft_vocab_size: int, layers: int = 1) -> Eagle3Config:
    """Return the configuration of an EAGLE-3 head with layers of the target's shape."""
    return Eagle3Config(**_head_fields(target, draft_vocab_size, layers))


def new_head(target: CausalLM, vocabulary: Tensor, layers: int = 1) -> Eagle3Head:
    """Return a trainable fp32 EAGLE-3 head with the draft vocabulary ``vocabulary`` (target ids, ascending)."""
    head = Eagle3Head(head_config(target.config, len(vocabulary), layers), target.model.embed_tokens)
    _initialise_head(head, target, vocabulary)
    return head


def new_peagle(target: CausalLM, vocabulary: Tensor, layers: int = 1) -> PEagleHead:
    """Return a trainable fp32 P-EAGLE head that starts as `new_head` does, with a small random mask state.

    Its mask token is the last one of the target's vocabulary, a reserved token in that of Llama 3. The embedding of the
    mask token is the target's and is not trained; ``mask_hidden`` is.
    """
    fields = _head_fields(target.config, len(vocabulary), layers)
    config = PEagleConfig(mask_token_id=target.config.vocab_size - 1, **fields)
    head = PEagleHead(config, target.model.embed_tokens)
    _initialise_head(head, target, vocabulary)
    nn.init.normal_(head.mask_hidden, std=0.02, generator=torch.Generator().manual_seed(0))
    return head


def new_dflash(target: CausalLM, layers: int, depth: int) -> DFlashHead:
    """Return a trainable fp32 DFlash head for blocks of ``depth`` mask slots, with layers that start without effect.

    Its mask token is the last one of the target's vocabulary, as in `new_peagle`.
    """
    width, size = target.config.hidden_size, target.config.vocab_size
    config = DFlashConfig(
        **_blocks(target.config),
        qk_norm=True,
        vocab_size=size,
        draft_vocab_size=size,
        aux_layers=target.config.aux_layers,
        mask_token_id=size - 1,
        block_size=depth + 1,
        num_hidden_layers=layers,
    )
    head = DFlashHead(config, target).float()
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, 2 * width :].copy_(torch.eye(width))
        for layer in head.layers:
            assert isinstance(layer, Block)
            zero_block_output(layer, target)
        head.norm.weight.copy_(target.model.norm.weight)
    return head


def new_eagle(target: CausalLM, layers: int = 1) -> EagleHead:
    """Return a trainable fp32 EAGLE-1 head that passes the target's feature to layers that start without effect."""
    width = target.config.hidden_size
    config = EagleConfig(**_blocks(target.config), vocab_size=target.config.vocab_size, num_hidden_layers=layers)
    head = EagleHead(replace(config, fc_bias=False), target).float()
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, width:].copy_(torch.eye(width))
        for block in head.layers:
            assert isinstance(block, Block)
            zero_block_output(block, target)
    return head


def new_medusa(target: CausalLM, vocabulary: Tensor, heads: int) -> MedusaHeads:
    """Return trainable fp32 Medusa heads of one residual block that starts at zero, as FasterDecoding's do."""
    size = target.config.vocab_size
    config = MedusaConfig(
        num_heads=heads,
        num_layers=1,
        hidden_size=target.config.hidden_size,
        vocab_size=size,
        draft_vocab_size=len(vocabulary),
    )
    medusa = MedusaHeads(config).float()
    with torch.no_grad():
        if medusa.token_map is not None:
            medusa.token_map.copy_(vocabulary)
        for parameter in medusa.blocks.parameters():
            parameter.zero_()
        for matrix in medusa.lm_heads:
            assert isinstance(matrix, nn.Linear)
            matrix.weight.copy_(target.lm_head.weight[vocabulary])
    return medusa


def new_draft_model(target: CausalLM, layers: int) -> CausalLM:
    """Return a trainable fp32 model of ``layers`` of the target's layers, evenly spaced from the first to the last.

    Raises:
        DraftNotTrainable: The layers of the target are of several kinds.
    """
    if target.config.layer_kinds:
        raise DraftNotTrainable("a draft model cannot be made of a target whose layers differ; take --method eagle3")
    layer_indices = torch.linspace(0, target.config.num_hidden_layers - 1, layers).round().int().tolist()
    model = new_network(replace(target.config, num_hidden_layers=layers)).float()
    with torch.no_grad():
        for mine, index in zip(model.model.layers, layer_indices, strict=True):
            mine.load_state_dict(target.model.layers[index].state_dict())
        model.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        model.lm_head.weight.copy_(target.lm_head.weight)
        model.model.norm.weight.copy_(target.model.norm.weight)
    return model


@dataclass(frozen=True, slots=True)
class TrainableKind:
    """Kind of draft that training can start from the target's weights.

    ``make`` gets the target, the draft vocabulary, the number of layers and the depth. The draft has a vocabulary of
    its own if ``chooses_vocabulary``, and `distill` can train it further if ``distilled``.
    """

    make: Callable[[CausalLM, Tensor, int, int], Draft]
    chooses_vocabulary: bool = False
    distilled: bool = False


NEW_DRAFTS: dict[Method, TrainableKind] = {
    "eagle3": TrainableKind(lambda target, known, layers, _: new_head(target, known, layers), True, True),
    "peagle": TrainableKind(lambda target, known, layers, _: new_peagle(target, known, layers), True, True),
    "dflash": TrainableKind(lambda target, _, layers, depth: new_dflash(target, layers, depth), distilled=True),
    "eagle": TrainableKind(lambda target, _, layers, __: new_eagle(target, layers)),
    "medusa": TrainableKind(lambda target, known, _, depth: new_medusa(target, known, depth), True),
    "draft-model": TrainableKind(lambda target, _, layers, __: new_draft_model(target, max(2, layers))),
}
"""Drafts that can be trained, by method."""


def _head_fields(target: CausalLMConfig, draft_vocab_size: int, layers: int) -> dict[str, Any]:
    """Return the fields of an EAGLE-3 head with layers of the target's shape."""
    return {
        **_blocks(target),
        "target_hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "aux_layers": target.aux_layers,
        "num_hidden_layers": layers,
    }


def _blocks(target: CausalLMConfig) -> dict[str, Any]:
    """Return the fields of a layer like the target's. New heads have no biases and no norms of queries and keys."""
    names = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
    names += ["rms_norm_eps", "rope_theta", "rope_scaling", "max_position_embeddings"]
    return {name: getattr(target, name) for name in names}


def zero_block_output(block: Block, target: CausalLM) -> None:
    """Load the target's last layer into ``block``, with zero output matrices so that it adds nothing at first."""
    block.load_state_dict(_fitting(target, block), strict=False)
    assert isinstance(block.mlp, MLP), "heads have no experts"
    block.self_attn.o_proj.weight.zero_()
    block.mlp.down_proj.weight.zero_()


def _fitting(target: CausalLM, layer: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the target's last layer that fit into ``layer``; of experts, those of the shared one."""
    last = target.model.layers[-1].state_dict()
    named = {name.replace(".shared_expert.", "."): tensor for name, tensor in last.items()}
    wanted = {name: tensor.shape for name, tensor in layer.state_dict().items()}
    return {name: tensor for name, tensor in named.items() if tensor.shape == wanted.get(name)}


@torch.no_grad()
def _initialise_head(head: Eagle3Head, target: CausalLM, vocabulary: Tensor) -> None:
    """Initialize an EAGLE-3 head in fp32: its first layer from the target, further ones without effect."""
    first: Any = target.model.layers[0]
    last: Any = target.model.layers[-1]
    layer, width = head.float().midlayer, target.config.hidden_size
    head.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
    head.fc.weight.zero_()
    head.fc.weight[:, 2 * width :].copy_(torch.eye(width))
    for name in ("q_proj", "k_proj", "v_proj"):
        mine: nn.Linear = getattr(layer.self_attn, name)
        mine.weight[:, :width].copy_(getattr(first.self_attn, name).weight)
        mine.weight[:, width:].copy_(getattr(last.self_attn, name).weight)
    layer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
    layer.mlp.load_state_dict(
        {name.removeprefix("mlp."): tensor for name, tensor in _fitting(target, layer).items() if name[:4] == "mlp."},
        strict=False,
    )
    layer.hidden_norm.weight.copy_(last.input_layernorm.weight)
    layer.input_layernorm.weight.copy_(first.input_layernorm.weight)
    layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    head.norm.weight.copy_(target.model.norm.weight)
    head.lm_head.weight.copy_(target.lm_head.weight[vocabulary])
    for block in head.layers.values():
        assert isinstance(block, Block)
        zero_block_output(block, target)


# Preparation of an existing draft for further training: fp32, with another draft vocabulary if it has its own.


def prepare_draft(origin: Draft, target: CausalLM, vocabulary: Tensor, layers: int = 1) -> Draft:
    """Return ``origin`` ready for further training.

    Raises:
        DraftNotTrainable: The draft cannot be trained further; the message names the reason.
    """
    if isinstance(origin, Eagle3Head):
        return prepare_eagle3_head(origin, target, vocabulary, layers)
    if isinstance(origin, DFlashHead):
        _check_states(origin, target)
        if origin.embed_tokens is not None or origin.lm_head is not None:
            # Training writes z-lab's layout, which has no place for these tensors.
            raise DraftNotTrainable(
                "a DFlash head with embeddings or an output matrix of its own (layout of speculators) is served, but "
                "not trained further"
            )
    known = origin.target_ids if isinstance(origin, MedusaHeads) else None
    if known is not None and not torch.equal(known, vocabulary):
        raise DraftNotTrainable("Medusa heads keep their draft vocabulary; name an --out without vocabulary.json")
    return origin.float()


@torch.no_grad()
def prepare_eagle3_head(origin: Eagle3Head, target: CausalLM, vocabulary: Tensor, layers: int = 1) -> Eagle3Head:
    """Return an EAGLE-3 head like ``origin``, on the CPU as that is, with the draft vocabulary ``vocabulary``.

    Output rows of tokens that are new to the head are copied from the target. Norms of its inputs, further layers and
    its own embedding are kept. Layers are appended up to ``layers``; their outputs start at zero.

    Raises:
        DraftNotTrainable: The head reads other states than training records, or its width rules out the change.
    """
    _check_states(origin, target)
    layers = max(layers, origin.config.num_hidden_layers)
    if layers > origin.config.num_hidden_layers and origin.config.hidden_size != target.config.hidden_size:
        raise DraftNotTrainable(
            f"further layers start as the target's last, which is {target.config.hidden_size} wide and not "
            f"{origin.config.hidden_size} as this head is; leave --layers out"
        )
    config = replace(origin.config, draft_vocab_size=len(vocabulary), num_hidden_layers=layers)
    embedding = origin.embed_tokens or target.model.embed_tokens
    head = type(origin)(config, embedding, own_embedding=origin.embed_tokens is not None).float()
    for block in list(head.layers.values())[origin.config.num_hidden_layers - 1 :]:
        assert isinstance(block, Block)
        zero_block_output(block, target)
    own = head.state_dict() | origin.float().state_dict()
    own |= {
        "lm_head.weight": _output_rows(origin, target, vocabulary),
        "d2t": vocabulary - torch.arange(len(vocabulary)),
    }
    head.load_state_dict(own)
    return head


def _check_states(origin: Eagle3Head | DFlashHead, target: CausalLM) -> None:
    """Raise DraftNotTrainable if the head reads other layers of the target than training records."""
    reads = origin.config.aux_layers
    if reads and reads != target.config.aux_layers:
        raise DraftNotTrainable(
            f"the head reads the inputs of the target's layers {list(reads)}, training records those of "
            f"{list(target.config.aux_layers)}: a head like that cannot be trained on"
        )


def _output_rows(origin: Eagle3Head, target: CausalLM, vocabulary: Tensor) -> Tensor:
    """Return the output rows for ``vocabulary``: those of ``origin`` where it has them, else the target's."""
    mine = origin.lm_head.weight.float()
    if torch.equal(origin.target_ids, vocabulary):
        return mine
    if origin.config.hidden_size != target.config.hidden_size:
        raise DraftNotTrainable(
            f"a head of hidden_size {origin.config.hidden_size} has no output rows for tokens that are new to it (the "
            f"target's are {target.config.hidden_size} wide); it can only keep its own vocabulary"
        )
    rows_VE = target.lm_head.weight.float().cpu().clone()
    rows_VE[origin.target_ids] = mine
    return rows_VE[vocabulary]
