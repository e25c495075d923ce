"""Exact acceptance of a draft on recorded text at every root, depth and rank, without an engine.

The text does not depend on the draft. One teacher-forced pass per depth therefore gives the rank of the target's token
in the draft's ordering at every slot where a draft could have started. Walking the ranks gives the tokens that any
chain or tree would have had accepted. Used for validation during training and by ``eval``.

Shape suffixes: B texts, A answer slots, I roots of one text, K depths, X ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdecode_worker.contract import TreeShape
from specdecode_worker.models.drafts import Draft
from specdecode_worker.training.conversations import Conversation, cut
from specdecode_worker.training.unroll import batch_for, logits_of, unrolled, vocabulary_of

RANKS = 8  # ranks 0-7 are distinguished; the value RANKS means a miss
_ROWS = 1024
"""Rows of logits that are in memory at once."""
_TEXTS, _SLOTS = 8, 16384
"""Most texts, and slots with padding, of a group that is evaluated together."""


@torch.inference_mode()
def target_token_ranks(
    head: Draft, conversations: Sequence[Conversation], output_VE: Tensor, depth: int
) -> list[Tensor]:
    """Return the rank of the target's token by root and depth, [answer slots, depth], for each greedy conversation.

    Entry [i, k] is the rank of the token after slot i + k in a draft of depth k from a root at slot i. Beyond the end
    of the text every entry is a miss.
    """
    batch = batch_for(head, conversations, output_VE.dtype)
    final_RE = batch.final_BAE.flatten(0, 1)
    wanted_R = torch.cat([(rows_RE @ output_VE.T).argmax(dim=-1) for rows_RE in torch.split(final_RE, _ROWS)])
    vocabulary = vocabulary_of(head, len(output_VE))
    by_slot = [
        _ranks(head, state_BAE.flatten(0, 1), k, vocabulary, wanted_R).view(state_BAE.shape[:2])
        for k, (state_BAE, _) in enumerate(unrolled(head, batch, depth))
    ]
    counts = batch.valid_BA.sum(dim=1).tolist()
    return [by_root([at[row, :count] for at in by_slot]) for row, count in enumerate(counts)]


def groups_of(conversations: Sequence[Conversation]) -> Iterator[list[Conversation]]:
    """Yield conversations in the order of their lengths, in groups that are evaluated together."""

    def length(conversation: Conversation) -> int:
        return len(conversation.tokens_N)

    return cut(sorted(conversations, key=length), length, slots=_SLOTS, most=_TEXTS)


def _ranks(head: Draft, state_RE: Tensor, depth: int, vocabulary: Tensor, wanted_R: Tensor) -> Tensor:
    """Return the position of the target's token among the draft's best, or ``RANKS`` if it is not among them, [R]."""
    ranks = []
    for rows_RE, wanted in zip(torch.split(state_RE, _ROWS), torch.split(wanted_R, _ROWS), strict=True):
        best_RX = vocabulary[logits_of(head, rows_RE, depth).topk(RANKS, dim=-1).indices]
        ranks.append(ranks_of(wanted, best_RX).cpu())
    return torch.cat(ranks)


def ranks_of(wanted_R: Tensor, best_RX: Tensor) -> Tensor:
    """Return the position of each wanted token among the best ones, or ``RANKS`` if it is not among them, [R]."""
    hit_RX = best_RX == wanted_R[:, None]
    return torch.where(hit_RX.any(dim=-1), hit_RX.int().argmax(dim=-1), RANKS)


def by_root(by_slot: Sequence[Tensor]) -> Tensor:
    """Return ranks by root, [I, K], from ranks by slot, K of them: depth k of root i was computed at slot i + k.

    Beyond the end of the text every entry is a miss.
    """
    missing = torch.full_like(by_slot[0], RANKS)
    return torch.stack([torch.cat((at[k:], missing[:k]))[: len(missing)] for k, at in enumerate(by_slot)], dim=1)


def accepted(ranks_K: Sequence[int], shape: TreeShape) -> int:
    """Return the number of accepted drafted tokens of a tree of ``shape`` if the target's tokens have these ranks."""
    node, count = 0, 0
    for rank in ranks_K:
        children = list(shape.children(node))
        if rank >= len(children):
            break
        node, count = children[rank], count + 1
    return count


@dataclass(slots=True)
class StepCounts:
    """Counts of steps and tokens over conversations, for one draft shape.

    ``reached[k]`` is the number of steps that drafted at depth k after accepted parents; ``hits[k]`` of them were
    accepted.
    """

    steps: int = 0
    tokens: int = 0
    reached: list[int] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)

    @classmethod
    def total(cls, parts: Collection[StepCounts]) -> StepCounts:
        """Return the sums of counts for one draft shape."""
        reached, hits = (
            [sum(column) for column in zip(*(getattr(part, name) for part in parts), strict=True)]
            for name in ("reached", "hits")
        )
        return cls(sum(part.steps for part in parts), sum(part.tokens for part in parts), reached, hits)

    def walk(self, ranks_IK: Tensor, shape: TreeShape) -> None:
        """Add the decoding steps that an engine would take through one recorded answer."""
        depth = ranks_IK.shape[1]
        self.reached = self.reached or [0] * depth
        self.hits = self.hits or [0] * depth
        rows = ranks_IK.tolist()
        at = 0
        while at < len(rows):
            count = accepted(rows[at], shape)
            for k in range(min(count + 1, depth, len(rows) - at)):
                self.reached[k] += 1
                self.hits[k] += k < count
            self.steps += 1
            self.tokens += count + 1
            at += count + 1

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens per decoding step."""
        return self.tokens / max(self.steps, 1)

    @property
    def acceptance(self) -> list[float]:
        """Acceptance rate by depth, among drafts whose parents were accepted."""
        return [hit / max(n, 1) for hit, n in zip(self.hits, self.reached, strict=True)]


def greedy_step_counts(
    head: Draft, conversations: Sequence[Conversation], output_VE: Tensor, depth: int
) -> dict[str, StepCounts]:
    """Return by domain the counts of the steps that chains of ``depth`` tokens take through greedy conversations."""
    by_domain: dict[str, StepCounts] = defaultdict(StepCounts)
    for group in groups_of(conversations):
        for conversation, ranks_IK in zip(group, target_token_ranks(head, group, output_VE, depth), strict=True):
            by_domain[conversation.domain].walk(ranks_IK, TreeShape.chain(depth))
    return dict(sorted(by_domain.items()))
