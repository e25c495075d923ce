"""The trees of a step as tables: who is whose parent, which node runs in which draft pass. Made once per combination.

Packed tokens and rows of levels that are padding belong to row ``rows``, behind the last: it is nobody's.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from specdecode_worker.engine.graphs.graph_key import NODES, Key
from specdecode_worker.engine.graphs.static_inputs import Layout, Shapes
from specdecode_worker.speculation.trees import Tree

NOBODY = Tree((-1,), 0)
"""In place of a tree where a row is padding: nothing of it is verified."""
OF_NODES = ("verified_parent", "parent", "rank", "depth")


def shapes(key: Key) -> Shapes:
    """Of packed tokens [T]: sequence, node, depth, ancestors. Of nodes [B, N]: ``OF_NODES``; depths of padding are -1.
    Of draft passes behind the first [D - 1, R]: sequence, node, ancestors, and the row of the pass before that holds
    the parent's state; ``first_sequence`` [B] is who drafts at all."""
    rows, tokens = key.rows, key.tokens
    found: dict[str, tuple[int, ...]] = {
        "query_start": (rows + 1,),
        "root_row": (rows,),
        **{f"token_{name}": (tokens,) for name in ("sequence", "node", "depth", "ancestors")},
        **{f"node_{name}": (rows, NODES) for name in OF_NODES},
    }
    if key.passes:
        found["first_sequence"] = (rows,)
    if key.passes > 1:
        levels = key.passes - 1
        found["level_start"] = (levels, rows + 1)
        found |= {f"level_{name}": (levels, key.level_rows) for name in ("sequence", "node", "ancestors", "source")}
    return found


@lru_cache(maxsize=256)
def topology(trees: tuple[Tree, ...], key: Key) -> Tensor:
    """[...] int64 on the host: the tables of ``shapes``, flat, of these rows and padding behind them."""
    padded = trees + (NOBODY,) * (key.rows - len(trees))
    counts = [tree.verified for tree in padded]
    starts = list(accumulate(counts, initial=0))
    values: dict[str, list[int]] = {
        "query_start": starts,
        "root_row": [start if count else 0 for start, count in zip(starts, counts, strict=False)],
        "token_sequence": _filled([b for b, count in enumerate(counts) for _ in range(count)], key.tokens, key.rows),
        "token_node": _filled([node for count in counts for node in range(count)], key.tokens, 0),
        "token_depth": _filled([d for tree in padded for d in tree.depths[: tree.verified]], key.tokens, 0),
        "token_ancestors": _filled([a for tree in padded for a in tree.ancestors[: tree.verified]], key.tokens, 1),
    }
    for index, name in enumerate(OF_NODES):
        values[f"node_{name}"] = [value for tree in padded for value in _of_nodes(tree)[index]]
    if key.passes:
        values["first_sequence"] = [b if tree.drafted_depth else key.rows for b, tree in enumerate(padded)]
    if key.passes > 1:
        _add_levels(values, padded, key)
    return Layout(shapes(key)).flat(values, torch.int64)


@lru_cache(maxsize=1024)
def _of_nodes(tree: Tree) -> tuple[list[int], ...]:
    verified = [*tree.parents[: tree.verified]]
    drafted = tree is not NOBODY
    return (
        _filled(verified, NODES, -1),
        _filled([*tree.parents], NODES, -1),
        _filled([*tree.ranks], NODES, 0),
        _filled([*tree.depths] if drafted else [], NODES, -1),
    )


def _add_levels(values: dict[str, list[int]], trees: tuple[Tree, ...], key: Key) -> None:
    values |= {f"level_{name}": [] for name in ("start", "sequence", "node", "ancestors", "source")}
    before = {(b, 0): b for b in range(len(trees))}
    for depth in range(1, key.passes):
        counts = [len(tree.expanded[depth]) if depth < tree.drafted_depth else 0 for tree in trees]
        rows = [(b, node) for b, tree in enumerate(trees) if counts[b] for node in tree.expanded[depth]]
        values["level_start"] += list(accumulate(counts, initial=0))
        values["level_sequence"] += _filled([b for b, _ in rows], key.level_rows, key.rows)
        values["level_node"] += _filled([node for _, node in rows], key.level_rows, 0)
        values["level_ancestors"] += _filled([trees[b].ancestors[node] for b, node in rows], key.level_rows, 1)
        values["level_source"] += _filled([before[b, trees[b].parents[n]] for b, n in rows], key.level_rows, 0)
        before = {row: index for index, row in enumerate(rows)}


def _filled(values: list[int], size: int, padding: int) -> list[int]:
    return values + [padding] * (size - len(values))
