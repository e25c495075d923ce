"""Runs the draft head on its own paged cache: prompts beside the target's, then trees level by level.

Draft slot i holds the pair (target's hidden state h[i-1], embedding of token i) and proposes token i + 1; slot 0 does
not exist. Every step first rewrites the slots that the last steps accepted from the target's true states (kept in the
ring of state.py) and ends at the root; each further pass runs the newest level of the tree, whose hidden states are
the head's own. A tree's keys stand behind the root's, as in the target's cache, and are rewritten once accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.engine.cache import PagedCache
from specdecode_worker.engine.packed import Packed, slots_of, spread
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.scheduler import Row
from specdecode_worker.engine.state import RING, DeviceState
from specdecode_worker.models.layers import Attend
from specdecode_worker.speculation.coupling import Coupling
from specdecode_worker.speculation.trees import Forest, Level


class Head(Protocol):
    """What a draft must do; Eagle3Head does. Hidden states are passed on before the head's last norm."""

    def fuse(self, aux_TA: Tensor) -> Tensor: ...
    def logits(self, hidden_TE: Tensor) -> Tensor: ...
    def __call__(self, hidden_TE: Tensor, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor: ...


class Drafter:
    """Writes the tokens of trees behind the roots in ``state.tokens_SP``."""

    def __init__(
        self,
        head: Head,
        target_ids: Tensor | None,
        cache: PagedCache,
        state: DeviceState,
        positions: int,
        sharpness: Sequence[float] = (),
    ) -> None:
        """``target_ids`` maps the head's vocabulary (None: the target's own). ``sharpness[d]`` multiplies the logits
        of depth d + 1 where sampled; the last entry repeats, none means 1."""
        self._head, self._target_ids, self._cache, self._state = head, target_ids, cache, state
        self._last_position = positions - 1
        self._sharpness = tuple(sharpness) or (1.0,)

    def prefill(self, rows: Sequence[Row], aux_TA: Tensor) -> None:
        """The draft's keys for prefill chunks, whose aux states are ``aux_TA``: slots up to the chunk's last token.

        The first slot of a chunk needs the state before the chunk, which the ring has kept.
        """
        slots = torch.tensor([row.request.slot for row in rows], device=aux_TA.device)
        starts = torch.tensor([row.start for row in rows], device=aux_TA.device)
        before_BA = self._state.aux(slots, (starts - 1).clamp(min=0))
        parts, counts, firsts, end = [], [], [], 0
        for b, row in enumerate(rows):
            begin, end = end, end + row.count
            head = before_BA[b : b + 1] if row.start else before_BA[:0]
            parts += [head, aux_TA[begin : end - 1]]
            firsts.append(max(row.start, 1))
            counts.append(row.start + row.count - firsts[-1])
        if sum(counts):
            kept = [
                (row.request, count, first) for row, count, first in zip(rows, counts, firsts, strict=True) if count
            ]
            first_B = torch.tensor([first for *_, first in kept], device=aux_TA.device)
            self._causal([request for request, *_ in kept], [count for _, count, _ in kept], first_B, torch.cat(parts))
        for row in rows:
            if row.request.lag > 1:  # it did not follow the prompt so far
                row.request.draft_start = max(row.start, 1)
            row.request.lag = 1

    def propose(self, rows: Sequence[Row], forest: Forest, coupling: Coupling) -> Tensor | None:
        """Drafts the forest's trees for the rows that choose. Lagging drafts of rows that draft nothing catch up
        before the ring forgets what they need.

        [B, N, K]: the best target ids behind every node that the draft ran, best first, -1 elsewhere; N counts
        verified and shadow nodes. None when no tree has a node.
        """
        drafting = [b for b, row in enumerate(rows) if not row.is_chunk and _runs_now(row)]
        if not drafting:
            return None
        roots_BE = self._catch_up(rows, drafting)
        if not forest.levels:
            return None
        nodes = max(len(tree.parents) for tree in forest.trees)
        ranked_BNK = torch.full((len(rows), nodes, MAX_RANKS), -1, device=roots_BE.device)
        hidden_RE = roots_BE
        for depth, level in enumerate(forest.levels):
            hidden_RE = hidden_RE[level.source_R]
            if depth:
                hidden_RE = self._run(rows, level, depth, forest, hidden_RE)
            ranked_BNK[level.batch_R, level.node_R] = self._rank(level, depth, hidden_RE, coupling)
            self._write_children(rows, level, ranked_BNK)
        return ranked_BNK

    def _catch_up(self, rows: Sequence[Row], drafting: list[int]) -> Tensor:
        """Runs the slots up to the root, as many as the draft lags behind; the roots' hidden states [B, E]."""
        requests = [rows[b].request for b in drafting]
        counts = [min(request.lag, RING, max(request.cached_least, 1)) for request in requests]
        for request, count in zip(requests, counts, strict=True):
            if request.lag > count:  # the ring has forgotten what lies between: the draft begins anew
                request.draft_start = max(request.cached_least + 1 - count, 1)
            request.drafted_to_root()
        slots_B = torch.tensor([request.slot for request in requests], device=self._state.length_S.device)
        first_B = self._state.length_S[slots_B] + 1 - torch.tensor(counts, device=slots_B.device)
        sequence_T, row_T = spread(tuple(counts), slots_B.device)
        aux_TA = self._state.aux(slots_B[sequence_T], first_B[sequence_T] + row_T - 1)
        out_TE = self._causal(requests, counts, first_B, aux_TA)
        last = torch.tensor(counts, device=slots_B.device).cumsum(0) - 1
        if len(drafting) == len(rows):
            return out_TE[last]
        roots_BE = out_TE.new_zeros(len(rows), out_TE.shape[-1])
        roots_BE[torch.tensor(drafting, device=slots_B.device)] = out_TE[last]
        return roots_BE

    def _causal(self, requests: Sequence[Request], counts: Sequence[int], first_B: Tensor, aux_TA: Tensor) -> Tensor:
        """Runs ``counts[b]`` consecutive slots from ``first_B[b]`` on true states; hidden states [T, E]."""
        device = first_B.device
        slots_B = torch.tensor([request.slot for request in requests], device=device)
        sequence_T, row_T = spread(tuple(counts), device)
        index_T = first_B[sequence_T] + row_T
        table_BM = self._state.block_table_SM[slots_B]
        bounds = tuple(max(request.cached_bound, request.prefilled) + 1 for request in requests)
        packed = Packed(
            tokens_T=self._state.tokens_SP[slots_B[sequence_T], index_T],
            positions_T=index_T.clamp(max=self._last_position),
            slots_T=slots_of(table_BM, sequence_T, index_T),
            prefix_len_B=first_B,
            ancestors_T=torch.zeros_like(index_T),
            block_table_BM=table_BM,
            blocks=tuple(tuple(request.blocks) for request in requests),
            query_counts=tuple(counts),
            key_bounds=bounds,
            key_starts=tuple(request.draft_start for request in requests),
            dense=False,
        )
        return self._forward(self._head.fuse(aux_TA), packed)

    def _run(self, rows: Sequence[Row], level: Level, depth: int, forest: Forest, hidden_RE: Tensor) -> Tensor:
        """One pass over the nodes of a level; ``hidden_RE`` comes from their parents."""
        running = [b for b, count in enumerate(level.counts) if count]
        requests = [rows[b].request for b in running]
        counts = tuple(level.counts[b] for b in running)
        slots_B = torch.tensor([request.slot for request in requests], device=hidden_RE.device)
        sequence_R, _ = spread(counts, hidden_RE.device)
        length_B = self._state.length_S[slots_B]
        length_R = length_B[sequence_R]
        table_BM = self._state.block_table_SM[slots_B]
        highest = [max(forest.trees[b].expanded[depth]) for b in running]
        packed = Packed(
            tokens_T=self._state.tokens_SP[slots_B[sequence_R], length_R + level.node_R],
            positions_T=(length_R + depth).clamp(max=self._last_position),
            slots_T=slots_of(table_BM, sequence_R, length_R + level.node_R),
            prefix_len_B=length_B,
            ancestors_T=level.ancestors_R,
            block_table_BM=table_BM,
            blocks=tuple(tuple(request.blocks) for request in requests),
            query_counts=counts,
            key_bounds=tuple(r.cached_bound + node + 1 for r, node in zip(requests, highest, strict=True)),
            key_starts=tuple(request.draft_start for request in requests),
            dense=all(r.cached_bound == r.cached for r in requests) and all(node == depth for node in highest),
        )
        return self._forward(hidden_RE, packed)

    def _forward(self, hidden_TE: Tensor, packed: Packed) -> Tensor:
        return self._head(hidden_TE, packed.tokens_T, packed.positions_T, self._cache.attend(packed))

    def _rank(self, level: Level, depth: int, hidden_RE: Tensor, coupling: Coupling) -> Tensor:
        sharpness = self._sharpness[min(depth, len(self._sharpness) - 1)]
        logits = self._head.logits(hidden_RE)
        k = min(MAX_RANKS, logits.shape[-1])
        return coupling.propose(logits, self._target_ids, level.batch_R, level.depth_R, sharpness, k)

    def _write_children(self, rows: Sequence[Row], level: Level, ranked_BNK: Tensor) -> None:
        slots_B = torch.tensor([row.request.slot for row in rows], device=ranked_BNK.device)
        slot_C = slots_B[level.child_batch_C]
        parent_C = level.node_R[level.child_source_C]
        token_C = ranked_BNK[level.child_batch_C, parent_C, level.child_rank_C]
        self._state.tokens_SP[slot_C, self._state.length_S[slot_C] + level.child_node_C] = token_C


def _runs_now(row: Row) -> bool:
    return row.tree.drafted_depth > 0 or row.request.lag >= RING - MAX_RANKS
