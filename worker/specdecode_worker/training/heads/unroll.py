"""Unrolled forward pass of EAGLE heads over recorded text (EAGLE-3's training-time test).

The head drafts from every slot of a text at once, several tokens deep. Slot i reads the pair (state of token i - 1,
embedding of token i) and proposes token i + 1. At depth 0 the state is the target's. At depth k it is the head's own
output at depth k - 1 of slot i - 1, as in drafting. Slot i at depth k is thus k tokens after the root i - k, and its
query sees the true slots up to that root and the k slots of its own branch. The texts are recorded, so one pass per
depth is exact for every root. Acceptance replay uses the same pass. EAGLE-1 heads are trained with it too.

Shape suffixes: B texts, L slots of a text, A answer slots, T flattened slots of a pass, E hidden size, H query heads, K
key-value heads, G queries per kv head, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from specdecode_worker.models.networks.eagle import EagleHead
from specdecode_worker.models.networks.eagle3 import Eagle3Head
from specdecode_worker.training.data.shards import Conversation


@dataclass(frozen=True, slots=True)
class Batch:
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
) -> Batch:
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
    return Batch(
        first_B=torch.tensor([int(c.tokens_N[0]) for c in conversations]).to(device),
        tokens_BL=tokens_BL.to(device),
        aux_BLA=pad_sequence(read, batch_first=True).to(device, dtype),
        final_BAE=final_BAE.to(device, dtype),
        answers_BA=(first_B[:, None] + order_A).clamp(max=tokens_BL.shape[1] - 1).to(device),
        valid_BA=(order_A < count_B[:, None]).to(device),
        normalisers_BAT=pad_sequence(normalisers, batch_first=True).to(device) if complete else None,
    )


def unroll(head: Eagle3Head | EagleHead, batch: Batch, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each depth k the states [B, A, E] before the head's norm and the mask [B, A] of slots with a root."""
    answers_BA = batch.answers_BA
    attend = UnrolledAttention(answers_BA, layers=head.config.num_hidden_layers)
    state_BAE = gather_rows(true_states(head, batch, attend), answers_BA)
    yield state_BAE, batch.valid_BA
    tokens_T = batch.tokens_BL.gather(1, answers_BA).flatten()
    positions_T = (answers_BA + 1).flatten()
    for k in range(1, depth):
        attend.deepen()
        before = shifted(state_BAE, 1).flatten(0, 1)
        state_BAE = head(before, tokens_T, positions_T, attend).unflatten(0, answers_BA.shape)
        order_A = torch.arange(answers_BA.shape[1], device=answers_BA.device)
        yield state_BAE, batch.valid_BA & (order_A >= k)


def true_states(head: Eagle3Head | EagleHead, batch: Batch, attend: UnrolledAttention) -> Tensor:
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


@dataclass(slots=True)
class _LayerCache:
    """Keys and values of one layer: true slots [B, K, L, D], and branches [B, A, K, D] for each depth from 1."""

    true: tuple[Tensor, Tensor] | None = None
    branch: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def shifted_back(x: Tensor, by: int) -> Tensor:
    """Return ``x`` shifted along dimension 1, so that row a holds row a + ``by``.

    The last rows are zero.
    """
    if by == 0:
        return x
    return torch.cat((x[:, by:], torch.zeros_like(x[:, :by])), dim=1)


class UnrolledAttention:
    """Attention for ``unroll``: causal over all slots at depth 0, along branches of one slot per depth below."""

    def __init__(self, answers_BA: Tensor, *, layers: int = 1) -> None:
        self._answers_BA = answers_BA
        self._depth = 0
        self._caches = [_LayerCache() for _ in range(layers)]
        self._hidden_BAL = torch.empty(0)

    def deepen(self) -> None:
        """Advance to the next depth."""
        self._depth += 1
        self._hide_after(self._answers_BA - self._depth)

    def _hide_after(self, roots_BA: Tensor) -> None:
        """Hide the true slots after the root of each query."""
        true = self._caches[0].true
        assert true is not None, "depth 0 comes first"
        self._hidden_BAL = torch.arange(true[0].shape[2], device=roots_BA.device) > roots_BA[:, :, None]

    def _aligned(self, x: Tensor, depth: int) -> Tensor:
        """Return keys or values [B, A, K, D] of ``depth``, in the order of the present queries."""
        return shifted(x, self._depth - depth)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Store the new keys and values and return the attended values, see ``layers.Attend``."""
        rows = self._answers_BA.shape[0]
        q, k, v = (x.view(rows, -1, *x.shape[1:]) for x in (q_THD, k_TKD, v_TKD))
        if self._depth == 0:
            keys, values = k.transpose(1, 2), v.transpose(1, 2)
            self._caches[layer].true = (keys, values)
            out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).flatten(0, 1)
        self._caches[layer].branch.append((k, v))
        q_BAKGD = q.view(*k.shape[:3], -1, q.shape[-1])
        return self._along_branch(q_BAKGD, self._caches[layer]).flatten(0, 1).flatten(1, 2)

    def _along_branch(self, q_BAKGD: Tensor, cache: _LayerCache) -> Tensor:
        """Return the attention of branch queries over the true slots up to their root and their own branch."""
        assert cache.true is not None
        keys_BKLD, values_BKLD = cache.true
        answers, kv_heads, groups = q_BAKGD.shape[1:4]
        grouped = (len(q_BAKGD), kv_heads, groups, answers)
        q_BKXD = (q_BAKGD * q_BAKGD.shape[-1] ** -0.5).permute(0, 2, 3, 1, 4).flatten(2, 3)  # X is G times A
        true = (q_BKXD @ keys_BKLD.transpose(2, 3)).view(*grouped, -1)
        true = true.masked_fill(self._hidden_BAL[:, None, None], float("-inf"))
        q_BKGAD = q_BKXD.view(*grouped, -1)
        mine = [(self._aligned(k, j), self._aligned(v, j)) for j, (k, v) in enumerate(cache.branch, 1)]
        own = [(q_BKGAD * k.transpose(1, 2)[:, :, None]).sum(dim=-1, keepdim=True) for k, _ in mine]
        weights = torch.softmax(torch.cat((true, *own), dim=-1), dim=-1)
        split = true.shape[-1]
        out: Tensor = (weights[..., :split].flatten(2, 3) @ values_BKLD).view(*grouped, -1)
        for j, (_, v) in enumerate(mine):
            out = out + weights[..., split + j, None] * v.transpose(1, 2)[:, :, None]
        return out.permute(0, 3, 1, 2, 4)
