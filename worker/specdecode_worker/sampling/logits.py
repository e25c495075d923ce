"""Sampling parameters of a batch applied to logits at the nodes of its trees.

Adjustments of single tokens (bias, penalties, blocked tokens) come first, then the masks of grammars, then temperature
and truncation. Target and draft use the same code, so a draft that agrees with the target agrees after processing too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specdecode_kernels.sample import op
from specdecode_worker.sampling.columns import BatchTokens, ParamColumns, TokenCounts
from specdecode_worker.sampling.masks import TokenMasks
from specdecode_worker.sampling.params import SamplingParams
from specdecode_worker.sampling.trees import Forest, Group, Nodes


@dataclass(frozen=True, slots=True)
class RowParams:
    """Parameters of R rows for the kernels that choose tokens.

    ``temperature_R`` is 0 for greedy rows. ``position_R`` is the absolute position of the token to be chosen.
    ``truncation`` is (top-k, top-p, min-p), or None if no row of the batch truncates.
    """

    temperature_R: Tensor
    seed_R: Tensor
    position_R: Tensor
    truncation: tuple[Tensor, Tensor, Tensor] | None


class LogitsProcessor:
    """Logits processing of one step. ``vocab_size`` is that of the target.

    ``special`` groups the sequences that need more than the argmax of their raw logits, ``sampled`` those with a
    temperature above 0.
    """

    def __init__(
        self,
        batch_params: Sequence[SamplingParams],
        texts: BatchTokens,
        forest: Forest,
        vocab_size: int,
        masks: TokenMasks | None = None,
    ) -> None:
        device = texts.roots_B.device
        self.sampled = Group([not params.greedy for params in batch_params], device)
        self.special = Group([not params.greedy or params.adjusts for params in batch_params], device)
        self._adjusting = Group([params.adjusts for params in batch_params], device)
        self._truncated = any(params.truncated for params in batch_params)
        self._masks = masks
        self._columns, self._roots_B, self._size = ParamColumns(batch_params, device), texts.roots_B, vocab_size
        counting = [b for b, params in enumerate(batch_params) if params.counts]
        self._history = (
            TokenCounts(counting, self._columns.prompt_tokens_B, texts, forest, vocab_size) if counting else None
        )

    def adjusted(self, logits_RV: Tensor, target_ids_V: Tensor | None, at: Nodes) -> Tensor:
        """Return logits after bias, penalties, blocked tokens and grammars, which also apply to greedy decoding.

        The same tensor is returned if no request of the batch adjusts logits.

        Args:
            logits_RV: Logits of R nodes, over the vocabulary of the target or of the draft.
            target_ids_V: Target id of each draft token; None if the logits are over the target's vocabulary.
            at: Nodes of the rows.
        """
        if not self._adjusting.any:
            return logits_RV
        part = self._adjusting.of(at.batch_R)
        mine = part.nodes(at)
        if target_ids_V is None:
            moved = self._moved(part.of(logits_RV), mine)
        else:
            # Bias, blocked tokens and counts use the token ids of the target.
            wide = logits_RV.new_full((len(mine.batch_R), self._size), -math.inf)
            wide[:, target_ids_V] = part.of(logits_RV)
            moved = self._moved(wide, mine)[:, target_ids_V]
        return part.merge(moved, lambda: logits_RV.to(moved.dtype))

    @property
    def adjusting(self) -> bool:
        """True if a request of the batch adjusts the logits of single tokens."""
        return self._adjusting.any

    def logp(self, logits_RV: Tensor, at: Nodes) -> Tensor:
        """Return log-probabilities [R, V] of adjusted logits after temperature and truncation.

        The values of greedy rows have no meaning.
        """
        columns, b = self._columns, at.batch_R
        if not self._truncated:
            return op.processed(logits_RV, columns.temperature_B[b], b, b, truncated=False)
        cuts = columns.top_k_B[b], columns.top_p_B[b], columns.min_p_B[b]
        return op.processed(logits_RV, columns.temperature_B[b], *cuts, truncated=True)

    def row_params(self, at: Nodes) -> RowParams:
        """Return the parameters of these rows for the kernels that choose tokens."""
        columns, b = self._columns, at.batch_R
        cuts = (columns.top_k_B[b], columns.top_p_B[b], columns.min_p_B[b]) if self._truncated else None
        position_R = self._roots_B[b] + 1 + at.depth_R
        return RowParams(columns.own_temperature_B[b], columns.seed_B[b], position_R, cuts)

    def _moved(self, logits_RV: Tensor, at: Nodes) -> Tensor:
        """Return adjusted logits over the whole vocabulary of the target."""
        columns, b = self._columns, at.batch_R
        bias, repetition_B = columns.bias_BK, columns.repetition_B
        frequency_B, presence_B = columns.frequency_B, columns.presence_B
        adjusted_RV = op.adjusted(
            logits_RV,
            bias=None if bias is None else (bias[0][b], bias[1][b]),
            blocked=self._blocked(at),
            prompt_RV=self._history.prompt(at) if self._history and repetition_B is not None else None,
            counts_RV=self._history.counts(at) if self._history else None,
            repetition_R=None if repetition_B is None else repetition_B[b],
            frequency_R=None if frequency_B is None else frequency_B[b],
            presence_R=None if presence_B is None else presence_B[b],
        )
        return adjusted_RV if self._masks is None else adjusted_RV.masked_fill_(self._masks.blocked(at), -math.inf)

    def _blocked(self, at: Nodes) -> tuple[Tensor, Tensor] | None:
        """Return the blocked token ids [R, K], and the mask [R, K] that is set while min_tokens is not reached.

        Return None if no request of the batch blocks tokens.
        """
        columns, b = self._columns, at.batch_R
        if columns.blocked_BK is None:
            return None
        out_R = self._roots_B[b] + at.depth_R + 1 - columns.prompt_tokens_B[b]
        early_R1 = (out_R < columns.min_tokens_B[b])[:, None]
        return columns.blocked_BK[b], early_R1.expand(-1, columns.blocked_BK.shape[1])
