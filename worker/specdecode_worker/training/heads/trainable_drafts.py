"""Uniform access to drafts of every method for training and replay: states by unrolled depth, and logits of states.

Each method computes different states from a recorded text, but all propose in the same way: slot i at depth k, which is
k tokens after its root, proposes token i + 1. Losses, validation and calibration use only these functions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdecode_worker.models.checkpoints.draft_weights import Draft
from specdecode_worker.models.networks.dflash import DFlashHead
from specdecode_worker.models.networks.eagle import EagleHead
from specdecode_worker.models.networks.eagle3 import Eagle3Head
from specdecode_worker.models.networks.layers import Attend
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.models.networks.medusa import MedusaHeads
from specdecode_worker.models.networks.peagle import PEagleHead
from specdecode_worker.training.data.shards import Conversation
from specdecode_worker.training.heads.block_unroll import anchor_share, unroll_blocks
from specdecode_worker.training.heads.parallel_unroll import cod_share, unroll_parallel
from specdecode_worker.training.heads.root_sampling import RootShare
from specdecode_worker.training.heads.unroll import Batch, gather_rows, make_batch, shifted, unroll


def batch_for(draft: Draft, conversations: Sequence[Conversation], dtype: torch.dtype) -> Batch:
    """Return the conversations as a batch with the states of the target that ``draft`` reads."""
    final = not isinstance(draft, Llama) and draft.reads.final
    return make_batch(conversations, dtype, final=final, device=device_of_draft(draft))


def device_of_draft(draft: Draft) -> torch.device:
    """Return the device of a draft's weights."""
    return next(draft.parameters()).device


def unrolled(draft: Draft, batch: Batch, depth: int, sample_seed: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each depth k the states [B, A, E] and the mask [B, A] of slots with a root in the answer.

    With ``sample_seed``, parallel drafts are unrolled from some of the roots only, see `root_share`.
    """
    match draft:
        case PEagleHead():
            yield from unroll_parallel(draft, batch, depth, sample_seed)
        case DFlashHead():
            yield from unroll_blocks(draft, batch, depth, sample_seed)
        case Eagle3Head() | EagleHead():
            yield from unroll(draft, batch, depth)
        case MedusaHeads():
            states_BAE = gather_rows(batch.aux_BLA, batch.answers_BA)
            yield from ((shifted(states_BAE, k), _rooted(batch, k)) for k in range(depth))
        case Llama():
            states_BAE = _teacher_forced(draft, batch)
            yield from ((states_BAE, _rooted(batch, k)) for k in range(depth))


def root_share(draft: Draft) -> RootShare | None:
    """Return the share of the roots that a training step takes, by depth; None if it takes all."""
    match draft:
        case PEagleHead():
            return cod_share
        case DFlashHead():
            return anchor_share
        case _:
            return None


def logits_of(draft: Draft, states_RE: Tensor, k: int) -> Tensor:
    """Return the logits [R, draft vocabulary] of states that were unrolled to depth ``k``."""
    if isinstance(draft, MedusaHeads):
        logits: Tensor = draft.lm_heads[k](draft.blocks[k](states_RE))
        return logits
    return draft.logits(states_RE)


def vocabulary_of(draft: Draft, size: int) -> Tensor:
    """Return the target ids of the columns of ``logits_of``. ``size`` is the size of the target's vocabulary."""
    ids = None if isinstance(draft, Llama) else draft.target_ids
    return torch.arange(size, device=device_of_draft(draft)) if ids is None else ids


def max_depth(draft: Draft, wanted: int) -> int:
    """Return the number of depths to unroll, at most ``wanted``: Medusa has one head per depth."""
    return min(wanted, draft.count) if isinstance(draft, MedusaHeads) else wanted


def working_copy(draft: Draft, dtype: torch.dtype) -> Draft:
    """Return a trainable copy in ``dtype`` that shares the target's modules with ``draft``."""
    shared: tuple[nn.Module, ...] = ()
    if isinstance(draft, Eagle3Head):
        shared = draft._shared_embedding
    elif isinstance(draft, EagleHead | DFlashHead):
        shared = draft._target
    copied = copy.deepcopy(draft, {id(module): module for module in shared})
    return copied.to(dtype).requires_grad_(True)


def _rooted(batch: Batch, k: int) -> Tensor:
    """Return the mask [B, A] of valid slots with a root ``k`` slots before them in the answer."""
    return batch.valid_BA & (torch.arange(batch.valid_BA.shape[1], device=batch.valid_BA.device) >= k)


def _teacher_forced(model: Llama, batch: Batch) -> Tensor:
    """Return the states of a draft model at the answer slots. They do not depend on the root."""
    tokens_BN = torch.cat((batch.first_B[:, None], batch.tokens_BL), dim=1)
    positions_BN = torch.arange(tokens_BN.shape[1], device=tokens_BN.device).expand(tokens_BN.shape)
    output = model(tokens_BN.flatten(), positions_BN.flatten(), _Causal(len(tokens_BN)))
    return gather_rows(output.hidden_TE.view(*tokens_BN.shape, -1)[:, 1:], batch.answers_BA)


class _Causal(Attend):
    """Causal attention over a whole batch of texts at once."""

    def __init__(self, texts: int) -> None:
        self._texts = texts

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        q, k, v = (x.view(self._texts, -1, *x.shape[1:]).transpose(1, 2) for x in (q_THD, k_TKD, v_TKD))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)
