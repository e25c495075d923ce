"""Integer tables of the trees of a step: parents, depths, and the nodes of each draft pass.

The tables are computed once for each combination of trees and graph key. Padding among the packed tokens and the nodes
of a level belongs to row ``key.rows``, the padding row behind the last row.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from specdecode_worker.engine.graphs.graph_key import NODES, GraphKey
from specdecode_worker.engine.graphs.static_inputs import Layout, Shapes
from specdecode_worker.speculation.trees import Tree

PADDING_TREE = Tree((-1,), 0)
"""Tree of a padding row; none of its nodes is verified."""
OF_NODES = ("verified_parent", "parent", "rank", "depth")


def shapes(key: GraphKey) -> Shapes:
    """Return the shapes of the tree tables of ``key``, by name.

    - ``query_start`` [B + 1], ``root_row`` [B]: packed tokens of each row, and the packed index of its root.
    - ``token_*`` [T]: sequence, node, depth and ancestors of each packed token.
    - ``node_*`` [B, N]: ``OF_NODES`` of each node; the depth of padding and of given tokens is -1.
    - ``first_sequence`` [B]: row index where the row drafts, else ``key.rows``.
    - ``level_*`` [D - 1, R]: sequence, node and ancestors of the nodes of each draft pass after the first, and the row
      of the previous pass that holds the parent's hidden state (``source``). ``level_start`` is [D - 1, B + 1].
    """
    rows, tokens = key.rows, key.tokens
    table_shapes: dict[str, tuple[int, ...]] = {
        "query_start": (rows + 1,),
        "root_row": (rows,),
        **{f"token_{name}": (tokens,) for name in ("sequence", "node", "depth", "ancestors")},
        **{f"node_{name}": (rows, NODES) for name in OF_NODES},
    }
    if key.passes:
        table_shapes["first_sequence"] = (rows,)
    if key.passes > 1:
        levels = key.passes - 1
        table_shapes["level_start"] = (levels, rows + 1)
        table_shapes |= {
            f"level_{name}": (levels, key.level_rows) for name in ("sequence", "node", "ancestors", "source")
        }
    return table_shapes


@lru_cache(maxsize=256)
def topology(trees: tuple[Tree, ...], key: GraphKey) -> Tensor:
    """Return the tables of ``shapes`` as one flat int64 tensor on the host, padded to the rows of ``key``."""
    padded = trees + (PADDING_TREE,) * (key.rows - len(trees))
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
    drafted = tree is not PADDING_TREE and not tree.given
    return (
        _filled(verified, NODES, -1),
        _filled([*tree.parents], NODES, -1),
        _filled([*tree.ranks], NODES, 0),
        _filled([*tree.depths] if drafted else [], NODES, -1),
    )


def _add_levels(values: dict[str, list[int]], trees: tuple[Tree, ...], key: GraphKey) -> None:
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
