"""Adjustment of the logits of a captured pass: bias, blocked tokens, penalties and grammar masks from static tables.

It is equivalent to `LogitsProcessor.adjusted` (speculation/sampling/logits_processing.py) with tensors of fixed sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdecode_kernels.sample import op
from specdecode_kernels.step_tables.tables import PackedRows, SlotState, StepRows
from specdecode_worker.engine.graphs.graph_key import NODES, Features
from specdecode_worker.engine.graphs.graph_sampling import PackedSampler
from specdecode_worker.speculation.sampling.token_masks import unpacked_on_device

ROWS_AT_ONCE = 64
"""Rows of logits adjusted at a time, which bounds the memory of the fp32 copies, counts and masks."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of the rows of a step, [B + 1, V]: whether the prompt has them, and how often the answer to the root."""

    prompt_BV: Tensor
    answer_BV: Tensor


def count_tokens(state: SlotState, rows: StepRows, prompt_tokens_B1: Tensor, history: int, vocab_size: int) -> Counts:
    """Count the tokens of each row in the first ``history`` positions of its text, which hold the root."""
    tokens_BL = state.tokens_SP[rows.slots_B1, :history].clamp(min=0)
    index_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    begin_B1, root_B1 = prompt_tokens_B1[:, None], rows.roots_B1[:, None]
    nothing_BV = torch.zeros(len(tokens_BL), vocab_size, device=tokens_BL.device)
    prompt_BV = nothing_BV.scatter_add(1, tokens_BL, (index_L < begin_B1).float()) > 0
    answer_BL = (index_L >= begin_B1) & (index_L <= root_B1)
    return Counts(prompt_BV, nothing_BV.scatter_add_(1, tokens_BL, answer_BL.float()))


@dataclass(frozen=True, slots=True)
class PassNodes:
    """Nodes of the packed rows of a pass.

    ``ancestors_T`` are bit masks of the nodes on their paths, the root included; None if all rows are roots.
    ``mask_row_T`` is the row of each in the table of grammar masks, None without grammars.
    """

    sequence_T: Tensor
    ancestors_T: Tensor | None
    mask_row_T: Tensor | None = None

    def __getitem__(self, here: slice) -> PassNodes:
        """Return the nodes of a slice of the rows."""
        ancestors, masks = self.ancestors_T, self.mask_row_T
        return PassNodes(
            self.sequence_T[here],
            None if ancestors is None else ancestors[here],
            None if masks is None else masks[here],
        )


class Adjustment:
    """Adjustment of logits in one captured step.

    Args of the constructor: features and static tables of the step, its slots and rows, the table of grammar masks
    [N, W], and the size of the target's vocabulary.
    """

    def __init__(
        self,
        features: Features,
        at: Mapping[str, Tensor],
        state: SlotState,
        rows: StepRows,
        mask_table_NW: Tensor | None,
        vocab_size: int,
    ) -> None:
        self._features, self._at, self._state, self._rows = features, at, state, rows
        self._masks_NW, self._size = mask_table_NW, vocab_size
        self._counts = (
            count_tokens(state, rows, at["prompt_tokens"], features.history, vocab_size) if features.history else None
        )

    def adjusted(self, logits_RV: Tensor, ids_V: Tensor | None, nodes: PassNodes, next_R: Tensor) -> Tensor:
        """Return adjusted logits of at most ROWS_AT_ONCE rows, in fp32 or wider.

        Args:
            logits_RV: Logits of the rows, over the vocabulary of the target or of the draft.
            ids_V: Target id of each draft token; None if the logits are over the target's vocabulary.
            nodes: Nodes of the rows.
            next_R: Position of the token that is chosen behind each row.
        """
        if ids_V is None:
            return self._moved(logits_RV, nodes, next_R)
        wide = logits_RV.new_full((len(logits_RV), self._size), -math.inf)
        wide[:, ids_V] = logits_RV
        return self._moved(wide, nodes, next_R)[:, ids_V]

    def _moved(self, logits_RV: Tensor, nodes: PassNodes, next_R: Tensor) -> Tensor:
        at, b = self._at, nodes.sequence_T
        if self._features.adjusts:
            early_R1 = (next_R - at["prompt_tokens"][b] < at["min_tokens"][b])[:, None]
            blocked_RK = at["blocked_ids"][b]
            counts = self._counts
            moved_RV = op.adjusted(
                logits_RV,
                bias=(at["bias_ids"][b], at["bias"][b]),
                blocked=(blocked_RK, early_R1.expand_as(blocked_RK)),
                prompt_RV=None if counts is None else counts.prompt_BV[b],
                counts_RV=None if counts is None else self._counted(counts, nodes),
                repetition_R=None if counts is None else at["repetition"][b],
                frequency_R=None if counts is None else at["frequency"][b],
                presence_R=None if counts is None else at["presence"][b],
            )
        else:
            moved_RV = op.adjusted(logits_RV)
        if self._masks_NW is None or nodes.mask_row_T is None:
            return moved_RV
        free_RV = unpacked_on_device(self._masks_NW[nodes.mask_row_T])[:, : self._size]
        return moved_RV.masked_fill_(~free_RV, -math.inf)

    def _counted(self, counts: Counts, nodes: PassNodes) -> Tensor:
        """Return the occurrences [R, V] of each token in the answer, those on the path of a node included."""
        b, answer_RV = nodes.sequence_T, counts.answer_BV[nodes.sequence_T]
        if nodes.ancestors_T is None:
            return answer_RV
        node_N = torch.arange(1, NODES, device=b.device)  # the root is counted already
        on_path_RN = (nodes.ancestors_T[:, None] >> node_N) & 1
        index_RN = self._rows.roots_B1[b, None] + node_N
        tokens_RN = self._state.tokens_SP[self._rows.slots_B1[b, None], index_RN] * on_path_RN
        return answer_RV.scatter_add_(1, tokens_RN, on_path_RN.to(answer_RV.dtype))


@dataclass(frozen=True, slots=True)
class AdjustedSampler:
    """`Proposer` of one captured pass, as `PackedSampler`, for steps whose logits are adjusted."""

    packed: PackedRows
    nodes: PassNodes
    adjustment: Adjustment
    vocab_size: int

    def propose(
        self,
        logits_RV: Tensor,
        target_ids_V: Tensor | None,
        batch_R: Tensor,
        node_R: Tensor,
        depth_R: Tensor,
        sharpness: float,
        k: int,
    ) -> Tensor:
        """Return the ``k`` best target token ids for each row of ``logits_RV``, best first: [R, k]."""
        if sharpness != 1:
            # Sharpness must not apply to greedy rows, nor to the bias that is added below.
            temperature_R = self.packed.temperature_T
            logits_RV = logits_RV * torch.ones_like(temperature_R).masked_fill_(temperature_R > 0, sharpness)[:, None]
        return self._joined(
            logits_RV,
            target_ids_V,
            lambda piece, moved_RV: piece.propose(moved_RV, target_ids_V, batch_R, node_R, depth_R, 1.0, k),
        )

    def choose(self, logits_TV: Tensor) -> Tensor:
        """Return the target's token [T] behind every packed row."""
        return self._joined(logits_TV, None, PackedSampler.choose)

    def _joined(
        self, logits_RV: Tensor, target_ids_V: Tensor | None, sample: Callable[[PackedSampler, Tensor], Tensor]
    ) -> Tensor:
        """Return the results of ``sample`` for all rows. It gets a piece of them with its adjusted logits at a time."""
        results = []
        for start in range(0, len(self.packed.next_T), ROWS_AT_ONCE):
            here = slice(start, start + ROWS_AT_ONCE)
            packed = _sampling_of(self.packed, here)
            moved_RV = self.adjustment.adjusted(logits_RV[here], target_ids_V, self.nodes[here], packed.next_T)
            results.append(sample(PackedSampler(packed, self.vocab_size), moved_RV))
        return results[0] if len(results) == 1 else torch.cat(results)


def _sampling_of(packed: PackedRows, here: slice) -> PackedRows:
    """Return packed rows whose sampling parameters and positions are those of a slice."""
    cuts = packed.truncation
    return replace(
        packed,
        next_T=packed.next_T[here],
        temperature_T=packed.temperature_T[here],
        seed_T=packed.seed_T[here],
        truncation=None if cuts is None else (cuts[0][here], cuts[1][here], cuts[2][here]),
    )
