"""EAGLE-3's training-time test: the head drafts from every slot of a recorded text at once, several tokens deep.

Slot i reads the pair (state of token i - 1, embedding of token i) and is asked for token i + 1. At depth 0 the state is
the target's. At depth k it is what the head itself said at depth k - 1 of slot i - 1, just as when it drafts: so slot i
stands k tokens behind a root i - k, and its query sees the true slots up to that root and the k slots of its own
branch. The texts are real, so one pass a depth is exact for every root (it is also how acceptance is replayed).

Shape suffixes: B texts, L slots of a text, A answer slots, H query heads, K key-value heads, G queries a kv head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from specdecode_worker.models.eagle3 import Eagle3Head
from specdecode_worker.training.shards import Conversation


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts padded to one length. Slots start at token 1: token 0 has no state before it, so its pair does not exist.

    ``answers_BA`` are the slots (counted from 0) whose proposals matter, ``valid_BA`` which of them are no padding.
    """

    tokens_BL: Tensor
    aux_BLA: Tensor
    final_BAE: Tensor
    answers_BA: Tensor
    valid_BA: Tensor


def make_batch(conversations: Sequence[Conversation], dtype: torch.dtype) -> Batch:
    tokens_BL = pad_sequence([c.tokens_N[1:].long() for c in conversations], batch_first=True)
    first_B = torch.tensor([c.answer_start - 1 for c in conversations])
    count_B = torch.tensor([len(c.tokens_N) - c.answer_start for c in conversations])
    order_A = torch.arange(int(count_B.max()))
    return Batch(
        tokens_BL=tokens_BL,
        aux_BLA=pad_sequence([c.aux_NA[:-1] for c in conversations], batch_first=True).to(dtype),
        final_BAE=pad_sequence([c.hidden_NE[c.answer_start :] for c in conversations], batch_first=True).to(dtype),
        answers_BA=(first_B[:, None] + order_A).clamp(max=tokens_BL.shape[1] - 1),
        valid_BA=order_A < count_B[:, None],
    )


def unroll(head: Eagle3Head, batch: Batch, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each depth k: (states [B, A, E] before the head's norm, which of them [B, A] have a root in the answer)."""
    answers_BA = batch.answers_BA
    shape_BL = batch.tokens_BL.shape
    attend = UnrolledAttention(answers_BA)
    positions_BL = (torch.arange(shape_BL[1]) + 1).expand(shape_BL)
    fused = head.fuse(batch.aux_BLA).flatten(0, 1)
    state = head(fused, batch.tokens_BL.flatten(), positions_BL.flatten(), attend).unflatten(0, shape_BL)
    state_BAE = _pick(state, answers_BA)
    yield state_BAE, batch.valid_BA
    tokens_T = batch.tokens_BL.gather(1, answers_BA).flatten()
    positions_T = (answers_BA + 1).flatten()
    for k in range(1, depth):
        attend.deepen()
        before = _shifted(state_BAE, 1).flatten(0, 1)
        state_BAE = head(before, tokens_T, positions_T, attend).unflatten(0, answers_BA.shape)
        yield state_BAE, batch.valid_BA & (torch.arange(answers_BA.shape[1]) >= k)


def _pick(x_BLE: Tensor, index_BA: Tensor) -> Tensor:
    picked: Tensor = x_BLE.gather(1, index_BA[:, :, None].expand(-1, -1, x_BLE.shape[-1]))
    return picked


def _shifted(x: Tensor, by: int) -> Tensor:
    """Along dimension 1, so that row a holds what row a - by held; the first rows are zero and never counted."""
    if by == 0:
        return x
    return torch.cat((torch.zeros_like(x[:, :by]), x[:, :-by]), dim=1)


class UnrolledAttention:
    """An Attend for ``unroll``: depth 0 is causal over all slots, deeper ones are branches of one slot a depth."""

    def __init__(self, answers_BA: Tensor) -> None:
        self._answers_BA = answers_BA
        self._depth = 0
        self._true: tuple[Tensor, Tensor] | None = None  # keys and values [B, K, L, D] of the true slots
        self._branch: list[tuple[Tensor, Tensor]] = []  # per depth from 1: keys and values [B, A, K, D]
        self._hidden_BAL = torch.empty(0)

    def deepen(self) -> None:
        """The next call is of the next depth."""
        assert self._true is not None, "depth 0 comes first"
        self._depth += 1
        roots_BA1 = self._answers_BA[:, :, None] - self._depth
        slots = self._true[0].shape[2]
        self._hidden_BAL = torch.arange(slots) > roots_BA1

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        rows = self._answers_BA.shape[0]
        q, k, v = (x.view(rows, -1, *x.shape[1:]) for x in (q_THD, k_TKD, v_TKD))
        if self._depth == 0:
            keys, values = k.transpose(1, 2), v.transpose(1, 2)
            self._true = (keys, values)
            out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).flatten(0, 1)
        self._branch.append((k, v))
        return self._along_branch(q.view(*k.shape[:3], -1, q.shape[-1])).flatten(0, 1).flatten(1, 2)

    def _along_branch(self, q_BAKGD: Tensor) -> Tensor:
        assert self._true is not None
        keys_BKLD, values_BKLD = self._true
        answers, kv_heads, groups = q_BAKGD.shape[1:4]
        grouped = (len(q_BAKGD), kv_heads, groups, answers)
        q_BKXD = (q_BAKGD * q_BAKGD.shape[-1] ** -0.5).permute(0, 2, 3, 1, 4).flatten(2, 3)  # X runs over G and A
        true = (q_BKXD @ keys_BKLD.transpose(2, 3)).view(*grouped, -1)
        true = true.masked_fill(self._hidden_BAL[:, None, None], float("-inf"))
        q_BKGAD = q_BKXD.view(*grouped, -1)
        mine = [
            (_shifted(k, self._depth - j), _shifted(v, self._depth - j)) for j, (k, v) in enumerate(self._branch, 1)
        ]
        own = [(q_BKGAD * k.transpose(1, 2)[:, :, None]).sum(dim=-1, keepdim=True) for k, _ in mine]
        weights = torch.softmax(torch.cat((true, *own), dim=-1), dim=-1)
        split = true.shape[-1]
        out: Tensor = (weights[..., :split].flatten(2, 3) @ values_BKLD).view(*grouped, -1)
        for j, (_, v) in enumerate(mine):
            out = out + weights[..., split + j, None] * v.transpose(1, 2)[:, :, None]
        return out.permute(0, 3, 1, 2, 4)
