"""Coupled sampling: draft and target choose with the same noise, so that drafts do not change the emitted text.

The noise of a request is a function of its seed and of the absolute position of the token to be chosen. On a GPU the
kernels compute it where they choose. Elsewhere it is computed once per step and position, and is used for the proposals
of the draft and for the choice of the target at every node of that depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.noise.op import gumbel
from specdecode_kernels.top_k.op import top_k
from specdecode_kernels.transfer import to_device
from specdecode_kernels.verify.op import choose
from specdecode_worker.sampling.acceptance import Outcome, accept
from specdecode_worker.sampling.columns import BatchTokens
from specdecode_worker.sampling.logits import LogitsProcessor
from specdecode_worker.sampling.masks import TokenMasks
from specdecode_worker.sampling.params import SamplingParams
from specdecode_worker.sampling.trees import Forest, Nodes

Pick = Callable[[Tensor], Tensor]
"""Function that selects the best index [R], or the best k indices [R, k], of the scores [R, V]."""

_SCORES_AT_ONCE = 100_000
"""Number of scores processed together on a CPU, so that they stay in cache between operations."""


class Coupling:
    """Coupled choices of one step for a batch; a `Sampler` (see sampler.py)."""

    def __init__(
        self,
        batch_params: Sequence[SamplingParams],
        texts: BatchTokens,
        forest: Forest,
        vocab_size: int,
        masks: TokenMasks | None = None,
    ) -> None:
        self._processing = LogitsProcessor(batch_params, texts, forest, vocab_size, masks)
        self._size = vocab_size
        self._on_kernels = dispatch.on_gpu(texts.roots_B)
        if self._processing.sampled.any and not self._on_kernels:
            depth = max(forest.depth, len(forest.levels) - 1)
            self._row_of_B, self._noise_SDV = _noise(batch_params, texts.roots_B, depth, vocab_size)

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
        """Return the top k tokens per row [R, k] of the draft's logits, plus the target's noise in sampled rows.

        In sampled rows ``sharpness`` multiplies the draft's logits. It was fitted to maximise agreement with the
        target. The other arguments are those of `Sampler.propose`.
        """
        at = Nodes(batch_R, node_R, depth_R)
        if self._on_kernels:
            return self._proposed(logits_RV, target_ids_V, at, sharpness, k)
        best = self._picked(logits_RV, target_ids_V, at, sharpness, lambda scores: scores.topk(k, dim=-1).indices)
        return best if target_ids_V is None else target_ids_V[best]

    def choose(self, logits_RV: Tensor, batch_R: Tensor, node_R: Tensor, depth_R: Tensor) -> Tensor:
        """Return the tokens [R] that plain decoding emits after these nodes."""
        at = Nodes(batch_R, node_R, depth_R)
        if not self._on_kernels:
            return self._picked(logits_RV, None, at, 1.0, _first)
        row_params = self._processing.row_params(at)
        adjusted_RV = self._processing.adjusted(logits_RV, None, at)
        return choose(
            adjusted_RV, row_params.temperature_R, row_params.seed_R, row_params.position_R, row_params.truncation
        )

    def accept(
        self,
        forest: Forest,
        tokens_BN: Tensor,
        logits_RV: Tensor,
        batch_R: Tensor,
        node_R: Tensor,
        depth_R: Tensor,
        ranked_BNK: Tensor | None,
        depth_limit_B: Tensor | None,
    ) -> Outcome:
        """Accept the nodes that equal the choice of the target, as `Sampler.accept`."""
        chosen_BN = torch.full_like(forest.parents_BN, -1)
        chosen_BN[batch_R, node_R] = self.choose(logits_RV, batch_R, node_R, depth_R)
        return accept(forest, tokens_BN, chosen_BN, ranked_BNK, depth_limit_B)

    def _proposed(self, logits_RV: Tensor, ids_V: Tensor | None, at: Nodes, sharpness: float, k: int) -> Tensor:
        """Return the proposals [R, k] of the GPU kernel."""
        row_params = self._processing.row_params(at)
        if self._processing.adjusting and sharpness != 1:
            # Sharpness must not apply to greedy rows, nor to the bias that is added below.
            logits_RV = logits_RV * torch.where(row_params.temperature_R > 0, sharpness, 1.0)[:, None]
            sharpness = 1.0
        return top_k(
            self._processing.adjusted(logits_RV, ids_V, at),
            k,
            temperature_R=row_params.temperature_R,
            seed_R=row_params.seed_R,
            position_R=row_params.position_R,
            vocab_size=self._size,
            ids_V=ids_V,
            sharpness=sharpness,
            truncation=row_params.truncation,
        )

    def _picked(self, logits_RV: Tensor, ids_V: Tensor | None, at: Nodes, sharpness: float, pick: Pick) -> Tensor:
        """Return ``pick`` of the scores of every row, on devices other than a GPU.

        Rows with default greedy parameters use their logits as they are.
        """
        if not self._processing.special.any:
            return pick(logits_RV)
        part = self._processing.special.of(at.batch_R)
        mine, nodes = part.of(logits_RV), part.nodes(at)
        size = max(_SCORES_AT_ONCE // mine.shape[1], 1) if mine.device.type == "cpu" else max(len(mine), 1)
        pieces = [slice(start, start + size) for start in range(0, len(mine), size)] or [slice(0)]
        picks = [self._special(mine[piece], ids_V, nodes[piece], sharpness, pick) for piece in pieces]
        return part.merge(picks[0] if len(picks) == 1 else torch.cat(picks), lambda: pick(logits_RV))

    def _special(self, logits_RV: Tensor, ids_V: Tensor | None, at: Nodes, sharpness: float, pick: Pick) -> Tensor:
        """Return ``pick`` of the scores of rows that are sampled, or greedy with adjusted logits."""
        processing = self._processing
        if not processing.sampled.any:
            return pick(processing.adjusted(logits_RV, ids_V, at))
        part = processing.sampled.of(at.batch_R)
        if sharpness != 1:
            logits_RV = part.merge(part.of(logits_RV) * sharpness, lambda: logits_RV)
        adjusted_RV = processing.adjusted(logits_RV, ids_V, at)
        return part.merge(pick(self._noisy(part.of(adjusted_RV), ids_V, part.nodes(at))), lambda: pick(adjusted_RV))

    def _noisy(self, adjusted_RV: Tensor, ids_V: Tensor | None, at: Nodes) -> Tensor:
        """Return log p + g [R, V], the Gumbel-max scores of sampled rows, from their adjusted logits.

        The values of greedy rows that are in the input have no meaning.
        """
        noise = self._noise_SDV[self._row_of_B[at.batch_R], at.depth_R]
        return self._processing.logp(adjusted_RV, at) + (noise if ids_V is None else noise[:, ids_V])


def _first(scores_RV: Tensor) -> Tensor:
    """Return the index of the highest score of each row."""
    return scores_RV.argmax(-1)


def _noise(
    batch_params: Sequence[SamplingParams], roots_B: Tensor, depth: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Compute the Gumbel noise of the S sampled sequences for a whole step.

    Returns:
        The row of each sequence in the noise [B] (0 for greedy sequences), and the noise [S, D, V] of the tokens after
        the nodes of each depth.
    """
    rows = [b for b, params in enumerate(batch_params) if not params.greedy]
    sampled = to_device(rows, roots_B.device)
    row_of_B = torch.zeros(len(batch_params), dtype=torch.int64, device=roots_B.device)
    row_of_B[sampled] = torch.arange(len(rows), device=roots_B.device)
    seed = to_device([batch_params[b].seed for b in rows], roots_B.device)
    position = roots_B[sampled, None] + 1 + torch.arange(depth + 1, device=roots_B.device)
    noise = gumbel(seed[:, None].expand_as(position).flatten(), position.flatten(), vocab_size)
    return row_of_B, noise.view(*position.shape, vocab_size)
