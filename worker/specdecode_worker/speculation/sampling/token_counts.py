"""How often each token stands in a request's answer, at every node of its tree, counted on the device."""

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
class Texts:
    """What the device knows of a batch's tokens. Row ``slots_B[b]`` of ``tokens_SP`` holds prompt and answer up to the
    root at index ``roots_B[b]``, and node j of its tree at root + j once it is drafted. No root is at ``bound`` or
    behind it."""

    tokens_SP: Tensor
    slots_B: Tensor
    roots_B: Tensor
    bound: int


class History:
    """``counting`` are the sequences of the batch that need it: they get a row of the vocabulary's size, P together,
    once a step. The others read the first of those rows, to no effect."""

    def __init__(
        self, counting: Sequence[int], prompt_tokens_B: Tensor, texts: Texts, forest: Forest, vocab_size: int
    ) -> None:
        self._counting, self._prompt_tokens_B, self._size = counting, prompt_tokens_B, vocab_size
        self._texts, self._forest = texts, forest

    def prompt(self, at: Nodes) -> Tensor:
        """[R, V] whether a token stands in the prompt."""
        return self._roots[0][self._row_B[at.batch_R]]

    def counts(self, at: Nodes) -> Tensor:
        """[R, V] how often it stands in the answer when the tokens behind these nodes are chosen: up to the root, then
        along the tree's path."""
        counts_RV = self._roots[1][self._row_B[at.batch_R]]
        texts = self._texts
        path_RD = self._paths_BND[at.batch_R, at.node_R]
        index_RD = texts.roots_B[at.batch_R, None] + path_RD
        tokens_RD = texts.tokens_SP[texts.slots_B[at.batch_R, None], index_RD]
        # Node 0, the root, is padding: it was counted before.
        return counts_RV.scatter_add_(1, tokens_RD, (path_RD > 0).to(counts_RV.dtype))

    @cached_property
    def _roots(self) -> tuple[Tensor, Tensor]:
        """[P, V] whether a token stands in the prompt, and how often in the answer up to the root."""
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
        return paths_of(self._forest.trees, self._texts.roots_B.device)

    @cached_property
    def _row_B(self) -> Tensor:
        row_B = torch.zeros_like(self._texts.roots_B)
        which_P = to_device(self._counting, row_B.device)
        row_B[which_P] = torch.arange(len(which_P), device=row_B.device)
        return row_B
