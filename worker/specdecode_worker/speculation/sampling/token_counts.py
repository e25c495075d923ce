"""Token counts of prompt and answer at every node of a tree, computed on the device for penalties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.speculation.sampling.row_selection import Nodes
from specdecode_worker.speculation.trees import Forest, paths_of


@dataclass(frozen=True, slots=True)
class BatchTokens:
    """Tokens of a batch on the device.

    Row ``slots_B[b]`` of ``tokens_SP`` holds prompt and answer of sequence b up to the root of its tree at index
    ``roots_B[b]``. Node j of the tree is at index root + j once it is drafted. Every root is below ``bound``.
    """

    tokens_SP: Tensor
    slots_B: Tensor
    roots_B: Tensor
    bound: int


class TokenCounts:
    """Token counts of the sequences that need them.

    ``counting`` lists these P sequences of the batch. Each gets rows [V], which are computed once per step. The other
    sequences read the first of these rows, and their result is not used.
    """

    def __init__(
        self, counting: Sequence[int], prompt_tokens_B: Tensor, texts: BatchTokens, forest: Forest, vocab_size: int
    ) -> None:
        self._counting, self._prompt_tokens_B, self._size = counting, prompt_tokens_B, vocab_size
        self._texts, self._forest = texts, forest

    def prompt(self, at: Nodes) -> Tensor:
        """Return a mask [R, V] of the tokens that occur in the prompt."""
        return self._roots[0][self._row_B[at.batch_R]]

    def counts(self, at: Nodes) -> Tensor:
        """Return the number of occurrences [R, V] of each token in the answer, up to and including these nodes.

        The answer up to the root is counted first, then the tokens along the path in the tree.
        """
        counts_RV = self._roots[1][self._row_B[at.batch_R]]
        texts = self._texts
        path_RD = self._paths_BND[at.batch_R, at.node_R]
        index_RD = texts.roots_B[at.batch_R, None] + path_RD
        tokens_RD = texts.tokens_SP[texts.slots_B[at.batch_R, None], index_RD]
        # Node 0, the root, is padding here: it is already in counts_RV.
        return counts_RV.scatter_add_(1, tokens_RD, (path_RD > 0).to(counts_RV.dtype))

    @cached_property
    def _roots(self) -> tuple[Tensor, Tensor]:
        """Prompt mask [P, V], and counts [P, V] of the answer up to the root."""
        texts = self._texts
        which_P = to_device(self._counting, texts.roots_B.device)
        tokens_PL = texts.tokens_SP[texts.slots_B[which_P], : texts.bound]
        index_L = torch.arange(tokens_PL.shape[1], device=tokens_PL.device)
        begin_P1, root_P1 = self._prompt_tokens_B[which_P, None], texts.roots_B[which_P, None]
        nothing_PV = torch.zeros(len(which_P), self._size, device=tokens_PL.device)
        prompt_PV = nothing_PV.scatter_add(1, tokens_PL, (index_L < begin_P1).float()) > 0
        answer_PL = (index_L >= begin_P1) & (index_L <= root_P1)
        return prompt_PV, nothing_PV.scatter_add_(1, tokens_PL, answer_PL.float())

    @cached_property
    def _paths_BND(self) -> Tensor:
        """Nodes on the path to every node of the forest [B, N, D]."""
        return paths_of(self._forest.trees, self._texts.roots_B.device)

    @cached_property
    def _row_B(self) -> Tensor:
        """Row of each sequence in the counts [B]; 0 for sequences without counts."""
        row_B = torch.zeros_like(self._texts.roots_B)
        which_P = to_device(self._counting, row_B.device)
        row_B[which_P] = torch.arange(len(which_P), device=row_B.device)
        return row_B
