"""Keys of CUDA graphs: the size buckets and the optional parts of a decode step.

Steps with the same key share a graph. Tree topology, sampling parameters and lengths are inputs of the graph and no
part of the key.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specdecode_worker.contract import MAX_NODES, MAX_RANKS
from specdecode_worker.speculation.trees import Tree

NODES = MAX_NODES + 1
"""Number of columns of the tree tables: nodes of the widest tree, its root included."""
TOKENS_PER_ROW = (*range(1, 10), 12, 16, 24, 32, 48, NODES)
ROWS_PER_LEVEL = (1, 2, 4, 8, 16, 32, NODES)
SIBLINGS = (1, 2, 4, MAX_RANKS)


OUTSIDE_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32, MAX_NODES)
"""Depths of trees whose tokens are proposed before the graph runs. Forced tokens of a grammar can be deep chains."""


@dataclass(frozen=True, slots=True, order=True)
class Features:
    """Optional parts of a step. Graphs with any of them are captured when they are needed, so others never pay.

    ``adjusts`` is the width of the tables of biased and blocked tokens, 0 if no request adjusts logits. ``history`` is
    the number of text positions whose tokens are counted for penalties, 0 without penalties. ``masks`` is set if a
    request follows a grammar, ``logprobs`` if one wants log-probabilities. ``rounds`` is the greatest number of
    siblings in a tree if a request is sampled in several rounds, 0 if the target chooses one token behind each node.
    """

    adjusts: int = 0
    history: int = 0
    masks: bool = False
    logprobs: bool = False
    rounds: int = 0

    @property
    def change_logits(self) -> bool:
        """True if logits are adjusted or masked before a token is chosen."""
        return self.adjusts > 0 or self.masks


NO_FEATURES = Features()


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """Size buckets and features of a decode step.

    Each of ``rows`` sequences verifies at most ``tokens_per_row`` tokens and its draft catches up with at most as many.
    The draft runs ``passes`` passes; those after the first run over at most ``width`` nodes of each sequence. ``cuts``
    is set if some request samples with top-k, top-p or min-p. ``draft`` is the name of the draft whose passes these
    are; it is empty without passes, too. ``outside`` is the greatest depth of trees whose tokens are proposed before
    the graph runs; the graph then has no passes. ``only_drafts`` is set if the graph ends behind the draft passes,
    because the host must read the drafted tokens before they are verified.
    """

    rows: int
    tokens_per_row: int
    passes: int = 0
    width: int = 0
    cuts: bool = False
    draft: str = ""
    outside: int = 0
    features: Features = NO_FEATURES
    only_drafts: bool = False

    @property
    def depth(self) -> int:
        """Greatest depth of the trees."""
        return self.passes or self.outside

    @property
    def tokens(self) -> int:
        """Number of packed tokens of the step, padding included."""
        return self.rows * self.tokens_per_row

    def has_passes_of(self, draft: str) -> bool:
        """Return whether the step has passes of the draft of this name."""
        return self.passes > 0 and self.draft == draft

    @property
    def level_rows(self) -> int:
        """Number of rows of each draft pass after the first, padding included."""
        return self.rows * self.width


def key_of(
    rows: int,
    trees: Sequence[Tree],
    longest_catch_up: int,
    *,
    cuts: bool,
    draft: str = "",
    features: Features = NO_FEATURES,
) -> GraphKey | None:
    """Return the key of a step of ``trees``, drafted by ``draft``, in a bucket of ``rows``.

    Return None if the longest catch-up of a draft exceeds the largest bucket of tokens per row. A tree of several rows
    is needed once.
    """
    tokens = at_least(max(longest_catch_up, *(tree.verified for tree in trees)), TOKENS_PER_ROW)
    passes = max(tree.drafted_depth for tree in trees)
    if tokens is None:
        return None
    widest = max((len(level) for tree in trees for level in tree.expanded[1:]), default=0)
    width = at_least(widest, ROWS_PER_LEVEL) if widest else 0
    assert width is not None, "no tree has more nodes"
    return GraphKey(rows, tokens, passes, width, cuts, draft if passes else "", features=features)


def key_outside(rows: int, trees: Sequence[Tree], *, cuts: bool, features: Features = NO_FEATURES) -> GraphKey:
    """Return the key of a step that only verifies ``trees``; their tokens are proposed before it."""
    tokens = at_least(max(tree.verified for tree in trees), TOKENS_PER_ROW)
    deepest = max(tree.depth for tree in trees)
    depth = at_least(deepest, OUTSIDE_DEPTHS) if deepest else 0
    assert tokens is not None, "no tree has more nodes"
    assert depth is not None, "no tree is deeper"
    return GraphKey(rows, tokens, cuts=cuts, outside=depth, features=features)


def keys_of_shapes(
    rows: Sequence[int], shapes: Iterable[tuple[Tree, str]], max_tokens: int, *, cuts: Sequence[bool]
) -> list[GraphKey]:
    """Return the keys of steps in which all rows have one shape, the most important first.

    Plain steps come first, and those with top-k, top-p or min-p last.

    Args:
        rows: Buckets of rows.
        shapes: Trees and the drafts that propose their tokens.
        max_tokens: Maximum number of packed tokens of one graph.
        cuts: Whether steps sample with top-k, top-p or min-p.
    """
    keys = {
        key_of(bucket, [tree], tree.verified, cuts=cut, draft=name)
        for bucket in rows
        for tree, name in shapes
        for cut in cuts
    }
    fitting = [key for key in keys if key is not None and key.tokens <= max_tokens]
    return sorted(fitting, key=lambda key: (key.cuts, key.passes > 0, key))


def at_least(count: int, buckets: Sequence[int]) -> int | None:
    """Return the smallest of the ascending ``buckets`` that holds ``count``, or None if none does."""
    index = bisect_left(buckets, count)
    return buckets[index] if index < len(buckets) else None


def row_buckets(max_num_seqs: int, wanted: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the numbers of rows to capture graphs for, ascending and at most ``max_num_seqs``.

    The default is vLLM's: 1, 2, 4, every multiple of 8, and ``max_num_seqs``. ``wanted`` replaces the default.
    """
    usual = (1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs)
    return tuple(sorted({rows for rows in wanted or usual if 0 < rows <= max_num_seqs}))
