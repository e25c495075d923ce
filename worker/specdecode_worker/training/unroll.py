"""Forward passes of drafts over their own outputs, as they are unrolled in training."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from specdecode_worker.models.causal_lm import Attend, CausalLM
from specdecode_worker.models.config import CausalLMConfig
from specdecode_worker.models.dflash import DFlashHead
from specdecode_worker.models.drafts import Draft
from specdecode_worker.models.eagle import Eagle3Head, EagleHead, PEagleHead
from specdecode_worker.models.medusa import MedusaHeads
from specdecode_worker.training.conversations import Conversation

# Sampling of the roots that parallel drafts are trained from: fewer at deeper depths, and others in every step.
#
# A root that is dropped at one depth is dropped at all deeper ones, because deeper slots attend to the shallower ones.
# Every depth trains the first roots of one random order.
#
# Shape suffixes: B texts, A answer slots, R roots of a depth, E hidden size.

RootShare = Callable[[int], float]
"""Function from a depth to the share of its roots that is trained. It never rises with the depth."""


def all_roots(k: int) -> float:
    """Return the share of a draft that is trained from every root: 1."""
    return 1.0


def root_count(slots: int, k: int, share: RootShare) -> int:
    """Return the number of roots of a text with ``slots`` answer slots that are trained at depth ``k``."""
    return math.ceil(max(slots - k, 0) * share(k))


def root_order(valid_BA: Tensor, depth: int, sample_seed: int | None) -> Tensor:
    """Return the order [B, A] of the roots: every depth trains the first ones. None keeps the order of the text.

    The last roots of a text, which have no slots at the deepest depths, come last, in the order of the text.
    """
    place_BA = torch.arange(valid_BA.shape[1], device=valid_BA.device).expand(valid_BA.shape)
    if sample_seed is None:
        return place_BA
    generator = torch.Generator().manual_seed(sample_seed)
    random_BA = torch.rand(valid_BA.shape, generator=generator).to(valid_BA.device)
    whole_B1 = valid_BA.sum(dim=1, keepdim=True) - depth + 1
    return torch.where(place_BA < whole_B1, random_BA, 1.0 + place_BA).argsort(dim=1)


def by_slot(state_BRE: Tensor, order_BR: Tensor, k: int, share: RootShare, valid_BA: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states of depth ``k`` by answer slot, and the mask [B, A] of the slots whose root is trained there.

    Of the roots in ``order_BR``, those that `root_count` counts for each text are trained. The states [B, A, E] of
    other slots are zero.
    """
    rows, answers = valid_BA.shape
    slots_B1 = (valid_BA.sum(dim=1, keepdim=True) - k).clamp(min=0)
    trained_BR = torch.arange(order_BR.shape[1], device=valid_BA.device) < (slots_B1.double() * share(k)).ceil()
    to_BR = torch.where(trained_BR, order_BR + k, answers)  # the last column takes what is not trained
    state_BAE = state_BRE.new_zeros(rows, answers + 1, state_BRE.shape[-1])
    state_BAE = state_BAE.scatter(1, to_BR[:, :, None].expand_as(state_BRE), state_BRE)
    return state_BAE[:, :answers], valid_BA.new_zeros(rows, answers + 1).scatter(1, to_BR, trained_BR)[:, :answers]


# Unrolled forward pass of EAGLE heads over recorded text (EAGLE-3's training-time test).
#
# The head drafts from every slot of a text at once, several tokens deep. Slot i reads the pair (state of token i - 1,
# embedding of token i) and proposes token i + 1. At depth 0 the state is the target's. At depth k it is the head's own
# output at depth k - 1 of slot i - 1, as in drafting. Slot i at depth k is thus k tokens after the root i - k, and its
# query sees the true slots up to that root and the k slots of its own branch. The texts are recorded, so one pass per
# depth is exact for every root. Acceptance replay uses the same pass. EAGLE-1 heads are trained with it too.
#
# Shape suffixes: B texts, L slots of a text, A answer slots, T flattened slots of a pass, E hidden size, H query heads,
# K key-value heads, G queries per kv head, D head size.


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Texts padded to one length. Slots start at token 1: token 0 has no state before it.

    ``first_B`` is token 0 and ``tokens_BL`` the token of each slot. ``aux_BLA`` are the target's states before each
    slot, as the draft reads them. ``final_BAE`` are the target's final states at the answer slots. ``answers_BA`` are
    the indices of the answer slots, ``valid_BA`` marks those that are not padding. ``normalisers_BAT`` is None unless
    every text has them.
    """

    first_B: Tensor
    tokens_BL: Tensor
    aux_BLA: Tensor
    final_BAE: Tensor
    answers_BA: Tensor
    valid_BA: Tensor
    normalisers_BAT: Tensor | None


def make_batch(
    conversations: Sequence[Conversation],
    dtype: torch.dtype,
    *,
    final: bool = False,
    device: torch.device | None = None,
) -> TrainingBatch:
    """Return the conversations as a padded batch on ``device``, by default the CPU.

    With ``final``, the draft reads the target's last hidden state (EAGLE-1, Medusa) instead of the layer states.
    """
    tokens_BL = pad_sequence([c.tokens_N[1:].long() for c in conversations], batch_first=True)
    first_B = torch.tensor([c.answer_start - 1 for c in conversations])
    count_B = torch.tensor([len(c.tokens_N) - c.answer_start for c in conversations])
    order_A = torch.arange(int(count_B.max()))
    read = [(c.hidden_NE if final else c.aux_NA)[:-1] for c in conversations]
    normalisers = [c.normalisers_NT[c.answer_start :] for c in conversations if c.normalisers_NT is not None]
    complete = len(normalisers) == len(conversations)
    final_BAE = pad_sequence([c.hidden_NE[c.answer_start :] for c in conversations], batch_first=True)
    return TrainingBatch(
        first_B=torch.tensor([int(c.tokens_N[0]) for c in conversations]).to(device),
        tokens_BL=tokens_BL.to(device),
        aux_BLA=pad_sequence(read, batch_first=True).to(device, dtype),
        final_BAE=final_BAE.to(device, dtype),
        answers_BA=(first_B[:, None] + order_A).clamp(max=tokens_BL.shape[1] - 1).to(device),
        valid_BA=(order_A < count_B[:, None]).to(device),
        normalisers_BAT=pad_sequence(normalisers, batch_first=True).to(device) if complete else None,
    )


def unroll(head: Eagle3Head | EagleHead, batch: TrainingBatch, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each depth k the states [B, A, E] before the head's norm and the mask [B, A] of slots with a root."""
    answers_BA = batch.answers_BA
    attend = UnrolledAttention(answers_BA)
    state_BAE = gather_rows(true_states(head, batch, attend), answers_BA)
    yield state_BAE, batch.valid_BA
    tokens_T = batch.tokens_BL.gather(1, answers_BA).flatten()
    positions_T = (answers_BA + 1).flatten()
    for k in range(1, depth):
        attend.deepen(answers_BA - k)
        before = shifted(state_BAE, 1).flatten(0, 1)
        state_BAE = head(before, tokens_T, positions_T, attend).unflatten(0, answers_BA.shape)
        yield state_BAE, _rooted(batch, k)


def true_states(head: Eagle3Head | EagleHead, batch: TrainingBatch, attend: UnrolledAttention) -> Tensor:
    """Return the head's states [B, L, E] at all slots, from the states of the target."""
    shape_BL = batch.tokens_BL.shape
    positions_BL = (torch.arange(shape_BL[1], device=batch.tokens_BL.device) + 1).expand(shape_BL)
    fused = head.fuse(batch.aux_BLA).flatten(0, 1)
    states: Tensor = head(fused, batch.tokens_BL.flatten(), positions_BL.flatten(), attend).unflatten(0, shape_BL)
    return states


def gather_rows(x_BLE: Tensor, index_BA: Tensor) -> Tensor:
    """Return the rows ``index_BA`` of dimension 1."""
    picked: Tensor = x_BLE.gather(1, index_BA[:, :, None].expand(-1, -1, x_BLE.shape[-1]))
    return picked


def shifted(x: Tensor, by: int) -> Tensor:
    """Return ``x`` shifted along dimension 1, so that row a holds row a - ``by``.

    The first rows are zero and never counted.
    """
    if by == 0:
        return x
    return torch.cat((torch.zeros_like(x[:, :by]), x[:, :-by]), dim=1)


def shifted_back(x: Tensor, by: int) -> Tensor:
    """Return ``x`` shifted along dimension 1, so that row a holds row a + ``by``.

    The last rows are zero.
    """
    if by == 0:
        return x
    return torch.cat((x[:, by:], torch.zeros_like(x[:, :by])), dim=1)


MOST_SCORES = 2**25
"""Most attention scores of a pass that are in memory at once: 128 MiB in fp32. A longer pass is cut."""


class UnrolledAttention:
    """Attention for ``unroll``: causal over all slots at depth 0, along branches of one slot per depth below."""

    def __init__(self, answers_BA: Tensor) -> None:
        self._answers_BA = answers_BA
        self._depth = 0
        self._true: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of the true slots by layer, [B, K, L, D]."""
        self._branches: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        """Keys and values of each depth from 1 by layer, [B, A, K, D]."""
        self._hidden_BAL = torch.empty(0)

    def deepen(self, roots_BA: Tensor) -> None:
        """Advance to the next depth. Its queries see the true slots up to their roots, given as slot indices."""
        self._depth += 1
        slots_L = torch.arange(self._true[0][0].shape[2], device=roots_BA.device)
        self._hidden_BAL = slots_L > roots_BA[:, :, None]

    def _aligned(self, x: Tensor, depth: int) -> Tensor:
        """Return keys or values [B, A, K, D] of ``depth``, in the order of the present queries."""
        return shifted(x, self._depth - depth)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Store the new keys and values and return the attended values, see ``layers.Attend``."""
        rows = self._answers_BA.shape[0]
        q, k, v = (x.view(rows, -1, *x.shape[1:]) for x in (q_THD, k_TKD, v_TKD))
        if self._depth == 0:
            keys, values = k.transpose(1, 2), v.transpose(1, 2)
            self._true[layer] = (keys, values)
            out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).flatten(0, 1)
        self._branches[layer].append((k, v))
        q_BAKGD = q.view(*k.shape[:3], -1, q.shape[-1])
        return self._along_branch(layer, q_BAKGD).flatten(0, 1).flatten(1, 2)

    def _along_branch(self, layer: int, q_BAKGD: Tensor) -> Tensor:
        """Return the attention of branch queries over the true slots up to their root and their own branch.

        Behind a long text, some queries at a time are computed, and computed again for their gradients.
        """
        true = self._true[layer]
        mine = [(self._aligned(k, j), self._aligned(v, j)) for j, (k, v) in enumerate(self._branches[layer], 1)]
        rows, answers, kv_heads, groups = q_BAKGD.shape[:4]
        at_once = max(1, MOST_SCORES // (rows * kv_heads * groups * true[0].shape[2]))
        if at_once >= answers:
            return self._attended(q_BAKGD, true, mine, self._hidden_BAL)
        parts = []
        for start in range(0, answers, at_once):
            here = slice(start, start + at_once)
            own = [(k[:, here], v[:, here]) for k, v in mine]
            part = (q_BAKGD[:, here], true, own, self._hidden_BAL[:, here])
            parts.append(checkpoint(self._attended, *part, use_reentrant=False))
        return torch.cat(parts, dim=1)

    @staticmethod
    def _attended(
        q_BAKGD: Tensor, true_slots: tuple[Tensor, Tensor], mine: list[tuple[Tensor, Tensor]], hidden_BAL: Tensor
    ) -> Tensor:
        """Return the attention of queries over true slots that are not hidden, and over their own branch."""
        keys_BKLD, values_BKLD = true_slots
        answers, kv_heads, groups = q_BAKGD.shape[1:4]
        grouped = (len(q_BAKGD), kv_heads, groups, answers)
        q_BKXD = (q_BAKGD * q_BAKGD.shape[-1] ** -0.5).permute(0, 2, 3, 1, 4).flatten(2, 3)  # X is G times A
        true = (q_BKXD @ keys_BKLD.transpose(2, 3)).view(*grouped, -1)
        true = true.masked_fill(hidden_BAL[:, None, None], float("-inf"))
        q_BKGAD = q_BKXD.view(*grouped, -1)
        own = [(q_BKGAD * k.transpose(1, 2)[:, :, None]).sum(dim=-1, keepdim=True) for k, _ in mine]
        weights = torch.softmax(torch.cat((true, *own), dim=-1), dim=-1)
        split = true.shape[-1]
        out: Tensor = (weights[..., :split].flatten(2, 3) @ values_BKLD).view(*grouped, -1)
        for j, (_, v) in enumerate(mine):
            out = out + weights[..., split + j, None] * v.transpose(1, 2)[:, :, None]
        return out.permute(0, 3, 1, 2, 4)


# Unrolled pass of DFlash heads over recorded text: a block of mask slots behind every root, or behind anchors.
#
# A block holds the root and a mask slot for each depth. Its slots see the target's states before the root, and each
# other. All blocks of some roots run in one pass, which is exact for every root. Training runs the blocks of a share of
# the roots (anchors, arXiv 2602.06036), drawn anew in every step.
#
# Shape suffixes: B texts, L slots of a text, A answer slots, R roots, N slots of a block, K key-value heads, G queries
# per kv head, D head size, E hidden size.

ANCHORS = 0.25
"""Share of the roots that a step trains. A block runs all depths, so a step runs about as many slots as roots."""
_ROOTS = 64
"""Roots of one pass, which bounds the memory of attention."""


def anchor_share(k: int) -> float:
    """Return the share of the roots that is trained, the same at every depth."""
    return ANCHORS


def unroll_blocks(
    head: DFlashHead, batch: TrainingBatch, depth: int, sample_seed: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each depth k the states [B, A, E] before the head's norm and the mask [B, A] of slots with a root.

    Row a of depth k belongs to the root a - k. Rows without a root are zero. Blocks have ``depth`` mask slots.

    Args:
        head: Head to unroll.
        batch: Recorded texts.
        depth: Number of depths.
        sample_seed: Seed of the anchors. None takes every root.
    """
    rows, slots = batch.tokens_BL.shape
    positions_BL = torch.arange(slots, device=batch.tokens_BL.device).expand(rows, slots)
    context = head.context(batch.aux_BLA.flatten(0, 1), positions_BL.flatten())
    share = all_roots if sample_seed is None else anchor_share
    order_BA = root_order(batch.valid_BA, depth, sample_seed)
    order_BR = order_BA[:, : max(root_count(order_BA.shape[1], 0, share), 1)]
    roots_BR = batch.answers_BA.gather(1, order_BR)
    scores = rows * head.config.num_attention_heads * (depth + 1) * slots  # of one root
    at_once = max(1, min(_ROOTS, MOST_SCORES // scores))
    # Behind a long text, some roots at a time are computed, and computed again for their gradients.
    parts = [
        checkpoint(_blocks, head, batch, context, part_BR, depth, use_reentrant=False)
        if at_once < _ROOTS
        else _blocks(head, batch, context, part_BR, depth)
        for part_BR in torch.split(roots_BR, at_once, dim=1)
    ]
    state_BRNE = torch.cat(parts, dim=1)
    for k in range(depth):
        yield by_slot(state_BRNE[:, :, k + 1], order_BR, k, share, batch.valid_BA)


def _within(head: DFlashHead | PEagleHead, positions: Tensor) -> Tensor:
    """Return ``positions`` clamped to the head's last one, as an engine does. Mask slots may lie beyond it."""
    return positions.clamp(max=head.config.max_position_embeddings - 1)


def _blocks(
    head: DFlashHead, batch: TrainingBatch, context: list[tuple[Tensor, Tensor]], roots_BR: Tensor, depth: int
) -> Tensor:
    """Return the states [B, R, N, E] of the blocks of these roots, given as slot indices."""
    order_N = torch.arange(depth + 1, device=roots_BR.device)
    positions_BRN = _within(head, roots_BR[:, :, None] + 1 + order_N)
    tokens_BR = batch.tokens_BL.gather(1, roots_BR)
    tokens_BRN = torch.where(order_N > 0, head.config.mask_token_id, tokens_BR[:, :, None])
    attend = _BlockAttention(context, roots_BR, depth + 1)
    states: Tensor = head(tokens_BRN.flatten(), positions_BRN.flatten(), attend)
    return states.view(*tokens_BRN.shape, -1)


class _BlockAttention:
    """Attention of blocks over the committed tokens before their roots, and over their own slots."""

    def __init__(self, context: list[tuple[Tensor, Tensor]], roots_BR: Tensor, block: int) -> None:
        self._context, self._roots_BR, self._block = context, roots_BR, block

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Return the attended values, see ``layers.Attend``. Token s of a text has the target's state s."""
        shape = (*self._roots_BR.shape, self._block)
        kv_heads = k_TKD.shape[1]
        q = (q_THD * q_THD.shape[-1] ** -0.5).view(*shape, kv_heads, -1, q_THD.shape[-1])
        k, v = (x.view(*shape, *x.shape[1:]) for x in (k_TKD, v_TKD))
        true_k, true_v = (x.view(shape[0], -1, *x.shape[1:]) for x in self._context[layer])
        slots_L = torch.arange(true_k.shape[1], device=q.device)
        hidden_BRL = slots_L > self._roots_BR[:, :, None]
        true = torch.einsum("brnkgd,blkd->brnkgl", q, true_k)
        true = true.masked_fill(hidden_BRL[:, :, None, None, None], float("-inf"))
        own = torch.einsum("brnkgd,brmkd->brnkgm", q, k)
        weights = torch.softmax(torch.cat((true, own), dim=-1), dim=-1)
        split = true.shape[-1]
        out = torch.einsum("brnkgl,blkd->brnkgd", weights[..., :split], true_v)
        out = out + torch.einsum("brnkgm,brmkd->brnkgd", weights[..., split:], v)
        return out.reshape(q_THD.shape)


# Unrolled pass of P-EAGLE heads over recorded text, with conditional drop-token sampling (COD).
#
# A P-EAGLE head drafts from a root with mask slots: the slot k tokens behind the root reads the learned mask state and
# the embedding of the mask token, and its query sees the true slots up to the root and the mask slots of its own root.
# The slots of all roots run in one pass per depth, which is exact for every root.
#
# Training every depth at every root takes as many rows as depths. COD (P-EAGLE, arXiv 2602.01469) trains deeper depths
# at fewer roots. The share that is trained falls geometrically to a floor; both values are the defaults of speculators
# (vllm-project/speculators, src/speculators/models/peagle/data.py).
#
# Shape suffixes: B texts, L slots of a text, A answer slots, R roots of a depth, E hidden size.

SHARE_PER_DEPTH, LEAST_SHARE = 0.7, 0.2
"""Share of the roots that each depth keeps of those of the depth before, and the least share of all."""


def cod_share(k: int) -> float:
    """Return the share of the roots that is trained at depth ``k``."""
    return max(SHARE_PER_DEPTH**k, LEAST_SHARE)


def unroll_parallel(
    head: PEagleHead, batch: TrainingBatch, depth: int, sample_seed: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each depth k the states [B, A, E] before the head's norm and the mask [B, A] of slots with a root.

    Row a of depth k belongs to the root a - k. Rows without a root are zero.

    Args:
        head: Head to unroll.
        batch: Recorded texts.
        depth: Number of depths.
        sample_seed: Seed of the roots that COD keeps. None keeps all.
    """
    attend = _RootAttention(batch.answers_BA)
    yield gather_rows(true_states(head, batch, attend), batch.answers_BA), batch.valid_BA
    share = all_roots if sample_seed is None else cod_share
    order_BA, mask_1E = root_order(batch.valid_BA, depth, sample_seed), head.mask_state
    for k in range(1, depth):
        order_BR = order_BA[:, : max(root_count(order_BA.shape[1], k, share), 1)]
        roots_BR = batch.answers_BA.gather(1, order_BR)
        attend.deepen(roots_BR)
        tokens_T = torch.full((roots_BR.numel(),), head.config.mask_token_id, device=roots_BR.device)
        positions_T = _within(head, roots_BR + k + 1).flatten()
        state_TE = head(mask_1E.expand(len(tokens_T), -1), tokens_T, positions_T, attend)
        yield by_slot(state_TE.unflatten(0, roots_BR.shape), order_BR, k, share, batch.valid_BA)


class _RootAttention(UnrolledAttention):
    """Attention for ``unroll_parallel``. Rows of a depth belong to the first roots of those of the depth before."""

    def _aligned(self, x: Tensor, depth: int) -> Tensor:
        return x[:, : self._hidden_BAL.shape[1]]


# Uniform access to drafts of every method for training and replay: states by unrolled depth, and logits of states.
#
# Each method computes different states from a recorded text, but all propose in the same way: slot i at depth k, which
# is k tokens after its root, proposes token i + 1. Losses, validation and calibration use only these functions.


def batch_for(draft: Draft, conversations: Sequence[Conversation], dtype: torch.dtype) -> TrainingBatch:
    """Return the conversations as a batch with the states of the target that ``draft`` reads."""
    final = not isinstance(draft, CausalLM) and draft.reads.final
    return make_batch(conversations, dtype, final=final, device=device_of_draft(draft))


def device_of_draft(draft: Draft) -> torch.device:
    """Return the device of a draft's weights."""
    return next(draft.parameters()).device


def unrolled(
    draft: Draft, batch: TrainingBatch, depth: int, sample_seed: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
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
        case CausalLM():
            states_BAE = _teacher_forced(draft, batch)
            yield from ((states_BAE, _rooted(batch, k)) for k in range(depth))


def root_share(draft: Draft) -> RootShare:
    """Return the share of the roots that a training step takes, by depth."""
    match draft:
        case PEagleHead():
            return cod_share
        case DFlashHead():
            return anchor_share
        case _:
            return all_roots


def logits_of(draft: Draft, states_RE: Tensor, k: int) -> Tensor:
    """Return the logits [R, draft vocabulary] of states that were unrolled to depth ``k``."""
    return draft.head_logits(states_RE, k) if isinstance(draft, MedusaHeads) else draft.logits(states_RE)


def vocabulary_of(draft: Draft, size: int) -> Tensor:
    """Return the target ids of the columns of ``logits_of``. ``size`` is the size of the target's vocabulary."""
    ids = None if isinstance(draft, CausalLM) else draft.target_ids
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


def _rooted(batch: TrainingBatch, k: int) -> Tensor:
    """Return the mask [B, A] of valid slots with a root ``k`` slots before them in the answer."""
    return batch.valid_BA & (torch.arange(batch.valid_BA.shape[1], device=batch.valid_BA.device) >= k)


def _teacher_forced(model: CausalLM, batch: TrainingBatch) -> Tensor:
    """Return the states of a draft model at the answer slots. They do not depend on the root."""
    tokens_BN = torch.cat((batch.first_B[:, None], batch.tokens_BL), dim=1)
    positions_BN = torch.arange(tokens_BN.shape[1], device=tokens_BN.device).expand(tokens_BN.shape)
    output = model(tokens_BN.flatten(), positions_BN.flatten(), TextAttention(model.config, len(tokens_BN)))
    return gather_rows(output.hidden_TE.view(*tokens_BN.shape, -1)[:, 1:], batch.answers_BA)


class TextAttention(Attend):
    """Causal attention over whole texts of one length, within chunks in the model's chunked layers."""

    def __init__(self, config: CausalLMConfig, texts: int = 1) -> None:
        self._config, self._texts = config, texts

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Return the attended values, see ``layers.Attend``."""
        size = self._config.attention_chunk_size if self._config.kind(layer).chunked else len(q_THD)
        by_text = (x.view(self._texts, -1, *x.shape[1:]) for x in (q_THD, k_TKD, v_TKD))
        parts = []
        for chunk in zip(*(torch.split(x, size, dim=1) for x in by_text), strict=True):
            q, k, v = (x.transpose(1, 2) for x in chunk)
            parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2))
        return torch.cat(parts, dim=1).flatten(0, 1)
