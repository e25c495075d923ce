"""The sampler of a step: proposals of drafts and choices of the target, from the tables of sampling parameters.

Coupled sampling: draft and target choose with the same noise, so that drafts do not change the emitted text. The noise
of a request is a function of its seed and of the absolute position of the token to be chosen.

Multi-round sampling (SpecInfer, arXiv 2305.09781; the method of arXiv 2508.08192) exists for comparison. Siblings are
drawn from the draft without replacement and tried in turn. The emitted text follows the target's distribution, but it
is not the text of plain decoding. Proposals, acceptance coins and residual draws use separate noise streams, indexed by
position. Greedy rows behave as under coupled sampling.

Adjustments of single tokens (allowed tokens, bias, blocked tokens, penalties) come first, then the masks of grammars,
then temperature and truncation. Target and draft use the same code, so a draft that agrees with the target agrees after
processing too.

Captured steps run this code too: no size depends on a device value, and nothing waits for the device, unless the
constructor got ``adjusting``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.noise.op import LARGE, gumbel
from specdecode_kernels.noise.reference import PROPOSAL_STREAM
from specdecode_kernels.sample import op
from specdecode_kernels.sample.reference import Truncation
from specdecode_kernels.top_k.op import top_k
from specdecode_kernels.transfer import to_device
from specdecode_kernels.verify.op import choose, multi_round
from specdecode_worker.contract import MAX_NODES
from specdecode_worker.sampling.params import (
    Features,
    SamplingParams,
    column_shapes,
    column_values,
    features_of,
    truncates,
)
from specdecode_worker.sampling.trees import Forest, Nodes, ancestors_of

if TYPE_CHECKING:
    from specdecode_worker.guided.guide import Guide

ADJUSTED_AT_ONCE = 64
"""Rows of logits adjusted at a time, which bounds the memory of the fp32 copies, counts and masks."""
_SCORES_AT_ONCE = 100_000
"""Number of scores adjusted together on a CPU, so that they stay in cache between operations."""


@lru_cache(maxsize=64)
def tables_of(batch: tuple[SamplingParams, ...], width: int, device: torch.device) -> Mapping[str, Tensor]:
    """Return the tables of a step on the device, with one row of padding behind those of ``batch``.

    ``width`` is that of `Features.adjusts`. Rows seldom change from step to step, so the last tables are kept.
    """
    features = Features(adjusts=width)
    rows = len(batch) + 1
    tables: dict[str, Tensor] = {}
    for kind, dtype in ((int, torch.int64), (float, torch.float32)):
        values = column_values(batch, rows, features, kind)
        flat = to_device([value for column in values.values() for value in column], device, dtype=dtype)
        parts = torch.split(flat, [len(column) for column in values.values()])
        shapes = column_shapes(rows, features, kind)
        tables |= {name: part.view(shapes[name]) for name, part in zip(values, parts, strict=True)}
    return tables


@dataclass(frozen=True, slots=True)
class BatchTokens:
    """Tokens of a batch on the device.

    Row ``slots_B[b]`` of ``tokens_SP`` holds prompt and answer of sequence b up to the root of its tree at index
    ``roots_B[b]``. Node j of the tree is at index root + j once it is drafted.
    """

    tokens_SP: Tensor
    slots_B: Tensor
    roots_B: Tensor


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Rows of logits: the nodes that they belong to, and how the tokens behind these are sampled.

    ``next_R`` is the position of the token that is chosen behind each node, ``truncation`` how it is cut, or
    None if no row of the step truncates. ``ancestors_R`` are bit masks of the nodes on the paths, the root included;
    None if all are roots, or none is needed. ``mask_row_R`` is the row of each in the table of grammar masks, if the
    step has one.
    """

    sequence_R: Tensor
    node_R: Tensor
    temperature_R: Tensor
    seed_R: Tensor
    next_R: Tensor
    truncation: Truncation | None
    ancestors_R: Tensor | None = None
    mask_row_R: Tensor | None = None

    def __getitem__(self, here: slice | Tensor) -> SampledRows:
        """Return a part of the rows."""
        cuts, ancestors, masks = self.truncation, self.ancestors_R, self.mask_row_R
        return SampledRows(
            self.sequence_R[here],
            self.node_R[here],
            self.temperature_R[here],
            self.seed_R[here],
            self.next_R[here],
            None if cuts is None else cuts.of(here),
            None if ancestors is None else ancestors[here],
            None if masks is None else masks[here],
        )


Blocked = Callable[[SampledRows], Tensor | None]
"""Function that returns the tokens [R, V] that grammars forbid behind rows; None for rows without masks."""


class Proposer(Protocol):
    """Part of a sampler that chooses the tokens of drafted nodes."""

    def propose(self, logits_RV: Tensor, target_ids_V: Tensor | None, at: Nodes, sharpness: float, k: int) -> Tensor:
        """Return distinct target ids [R, k] for the children of these nodes, best first.

        Siblings take the ids in order of rank. The tokens on the paths of the nodes must already be in the step's
        ``BatchTokens``. Methods that propose without logits (ngram) do not call this function.

        Args:
            logits_RV: Logits of the draft.
            target_ids_V: Target id of each draft token; None if the draft uses the target's vocabulary.
            at: Nodes of the rows.
            sharpness: Factor on the draft's logits in sampled rows, fitted for coupled sampling; ``mss`` ignores it.
            k: Number of proposals per row.
        """
        ...


@dataclass(frozen=True, slots=True)
class PassSampler:
    """`Proposer` of a draft pass whose rows are known: a row of logits belongs to the row of the same index."""

    sampler: StepSampler
    rows: SampledRows

    def propose(self, logits_RV: Tensor, target_ids_V: Tensor | None, at: Nodes, sharpness: float, k: int) -> Tensor:
        """Return target ids [R, k] for the children of the rows, best first."""
        return self.sampler.proposed(self.rows, logits_RV, target_ids_V, sharpness, k)


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of the sequences of a step, [B, V]: whether the prompt has them, how often the answer to the root."""

    prompt_BV: Tensor
    answer_BV: Tensor


def count_tokens(texts: BatchTokens, prompt_tokens_B: Tensor, history: int, vocab_size: int) -> Counts:
    """Count the tokens of each sequence in the first ``history`` positions of its text, which hold the root."""
    tokens_BL = texts.tokens_SP[texts.slots_B, :history].clamp(min=0)
    index_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    begin_B1, root_B1 = prompt_tokens_B[:, None], texts.roots_B[:, None]
    nothing_BV = torch.zeros(len(tokens_BL), vocab_size, device=tokens_BL.device)
    prompt_BV = nothing_BV.scatter_add(1, tokens_BL, (index_L < begin_B1).float()) > 0
    answer_BL = (index_L >= begin_B1) & (index_L <= root_B1)
    return Counts(prompt_BV, nothing_BV.scatter_add_(1, tokens_BL, answer_BL.float()))


@dataclass(frozen=True, slots=True)
class StepNoise:
    """Noise [S, D, V] of the S sampled sequences of a step behind nodes of every depth, drawn at once.

    ``row_B`` is the row of each sequence in it. Greedy ones have the first, which is not used.
    """

    row_B: Tensor
    roots_B: Tensor
    noise_SDV: Tensor

    @classmethod
    def draw(cls, batch: Sequence[SamplingParams], roots_B: Tensor, depth: int, vocab_size: int) -> StepNoise:
        """Draw the noise behind the nodes of depths up to ``depth``."""
        sampled = [b for b, params in enumerate(batch) if not params.greedy]
        row_of = {b: row for row, b in enumerate(sampled)}
        rows = [row_of.get(b, 0) for b in range(len(roots_B))]
        row_B, seed_B = to_device([rows, [*(params.seed for params in batch), 0]], roots_B.device)
        at_S = to_device(sampled, roots_B.device)
        next_SD = roots_B[at_S, None] + torch.arange(1, depth + 2, device=roots_B.device)
        seed_SD = seed_B[at_S, None].expand_as(next_SD)
        noise = gumbel(seed_SD.flatten(), next_SD.flatten(), vocab_size)
        return cls(row_B, roots_B, noise.view(*next_SD.shape, vocab_size))

    def of(self, rows: SampledRows) -> Tensor:
        """Return the noise [R, V] of these rows."""
        b = rows.sequence_R
        return self.noise_SDV[self.row_B[b], rows.next_R - self.roots_B[b] - 1]


class StepSampler:
    """Sampler of one step; a `Proposer`.

    With ``mss`` it stores the distributions that drafts draw from until `verified` uses them. The children of a node
    without a stored distribution are treated as deterministic.
    """

    def __init__(
        self,
        features: Features,
        tables: Mapping[str, Tensor],
        texts: BatchTokens,
        vocab_size: int,
        *,
        cuts: bool,
        greedy: bool = False,
        blocked: Blocked | None = None,
        ancestors_BN: Tensor | None = None,
        adjusting: Sequence[bool] = (),
        noise: StepNoise | None = None,
        verified_nodes: int = 1,
    ) -> None:
        """Create the sampler.

        Args:
            features: Optional parts of the step.
            tables: Tables of sampling parameters, as `column_shapes` names them, with a row of padding at the end.
            texts: Tokens of the sequences, for the rows of the tables.
            vocab_size: Size of the target's vocabulary.
            cuts: A row samples with top-k, top-p or min-p.
            greedy: No row is sampled; not for captured steps, whose rows change.
            blocked: Masks of grammars.
            ancestors_BN: Ancestors of every node, for `at`; None if nothing is counted for penalties.
            adjusting: Which sequences adjust logits, if the others may be left out; not for captured steps.
            noise: Noise of the step, if it is drawn before its rows are known.
            verified_nodes: Most verified nodes of a tree, the root included, which ``mss`` stores distributions of.
        """
        self._features, self._tables, self._texts, self._size = features, tables, texts, vocab_size
        self._cuts, self._blocked, self._ancestors_BN, self._nodes = cuts, blocked, ancestors_BN, verified_nodes
        self._noise = noise
        self._best_of_logits = greedy and not features.change_logits
        self._most_nodes = MAX_NODES + 1 if ancestors_BN is None else ancestors_BN.shape[1]
        mixed = any(adjusting) and not all(adjusting)
        self._adjusting_B = to_device(adjusting, texts.roots_B.device) if mixed else None
        self._counts = (
            count_tokens(texts, tables["prompt_tokens"], features.history, vocab_size) if features.history else None
        )
        self._logq_BNV: Tensor | None = None
        self._drawn_BN: Tensor | None = None

    def at(self, nodes: Nodes) -> SampledRows:
        """Return the rows of these nodes."""
        tables, b = self._tables, nodes.batch_R
        return SampledRows(
            b,
            nodes.node_R,
            tables["temperature"][b],
            tables["seed"][b],
            self._texts.roots_B[b] + 1 + nodes.depth_R,
            Truncation(tables["top_k"][b], tables["top_p"][b], tables["min_p"][b]) if self._cuts else None,
            None if self._ancestors_BN is None else self._ancestors_BN[b, nodes.node_R],
        )

    def propose(self, logits_RV: Tensor, target_ids_V: Tensor | None, at: Nodes, sharpness: float, k: int) -> Tensor:
        """Return target ids [R, k] for the children of these nodes, best first, as `Proposer.propose`."""
        if self._best_of_logits:
            best_RK = logits_RV.topk(k, dim=-1).indices
            return best_RK if target_ids_V is None else target_ids_V[best_RK]
        return self.proposed(self.at(at), logits_RV, target_ids_V, sharpness, k)

    def proposed(
        self, rows: SampledRows, logits_RV: Tensor, target_ids_V: Tensor | None, sharpness: float, k: int
    ) -> Tensor:
        """Return the proposals of `propose` for rows of logits."""
        if self._features.rounds:
            return self._drawn(rows, logits_RV, target_ids_V, k)
        return self._best(rows, logits_RV, target_ids_V, sharpness, k)

    def choose(self, rows: SampledRows, logits_RV: Tensor) -> Tensor:
        """Return the tokens [R] that plain decoding emits behind these rows of the target's logits."""
        if self._best_of_logits:
            return logits_RV.argmax(-1)

        def chosen(piece: SampledRows, moved_RV: Tensor) -> Tensor:
            noise_RV = None if self._noise is None else self._noise.of(piece)
            return choose(moved_RV, piece.temperature_R, piece.seed_R, piece.next_R, piece.truncation, noise_RV)

        return self._by_piece(rows, logits_RV, None, chosen)

    def verified(
        self,
        rows: SampledRows,
        tokens_R: Tensor,
        logits_RV: Tensor,
        query_start: Tensor,
        parents_BN: Tensor,
        depth: int,
    ) -> tuple[Tensor, Tensor]:
        """Return tokens of the nodes and the token behind each, such that a walk along these accepts what is accepted.

        Args:
            rows: Verified nodes.
            tokens_R: Their tokens.
            logits_RV: Logits of the target behind them.
            query_start: First row of each sequence, [B + 1].
            parents_BN: Parents of the verified nodes, -1 for roots and padding.
            depth: Greatest depth of a tree.

        Returns:
            [R] each. The target chooses one token behind every node, unless the step is sampled in several rounds: then
            the tokens of the nodes that were not accepted are -2, and -1 is chosen behind them.
        """
        if not self._features.rounds:
            return tokens_R, self.choose(rows, logits_RV)
        batch = len(query_start) - 1
        starts_B1, counts_B1 = query_start[:-1, None], (query_start[1:] - query_start[:-1])[:, None]
        node_N = torch.arange(parents_BN.shape[1], device=query_start.device)
        real_BN = node_N < counts_B1
        row_BN = torch.where(real_BN, starts_B1 + node_N, 0)
        tokens_BN = torch.where(real_BN, tokens_R[row_BN], -2)
        accepted = multi_round(
            parents_BN,
            tokens_BN,
            self._target_logp(rows, logits_RV)[row_BN],
            None if self._logq_BNV is None else self._logq_BNV[:-1],
            self._tables["seed"][:batch],
            self._texts.roots_B[:batch],
            depth,
            drawn_BN=None if self._drawn_BN is None else self._drawn_BN[:-1],
            width=self._features.rounds,
        )
        path_BD = torch.nn.functional.pad(accepted.path_BD.clamp(min=0), (1, 0))
        path_tokens_BD = tokens_BN.gather(1, path_BD[:, 1:])
        emitted_BD = torch.nn.functional.pad(path_tokens_BD, (0, 1))
        emitted_BD = emitted_BD.scatter(1, accepted.count_B[:, None], accepted.bonus_B[:, None])
        on_path_BD = torch.arange(path_BD.shape[1], device=path_BD.device) <= accepted.count_B[:, None]
        # Entries that are on no path are written behind the last token.
        place_BD = torch.where(on_path_BD & (counts_B1 > 0), starts_B1 + path_BD, len(logits_RV))
        accepted_R = _placed(path_tokens_BD, place_BD[:, 1:], len(logits_RV), -2)
        return accepted_R, _placed(emitted_BD, place_BD, len(logits_RV), -1)

    def _best(self, rows: SampledRows, logits_RV: Tensor, ids_V: Tensor | None, sharpness: float, k: int) -> Tensor:
        """Return the top k ids of the draft's logits, plus the target's noise in sampled rows."""
        if sharpness != 1 and self._features.change_logits:
            # Sharpness must not apply to greedy rows, nor to the bias that is added below.
            factor_R = torch.ones_like(rows.temperature_R).masked_fill_(rows.temperature_R > 0, sharpness)
            logits_RV, sharpness = logits_RV * factor_R[:, None], 1.0

        def best(piece: SampledRows, moved_RV: Tensor) -> Tensor:
            return top_k(
                moved_RV,
                k,
                temperature_R=piece.temperature_R,
                seed_R=piece.seed_R,
                position_R=piece.next_R,
                vocab_size=self._size,
                ids_V=ids_V,
                sharpness=sharpness,
                truncation=piece.truncation,
                noise_RV=None if self._noise is None else self._noise.of(piece),
            )

        return self._by_piece(rows, logits_RV, ids_V, best)

    def _drawn(self, rows: SampledRows, logits_RV: Tensor, ids_V: Tensor | None, k: int) -> Tensor:
        """Draw k ids of sampled rows without replacement (Gumbel top-k), and store log q for `verified`."""
        logq_RV = self._logp(rows, self._by_piece(rows, logits_RV, ids_V, lambda _, moved_RV: moved_RV))
        noise_RV = gumbel(rows.seed_R, rows.next_R, self._size, PROPOSAL_STREAM)
        drawn_RK = (logq_RV + (noise_RV if ids_V is None else noise_RV[:, ids_V])).topk(k, dim=-1).indices
        if ids_V is not None:
            drawn_RK = ids_V[drawn_RK]
            wide_RV = logq_RV.new_full((len(logq_RV), self._size), -torch.inf)
            logq_RV = wide_RV.index_copy_(1, ids_V, logq_RV)
        sampled_R = rows.temperature_R > 0
        self._store(rows, logq_RV, sampled_R)
        greedy = replace(rows, temperature_R=torch.zeros_like(rows.temperature_R), truncation=None)
        return torch.where(sampled_R[:, None], drawn_RK, self._best(greedy, logits_RV, ids_V, 1.0, k))

    def _store(self, rows: SampledRows, logq_RV: Tensor, drawn_R: Tensor) -> None:
        """Store log q behind verified nodes. ``drawn_R`` marks the rows whose proposals were drawn from it."""
        padding, nodes = len(self._tables["seed"]) - 1, self._nodes
        if self._logq_BNV is None or self._drawn_BN is None:
            self._logq_BNV = logq_RV.new_full((padding + 1, nodes, self._size), -torch.inf)
            self._drawn_BN = torch.zeros(padding + 1, nodes, dtype=torch.bool, device=logq_RV.device)
        # Shadow nodes, which are not verified, are stored in the row of padding.
        sequence_R = torch.where(rows.node_R < nodes, rows.sequence_R, padding)
        node_R = rows.node_R.clamp(max=nodes - 1)
        self._logq_BNV[sequence_R, node_R] = logq_RV
        self._drawn_BN[sequence_R, node_R] = drawn_R

    @staticmethod
    def _logp(rows: SampledRows, adjusted_RV: Tensor) -> Tensor:
        """Return log-probabilities [R, V] after all processing. The values of greedy rows have no meaning."""
        temperature_R = torch.where(rows.temperature_R > 0, rows.temperature_R, 1.0)
        cuts = rows.truncation or (rows.next_R, rows.next_R)  # not read unless a request truncates
        return op.processed(adjusted_RV, temperature_R, *cuts, truncated=rows.truncation is not None)

    def _target_logp(self, rows: SampledRows, logits_RV: Tensor) -> Tensor:
        """Return the target's log-probabilities [R, V]. In greedy rows the chosen token has all of the probability."""
        adjusted_RV = self._by_piece(rows, logits_RV, None, lambda _, moved_RV: moved_RV)
        logp_RV = self._logp(rows, adjusted_RV)
        certain_RV = torch.full_like(logp_RV, -torch.inf).scatter_(1, adjusted_RV.argmax(-1, keepdim=True), 0.0)
        return torch.where(rows.temperature_R[:, None] > 0, logp_RV, certain_RV)

    def _by_piece(
        self,
        rows: SampledRows,
        logits_RV: Tensor,
        ids_V: Tensor | None,
        sample: Callable[[SampledRows, Tensor], Tensor],
    ) -> Tensor:
        """Return the results of ``sample`` for all rows. It gets a piece of them with its adjusted logits at a time."""
        if not self._features.change_logits:
            return sample(rows, logits_RV)
        size, results = ADJUSTED_AT_ONCE, []
        if logits_RV.device.type == "cpu":
            size = min(size, max(_SCORES_AT_ONCE // self._size, 1))
        for start in range(0, max(len(logits_RV), 1), size):
            here = slice(start, start + size)
            piece = rows[here]
            results.append(sample(piece, self._adjusted(piece, logits_RV[here], ids_V)))
        return results[0] if len(results) == 1 else torch.cat(results)

    def _adjusted(self, rows: SampledRows, logits_RV: Tensor, ids_V: Tensor | None) -> Tensor:
        """Return logits [R, V] in fp32 or wider after adjustment, over the vocabulary of the target or the draft."""
        if self._adjusting_B is not None:
            here_A = torch.nonzero(self._adjusting_B[rows.sequence_R])[:, 0]
            moved_AV = self._moved_over(rows[here_A], logits_RV[here_A], ids_V)
            return logits_RV.to(moved_AV.dtype).index_copy(0, here_A, moved_AV)
        return self._moved_over(rows, logits_RV, ids_V)

    def _moved_over(self, rows: SampledRows, logits_RV: Tensor, ids_V: Tensor | None) -> Tensor:
        if ids_V is None:
            return self._moved(rows, logits_RV)
        # Allowed tokens, bias, blocked tokens and counts use the token ids of the target.
        wide_RV = logits_RV.new_full((len(logits_RV), self._size), -math.inf)
        wide_RV[:, ids_V] = logits_RV
        return self._moved(rows, wide_RV)[:, ids_V]

    def _moved(self, rows: SampledRows, logits_RV: Tensor) -> Tensor:
        tables, b, counts = self._tables, rows.sequence_R, self._counts
        if self._features.adjusts:
            allowed_RK, blocked_RK = tables["allowed_ids"][b], tables["blocked_ids"][b]
            early_R1 = (rows.next_R - tables["prompt_tokens"][b] < tables["min_tokens"][b])[:, None]
            moved_RV = op.adjusted(
                logits_RV,
                allowed=(allowed_RK.clamp(min=0), allowed_RK[:, :1] >= 0),
                bias=(tables["bias_ids"][b], tables["bias"][b]),
                blocked=(blocked_RK, early_R1.expand_as(blocked_RK)),
                prompt_RV=None if counts is None else counts.prompt_BV[b],
                counts_RV=None if counts is None else self._counted(counts, rows),
                repetition_R=None if counts is None else tables["repetition_penalty"][b],
                frequency_R=None if counts is None else tables["frequency_penalty"][b],
                presence_R=None if counts is None else tables["presence_penalty"][b],
            )
        else:
            moved_RV = op.adjusted(logits_RV)
        blocked_RV = None if self._blocked is None else self._blocked(rows)
        return moved_RV if blocked_RV is None else moved_RV.masked_fill_(blocked_RV, -math.inf)

    def _counted(self, counts: Counts, rows: SampledRows) -> Tensor:
        """Return the occurrences [R, V] of each token in the answer, those on the path of a node included."""
        texts, b = self._texts, rows.sequence_R
        answer_RV = counts.answer_BV[b]
        if rows.ancestors_R is None:
            return answer_RV
        node_N = torch.arange(1, self._most_nodes, device=b.device)  # the root is counted already
        on_path_RN = (rows.ancestors_R[:, None] >> node_N) & 1
        index_RN = texts.roots_B[b, None] + node_N
        tokens_RN = texts.tokens_SP[texts.slots_B[b, None], index_RN] * on_path_RN
        return answer_RV.scatter_add_(1, tokens_RN, on_path_RN.to(answer_RV.dtype))


def sampler_of(
    batch: Sequence[SamplingParams],
    texts: BatchTokens,
    forest: Forest,
    vocab_size: int,
    *,
    longest: int,
    coupled: bool = True,
    blocked: Blocked | None = None,
) -> StepSampler:
    """Return the sampler of a step that is not captured, from the parameters of its rows.

    Args:
        batch: Parameters of the rows.
        texts: Their tokens, with a row of padding at the end.
        forest: Their trees.
        vocab_size: Size of the target's vocabulary.
        longest: Number of positions that hold every root.
        coupled: The sampler is ``coupled``, else ``mss``.
        blocked: As for `StepSampler`.
    """
    has_nodes = any(len(tree.parents) > 1 for tree in forest.trees)
    device, siblings = texts.roots_B.device, 1 + max(max(tree.ranks) for tree in forest.trees)
    features = features_of(batch, lambda: longest, siblings, coupled=coupled)
    skips = not dispatch.on_gpu(texts.roots_B)  # kernels take all rows alike
    greedy, noise = skips and all(params.greedy for params in batch), None
    if skips and not greedy and coupled and vocab_size < LARGE:
        noise = StepNoise.draw(batch, texts.roots_B, max(forest.depth, len(forest.levels) - 1), vocab_size)
    return StepSampler(
        features,
        tables_of(tuple(batch), features.adjusts, device),
        texts,
        vocab_size,
        cuts=truncates(batch),
        greedy=greedy,
        blocked=blocked,
        ancestors_BN=ancestors_of(forest.trees, device) if features.history and has_nodes else None,
        adjusting=[params.adjusts for params in batch] if skips else (),
        noise=noise,
        verified_nodes=forest.parents_BN.shape[1],
    )


def _placed(values_BD: Tensor, place_BD: Tensor, size: int, padding: int) -> Tensor:
    """Return ``values_BD`` at their places of a row of ``size`` values; the place ``size`` absorbs the others."""
    row = torch.full((size + 1,), padding, dtype=torch.int64, device=values_BD.device)
    row[place_BD.flatten()] = values_BD.flatten()
    return row[:size]


# Masks of allowed tokens at the nodes of draft trees, for requests whose answers follow a grammar.
#
# The mask of a node follows from the tokens on its path, so it is computed on the host once these are drafted. Drafts
# propose under the same masks under which the target chooses. A node whose path the grammar does not allow has no mask:
# the target's masked choice before it never equals its token, so what follows it is never emitted.


@dataclass(frozen=True, slots=True)
class HostMasks:
    """Grammar masks of a step on the host. ``rows`` is the mask of every verified node, one tree after the other.

    ``table_NW`` has the masks, of which the first one allows all tokens.
    """

    rows: list[int]
    table_NW: NDArray[np.uint32]


class TokenMasks:
    """Masks of one step. ``guides`` has one entry per sequence of the batch, None for those without a grammar."""

    def __init__(self, guides: Sequence[Guide | None], texts: BatchTokens, forest: Forest, vocab_size: int) -> None:
        self._guides, self._texts, self._forest = guides, texts, forest
        self._vocab_size = vocab_size
        self._words = (vocab_size + 31) // 32
        self._all = np.full(self._words, 0xFFFFFFFF, dtype=np.uint32)
        self._masks: dict[tuple[int, int], NDArray[np.uint32]] = {}
        self._tokens: dict[int, list[int]] = {}
        self._table_NW: Tensor | None = None

    def load_tokens(self) -> None:
        """Read the drafted tokens of guided sequences. Call it after drafting, before the target's pass is queued.

        On an accelerator this waits for the draft's passes. The masks are then computed while the target runs.
        """
        self._tokens = self._read([b for b, guide in enumerate(self._guides) if guide is not None])

    def prepare(self) -> Tensor:
        """Compute the masks of all verified nodes, copy them to the device, and return the row of each there, [R]."""
        masks, device = self.verified(), self._texts.roots_B.device
        self._table_NW = torch.from_numpy(masks.table_NW.view(np.int32)).to(device, non_blocking=True)
        return to_device(masks.rows, device)

    def verified(self) -> HostMasks:
        """Compute the masks of all verified nodes. Call `load_tokens` before."""
        return self._on_host({b: self._forest.trees[b].verified for b in self._tokens})

    def of_roots(self) -> HostMasks:
        """Compute the masks of the roots, which depend on no drafted token. The other nodes get no masks."""
        return self._on_host({b: 1 for b, guide in enumerate(self._guides) if guide is not None})

    def _on_host(self, counts: Mapping[int, int]) -> HostMasks:
        """Compute the masks of the first ``counts[b]`` nodes of sequences."""
        rows: list[int] = []
        table = [self._all]
        for b, tree in enumerate(self._forest.trees):
            count = counts.get(b, 0)
            rows += [*range(len(table), len(table) + count), *[0] * (tree.verified - count)]
            table += [self._mask(b, node, self._tokens.get(b, ())) for node in range(count)]
        return HostMasks(rows, np.stack(table))

    def blocked(self, rows: SampledRows) -> Tensor:
        """Return the tokens [R, V] that these nodes must not choose, as bool; none for sequences without a grammar."""
        if self._table_NW is not None and rows.mask_row_R is not None:
            bits_RW = self._table_NW[rows.mask_row_R]
        else:
            bits_RW = self._drafting(rows.sequence_R.tolist(), rows.node_R.tolist()).to(rows.node_R.device)
        return _unpacked(~bits_RW)[:, : self._vocab_size]

    def _drafting(self, batch: Sequence[int], nodes: Sequence[int]) -> Tensor:
        """Return the masks [R, W] of nodes whose children are being drafted."""
        tokens = self._read([b for b in sorted(set(batch)) if self._guides[b] is not None])
        masks = np.empty((len(batch), self._words), dtype=np.uint32)
        for row, (b, node) in enumerate(zip(batch, nodes, strict=True)):
            masks[row] = self._mask(b, node, tokens[b]) if b in tokens else self._all
        return torch.from_numpy(masks.view(np.int32))

    def _mask(self, b: int, node: int, tokens: Sequence[int]) -> NDArray[np.uint32]:
        """Return the mask of one node; ``tokens`` are those of the sequence's tree from its first node on."""
        guide, key = self._guides[b], (b, node)
        assert guide is not None
        if key not in self._masks:
            mask = guide.mask([tokens[step - 1] for step in self._forest.trees[b].paths[node]])
            self._masks[key] = self._all if mask is None else mask
        return self._masks[key]

    def _read(self, batch: Sequence[int]) -> dict[int, list[int]]:
        """Read the tokens of the trees of these sequences from the device at once, without those of the roots."""
        counts = [len(self._forest.trees[b].parents) - 1 for b in batch]
        most = max(counts, default=0)
        if not most:
            return {b: [] for b in batch}
        texts, device = self._texts, self._texts.roots_B.device
        batch_G = to_device(list(batch), device)
        index_GM = texts.roots_B[batch_G, None] + torch.arange(1, most + 1, device=device)
        # A smaller tree at the end of the table of tokens has nothing behind its last node.
        index_GM.clamp_(max=texts.tokens_SP.shape[1] - 1)
        tokens: list[list[int]] = texts.tokens_SP[texts.slots_B[batch_G, None], index_GM].tolist()
        return {b: row[:count] for b, row, count in zip(batch, tokens, counts, strict=True)}


def _unpacked(bits_RW: Tensor) -> Tensor:
    """Return the bits [R, 32 W] of int32 words [R, W] as bool, the lowest bit first."""
    if bits_RW.device.type == "cpu":
        octets = bits_RW.numpy().view(np.uint8)
        return torch.from_numpy(np.unpackbits(octets, axis=1, bitorder="little").view(np.bool_))
    return unpacked_on_device(bits_RW)


def unpacked_on_device(bits_RW: Tensor) -> Tensor:
    """Return the same as `_unpacked` by operations that a graph can capture."""
    shifts_32 = torch.arange(32, dtype=torch.int32, device=bits_RW.device)
    return ((bits_RW[:, :, None] >> shifts_32) & 1).bool().flatten(1)
