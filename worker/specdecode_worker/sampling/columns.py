"""Sampling parameters and counts of tokens of a batch, as columns of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.sampling.params import SamplingParams
from specdecode_worker.sampling.trees import Forest, Nodes, paths_of

# Sampling parameters of a batch as tensors, with one row per sequence, built on first use.


class ParamColumns:
    """Tensors [B] or [B, K] of the sampling parameters. A penalty is None if no request of the batch uses it."""

    def __init__(self, batch_params: Sequence[SamplingParams], device: torch.device) -> None:
        self._batch_params, self._device = batch_params, device

    @cached_property
    def temperature_B(self) -> Tensor:
        """Temperature, 1 for greedy requests, so that it can be a divisor."""
        return self._floats([params.temperature or 1.0 for params in self._batch_params])

    @cached_property
    def own_temperature_B(self) -> Tensor:
        """Temperature, 0 for greedy requests."""
        return self._floats([params.temperature for params in self._batch_params])

    @cached_property
    def seed_B(self) -> Tensor:
        """Seed of the noise."""
        return to_device([params.seed for params in self._batch_params], self._device)

    @cached_property
    def top_k_B(self) -> Tensor:
        """Top-k; 0 disables it."""
        return to_device([params.top_k for params in self._batch_params], self._device)

    @cached_property
    def top_p_B(self) -> Tensor:
        """Top-p; 1 disables it."""
        return self._floats([params.top_p for params in self._batch_params])

    @cached_property
    def min_p_B(self) -> Tensor:
        """Min-p; 0 disables it."""
        return self._floats([params.min_p for params in self._batch_params])

    @cached_property
    def repetition_B(self) -> Tensor | None:
        """Repetition penalty; 1 is neutral."""
        return self._penalty([params.repetition_penalty for params in self._batch_params], 1.0)

    @cached_property
    def frequency_B(self) -> Tensor | None:
        """Frequency penalty; 0 is neutral."""
        return self._penalty([params.frequency_penalty for params in self._batch_params], 0.0)

    @cached_property
    def presence_B(self) -> Tensor | None:
        """Presence penalty; 0 is neutral."""
        return self._penalty([params.presence_penalty for params in self._batch_params], 0.0)

    @cached_property
    def prompt_tokens_B(self) -> Tensor:
        """Number of prompt tokens."""
        return to_device([params.prompt_tokens for params in self._batch_params], self._device)

    @cached_property
    def min_tokens_B(self) -> Tensor:
        """Number of answer tokens before which tokens are blocked; 0 if no token is blocked."""
        return to_device([params.min_tokens if params.blocks else 0 for params in self._batch_params], self._device)

    @cached_property
    def bias_BK(self) -> tuple[Tensor, Tensor] | None:
        """Token ids and logit biases, padded with a bias of 0; None if no request has a bias."""
        longest = max(len(params.logit_bias) for params in self._batch_params)
        if not longest:
            return None
        rows = [[*params.logit_bias, *[(0, 0.0)] * (longest - len(params.logit_bias))] for params in self._batch_params]
        tokens = to_device([[token for token, _ in row] for row in rows], self._device)
        return tokens, self._floats([[value for _, value in row] for row in rows])

    @cached_property
    def blocked_BK(self) -> Tensor | None:
        """Token ids blocked before min_tokens; None if no request blocks any.

        Rows are padded with one of their own ids, so that no id is marked as both blocked and free.
        """
        rows = [params.blocked if params.blocks else (0,) for params in self._batch_params]
        if not any(params.blocks for params in self._batch_params):
            return None
        longest = max(map(len, rows))
        return to_device([[*row, *row[:1] * (longest - len(row))] for row in rows], self._device)

    def _penalty(self, values: list[float], neutral: float) -> Tensor | None:
        """Return the values as a tensor, or None if all are neutral."""
        return None if all(value == neutral for value in values) else self._floats(values)

    def _floats(self, values: list[float] | list[list[float]]) -> Tensor:
        return to_device(values, self._device, dtype=torch.float32)


# Token counts of prompt and answer at every node of a tree, computed on the device for penalties.


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
