"""Preparation of an existing draft for further training: fp32, with another draft vocabulary if it has its own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specdecode_worker.models.checkpoints.draft_weights import Draft
from specdecode_worker.models.networks.dflash import DFlashHead
from specdecode_worker.models.networks.eagle3 import Eagle3Head
from specdecode_worker.models.networks.layers import Block
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.models.networks.medusa import MedusaHeads
from specdecode_worker.training.errors import DraftNotTrainable
from specdecode_worker.training.heads.initialization import zero_block_output


def prepare_draft(origin: Draft, target: Llama, vocabulary: Tensor, layers: int = 1) -> Draft:
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
def prepare_eagle3_head(origin: Eagle3Head, target: Llama, vocabulary: Tensor, layers: int = 1) -> Eagle3Head:
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


def _check_states(origin: Eagle3Head | DFlashHead, target: Llama) -> None:
    """Raise DraftNotTrainable if the head reads other layers of the target than training records."""
    reads = origin.config.aux_layers
    if reads and reads != target.config.aux_layers:
        raise DraftNotTrainable(
            f"the head reads the inputs of the target's layers {list(reads)}, training records those of "
            f"{list(target.config.aux_layers)}: a head like that cannot be trained on"
        )


def _output_rows(origin: Eagle3Head, target: Llama, vocabulary: Tensor) -> Tensor:
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
