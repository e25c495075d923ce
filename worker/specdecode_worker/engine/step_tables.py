"""Inputs of captured steps: graph keys, and tables of trees, rows and sampling parameters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdecode_worker.contract import MAX_NODES, MAX_RANKS
from specdecode_worker.core.request import Request
from specdecode_worker.drafts.base import DEFAULT_DRAFT
from specdecode_worker.sampling.params import (
    NO_FEATURES,
    Features,
    SamplingParams,
    TableShapes,
    column_shapes,
    column_values,
)
from specdecode_worker.sampling.sampler import HostMasks
from specdecode_worker.sampling.trees import Tree, all_nodes

# Keys of CUDA graphs: the size buckets and the optional parts of a decode step.
#
# Steps with the same key share a graph. Tree topology, sampling parameters and lengths are inputs of the graph and no
# part of the key.

MOST_GRAPHS = 128
"""Upper bound of the CUDA graphs that a worker holds."""


NODES = MAX_NODES + 1
"""Number of columns of the tree tables: nodes of the widest tree, its root included."""
TOKENS_PER_ROW = (*range(1, 10), 12, 16, 24, 32, 48, NODES)
SLOTS_PER_ROW = (*TOKENS_PER_ROW, 2 * NODES)
ROWS_PER_LEVEL = (1, 2, 4, 8, 16, 32, NODES)
SIBLINGS = (1, 2, 4, MAX_RANKS)


OUTSIDE_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32, MAX_NODES)
"""Depths of trees whose tokens are proposed before the graph runs. Forced tokens of a grammar can be deep chains."""


class GraphDrafts(NamedTuple):
    """Drafts whose passes a graph has: their names, and whether one has mask slots behind its roots, or a block."""

    names: tuple[str, ...] = (DEFAULT_DRAFT,)
    masks: bool = False
    block: bool = False


OF_DEFAULT = GraphDrafts()
"""Passes of the default draft, one for each level."""


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """Size buckets and features of a decode step.

    Each of ``rows`` sequences verifies at most ``tokens_per_row`` tokens and its draft catches up with at most as many.
    The draft runs ``passes`` passes; those after the first run over at most ``width`` nodes of each sequence. ``cuts``
    is set if some request samples with top-k, top-p or min-p. ``drafts`` are the names of the drafts whose passes these
    are; each of them runs as many. ``outside`` is the greatest depth of trees whose tokens are proposed before the
    graph runs; the graph then has no passes. ``only_drafts`` is set if the graph ends behind the draft passes, because
    the host must read the drafted tokens before they are verified. ``block`` is set if a draft runs a block.
    """

    rows: int
    tokens_per_row: int
    passes: int = 0
    width: int = 0
    cuts: bool = False
    drafts: tuple[str, ...] = ()
    outside: int = 0
    features: Features = NO_FEATURES
    only_drafts: bool = False
    catch_up_per_row: int = 0
    block: bool = False

    @property
    def depth(self) -> int:
        """Greatest depth of the trees."""
        return self.passes or self.outside

    @property
    def is_plain(self) -> bool:
        """True for plain steps without features."""
        return self.tokens_per_row == 1 and not self.depth and self.features == NO_FEATURES

    @property
    def tokens(self) -> int:
        """Number of packed tokens of the step, padding included."""
        return self.rows * self.tokens_per_row

    @property
    def catch_up_slots(self) -> int:
        """Number of packed slots of the first draft pass, padding included."""
        return self.rows * (self.catch_up_per_row or self.tokens_per_row)

    @property
    def block_slots(self) -> int:
        """Number of packed slots of a pass over blocks, padding included; 0 if no draft has one."""
        return self.rows * (self.passes + 1) if self.block else 0

    @property
    def most_tokens(self) -> int:
        """Number of packed tokens of its largest pass, padding included."""
        return max(self.tokens, self.catch_up_slots, self.block_slots)

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
    drafts: GraphDrafts = OF_DEFAULT,
    features: Features = NO_FEATURES,
) -> GraphKey | None:
    """Return the key of a step of ``trees``, drafted by ``drafts``, in a bucket of ``rows``.

    Return None if the longest catch-up of a draft exceeds the largest bucket of tokens per row. A tree of several rows
    is needed once.
    """
    verified, passes = max(tree.verified for tree in trees), max(tree.drafted_depth for tree in trees)
    longest, slots = max(longest_catch_up, verified), 0
    if drafts.masks and passes:
        slots, longest = at_least(longest + passes - 1, SLOTS_PER_ROW) or 0, verified
        if not slots:
            return None
    tokens = at_least(longest, TOKENS_PER_ROW)
    if tokens is None:
        return None
    widest = max((len(level) for tree in trees for level in tree.expanded[1:]), default=0)
    width = at_least(widest, ROWS_PER_LEVEL) if widest else 0
    assert width is not None, "no tree has more nodes"
    names, block = (drafts.names, drafts.block) if passes else ((), False)
    return GraphKey(rows, tokens, passes, width, cuts, names, features=features, catch_up_per_row=slots, block=block)


def key_outside(rows: int, trees: Sequence[Tree], *, cuts: bool, features: Features = NO_FEATURES) -> GraphKey:
    """Return the key of a step that only verifies ``trees``; their tokens are proposed before it."""
    tokens = at_least(max(tree.verified for tree in trees), TOKENS_PER_ROW)
    deepest = max(tree.depth for tree in trees)
    depth = at_least(deepest, OUTSIDE_DEPTHS) if deepest else 0
    assert tokens is not None, "no tree has more nodes"
    assert depth is not None, "no tree is deeper"
    return GraphKey(rows, tokens, cuts=cuts, outside=depth, features=features)


def keys_of_shapes(
    rows: Sequence[int], shapes: Iterable[tuple[Tree, GraphDrafts]], max_tokens: int, *, cuts: Sequence[bool]
) -> list[GraphKey]:
    """Return the keys of steps in which all rows have one shape, the most important first.

    Plain steps come first, and those with top-k, top-p or min-p last.

    Args:
        rows: Buckets of rows.
        shapes: Trees, and the drafts that propose their tokens.
        max_tokens: Maximum number of packed tokens of one graph.
        cuts: Whether steps sample with top-k, top-p or min-p.
    """
    keys = {
        key_of(bucket, [tree], tree.verified, cuts=cut, drafts=drafts)
        for bucket in rows
        for tree, drafts in shapes
        for cut in cuts
    }
    fitting = [key for key in keys if key is not None and key.most_tokens <= max_tokens]
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


# Static input tensors of a graph, split into named tables, which the host writes before each replay.
#
# The host writes to pinned memory, from which the copy to the device is asynchronous. Two pinned buffers alternate, so
# that the host can write the next step while the previous one is still being copied.


class Layout:
    """Layout of named tables, concatenated in one flat tensor. ``size`` is the total number of elements."""

    def __init__(self, shapes: TableShapes) -> None:
        self.shapes = dict(shapes)
        self.size = sum(prod(shape) for shape in self.shapes.values())

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return a view of ``flat`` for each table, in the shape of the table."""
        parts = torch.split(flat, [prod(shape) for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def flat(self, values: Mapping[str, Sequence[float]], dtype: torch.dtype) -> Tensor:
        """Return ``values`` of all tables as one flat tensor on the host."""
        for name, shape in self.shapes.items():
            assert len(values[name]) == prod(shape), f"{name} has {len(values[name])} values of {shape}"
        return torch.tensor([value for name in self.shapes for value in values[name]], dtype=dtype)


class StagedTensor:
    """Static tables on the device with two host buffers to write them from."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self._device_copy = torch.zeros(layout.size, dtype=dtype, device=device)
        pinned = device.type == "cuda"
        self._halves = [torch.zeros(layout.size, dtype=dtype, pin_memory=pinned) for _ in range(2)]
        self._tables: list[dict[str, NDArray[Any]]] = [{}, {}]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def views(self) -> dict[str, Tensor]:
        """Return a view of the device's copy for each table."""
        return self._layout.views(self._device_copy)

    def begin(self) -> dict[str, NDArray[Any]]:
        """Return the tables of the host buffer that is written next. ``queue`` copies them to the device."""
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()  # A copy queued two writes ago; it rarely blocks.
        tables = self._tables[self._turn]
        if not tables:  # launches are counted with tensors that have no memory
            tables |= {name: view.numpy() for name, view in self._layout.views(self._halves[self._turn]).items()}
        return tables

    def write(self, values: Tensor) -> None:
        """Queue the copy of flat values on the host to the first elements of the device's copy."""
        self.begin()
        self._halves[self._turn][: len(values)].copy_(values)
        self.queue(len(values))

    def queue(self, size: int | None = None) -> None:
        """Queue the copy of the first ``size`` elements of the host buffer, None for all."""
        half = self._halves[self._turn]
        self._device_copy[:size].copy_(half[:size], non_blocking=True)
        if self._device_copy.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied[self._turn] = event


# Integer tables of the trees of a step: parents, depths, and the nodes of each draft pass.
#
# The tables are computed once for each combination of trees and graph key. Padding among the packed tokens and the
# nodes of a level belongs to row ``key.rows``, the padding row behind the last row.

PADDING_TREE = Tree((-1,), 0)
"""Tree of a padding row; none of its nodes is verified."""
OF_NODES = ("verified_parent", "parent", "rank", "depth")


def tree_shapes(key: GraphKey) -> TableShapes:
    """Return the shapes of the tree tables of ``key``, by name.

    - ``query_start`` [B + 1], ``root_row`` [B]: packed tokens of each row, and the packed index of its root.
    - ``token_*`` [T]: sequence, node, depth and ancestors of each packed token.
    - ``node_*`` [B, N]: ``OF_NODES`` of each node; the depth of padding and of given tokens is -1.
    - ``first_sequence`` [B]: row index where the row drafts, else ``key.rows``.
    - ``block_*`` [T]: sequence, offset from the root and visible slots of the slots of blocks. ``block_start`` is
      [B + 1].
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
    if key.block:
        table_shapes["block_start"] = (rows + 1,)
        table_shapes |= {f"block_{name}": (key.block_slots,) for name in ("sequence", "offset", "ancestors")}
    if key.passes > 1:
        levels = key.passes - 1
        table_shapes["level_start"] = (levels, rows + 1)
        table_shapes |= {
            f"level_{name}": (levels, key.level_rows) for name in ("sequence", "node", "ancestors", "source")
        }
    return table_shapes


@lru_cache(maxsize=256)
def topology(trees: tuple[Tree, ...], key: GraphKey) -> Tensor:
    """Return the tables of `tree_shapes` as one flat int64 tensor on the host, padded to the rows of ``key``."""
    rows = key.rows
    padded = trees + (PADDING_TREE,) * (rows - len(trees))
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
    if key.block:
        slots = [tree.drafted_depth + 1 if tree.drafted_depth else 0 for tree in padded]
        sizes = [size for size in slots for _ in range(size)]
        values["block_start"] = list(accumulate(slots, initial=0))
        values["block_sequence"] = _filled([b for b, n in enumerate(slots) for _ in range(n)], key.block_slots, rows)
        values["block_offset"] = _filled([k for size in slots for k in range(size)], key.block_slots, 0)
        values["block_ancestors"] = _filled([all_nodes(size) for size in sizes], key.block_slots, 1)
    if key.passes > 1:
        _add_levels(values, padded, key)
    return Layout(tree_shapes(key)).flat(values, torch.int64)


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


WIDTHS = (8, 64, 512)
"""Numbers of allowed, biased or blocked tokens of a request that graphs have columns for."""


class MaskTable:
    """Table of grammar masks on the device [N, W]. The first mask allows all tokens."""

    def __init__(self, masks: int, vocab_size: int, device: torch.device) -> None:
        self._words = (vocab_size + 31) // 32
        self._staged = StagedTensor(Layout({"masks": (masks, self._words)}), torch.int32, device)
        self.view()[0].fill_(-1)

    def view(self) -> Tensor:
        """Return the table as captured steps read it."""
        return self._staged.views()["masks"]

    def write(self, table_NW: NDArray[np.uint32]) -> None:
        """Queue the copy of the masks of a step to the first rows of the table."""
        self._staged.write(torch.from_numpy(table_NW.view(np.int32)).flatten())


# Tables of the rows of a step: slots, sampling parameters, and the slots that the draft must catch up with.


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Catch-up of one draft for each row of a step.

    ``counts`` is the number of draft slots up to the root to run, 0 for a row without a draft. ``key_starts`` is the
    first draft slot whose keys are visible. ``masks`` is the number of mask slots behind the root, of a draft that has
    them there; empty for others. ``before`` is set if the draft reads the tokens before these slots. ``proposes`` says
    for which rows the draft proposes, if it is one of several.
    """

    counts: tuple[int, ...] = ()
    key_starts: tuple[int, ...] = ()
    masks: tuple[int, ...] = ()
    before: bool = False
    proposes: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """Catch-up of each draft of a step, and of several drafts the candidates' order (`StepProposals.orders`)."""

    catch_ups: tuple[CatchUp, ...] = ()
    orders: list[list[int]] = field(default_factory=list)


NO_DRAFTS = DraftInputs()


def row_shapes(key: GraphKey) -> TableShapes:
    """Return the shapes of the integer tables of the rows of ``key``, by name. Row B of a [B + 1] table is padding.

    - ``slot``, ``live`` (1 for a request, 0 for padding) and ``depth_limit`` (maximum accepted depth): [B + 1].
    - Those of the sampling parameters, see `COLUMNS`.
    """
    names = ("slot", "live", "depth_limit")
    return {**dict.fromkeys(names, (key.rows + 1,)), **column_shapes(key.rows + 1, key.features, int)}


def step_shapes(key: GraphKey) -> TableShapes:
    """Return the shapes of the integer tables that differ in every step, by name.

    - For each of F drafts: ``catch_base`` (first slot to catch up with, relative to the root), ``key_start`` (first
      visible draft slot) and ``catch_start`` (packed start of each row): [F, B + 1]; ``catch_sequence`` and
      ``catch_offset`` (relative to the root) of the packed slots of the catch-up pass: [F, T]; ``catch_last``, the
      packed index of each root: [F, B].
    - For several drafts: ``proposes`` [F, B + 1], 1 where a draft proposes for a row, and ``order`` [B + 1, F K], the
      order of their candidates.
    - With grammars: ``mask_row`` [T], the row of the mask table for each packed token.
    """
    table_shapes: dict[str, tuple[int, ...]] = {}
    if key.passes:
        rows, slots, drafts = key.rows + 1, key.catch_up_slots, len(key.drafts)
        table_shapes |= dict.fromkeys(("catch_base", "key_start", "catch_start"), (drafts, rows))
        table_shapes |= dict.fromkeys(("catch_sequence", "catch_offset"), (drafts, slots))
        table_shapes["catch_last"] = (drafts, key.rows)
        if drafts > 1:
            table_shapes |= {"proposes": (drafts, rows), "order": (rows, drafts * MAX_RANKS)}
    if key.features.masks:
        table_shapes["mask_row"] = (key.tokens,)
    return table_shapes


def fill_step(
    tables: Mapping[str, NDArray[np.int64]], key: GraphKey, drafts: DraftInputs, masks: HostMasks | None
) -> None:
    """Write the values of the tables of ``step_shapes``, padding included. There are no ``drafts`` at a capture."""
    for index in range(len(key.drafts)):
        own = {name: table[index] for name, table in tables.items() if name not in ("order", "mask_row")}
        _fill_catch_up(own, key, drafts.catch_ups[index] if drafts.catch_ups else CatchUp())
    if len(key.drafts) > 1:
        tables["order"][:] = 0
        tables["order"][: len(drafts.orders)] = np.reshape(drafts.orders, (-1, tables["order"].shape[1]))
    if key.features.masks:
        rows = [] if masks is None else masks.rows
        tables["mask_row"][: len(rows)] = rows
        tables["mask_row"][len(rows) :] = 0


def _fill_catch_up(tables: Mapping[str, NDArray[np.int64]], key: GraphKey, catch_up: CatchUp) -> None:
    rows = len(catch_up.counts)
    counts = np.zeros(key.rows + 1, dtype=np.int64)
    counts[:rows] = catch_up.counts
    slots = counts.copy()
    if catch_up.masks:
        slots[:rows] += catch_up.masks
    starts = tables["catch_start"]
    starts[0] = 0
    np.cumsum(slots[:-1], out=starts[1:])
    total = int(starts[-1])
    np.subtract(1, counts, out=tables["catch_base"])
    tables["key_start"][:rows] = catch_up.key_starts
    tables["key_start"][rows:] = 0
    np.maximum(starts[:-1] + counts[:-1] - 1, 0, out=tables["catch_last"])
    sequence, offset = tables["catch_sequence"], tables["catch_offset"]
    sequence[:total] = np.repeat(np.arange(key.rows + 1), slots)
    sequence[total:] = key.rows
    # The root of a row has offset 0; mask slots are behind it.
    offset[:total] = np.arange(total) - np.repeat(starts + counts - 1, slots)
    offset[:total] -= catch_up.before
    offset[total:] = 0
    if "proposes" in tables:
        tables["proposes"][:] = 0
        tables["proposes"][: len(catch_up.proposes)] = catch_up.proposes


# Static inputs of one captured step, and what the host writes to them before a replay.
#
# Trees and parameters of the rows and the catch-up of the draft seldom change from step to step, so they are written
# only if they differ from the last ones. Grammar masks change in every step.

RowParams = tuple[list[SamplingParams], list[int], list[int]]
"""Sampling parameters, slots and depth limits of the rows of a step."""


class StepInputs:
    """Static input tables of a graph key. ``at`` has a view of each table on the device, by name."""

    def __init__(self, key: GraphKey, padding_slot: int, device: torch.device) -> None:
        self._key, self._padding_slot = key, padding_slot
        self._rows, self._floats = Layout(row_shapes(key)), Layout(column_shapes(key.rows + 1, key.features, float))
        trees, step = Layout(tree_shapes(key)), Layout(step_shapes(key))
        self._tree_input = StagedTensor(trees, torch.int64, device)
        self._row_input = StagedTensor(self._rows, torch.int64, device)
        self._float_input = StagedTensor(self._floats, torch.float32, device)
        self._step_input = StagedTensor(step, torch.int64, device) if step.size else None
        self.at: dict[str, Tensor] = self._tree_input.views() | self._row_input.views() | self._float_input.views()
        if self._step_input is not None:
            self.at |= self._step_input.views()
        self._written_trees: tuple[Tree, ...] | None = None
        self._written_rows: RowParams | None = None
        self._written_drafts: DraftInputs | None = None

    def write(
        self,
        trees: tuple[Tree, ...],
        requests: Sequence[Request],
        drafts: DraftInputs,
        depth_limits: Sequence[int] | None,
        masks: HostMasks | None = None,
    ) -> None:
        """Queue the copy of the inputs of a step that differ from those of the last one.

        Args:
            trees: Trees of the rows.
            requests: Requests of the rows.
            drafts: Inputs of the drafts; ignored for a key without draft passes.
            depth_limits: Maximum accepted depth of each row; None for no limit.
            masks: Grammar masks of the packed tokens; ignored for a key without them.
        """
        if trees != self._written_trees:
            self._tree_input.write(topology(trees, self._key))
            self._written_trees = trees
        limits = [NODES] * len(requests) if depth_limits is None else list(depth_limits)
        params = [request.sampling_params for request in requests], [request.slot for request in requests], limits
        if params != self._written_rows:
            self._write_rows(*params)
            self._written_rows = params
        if self._step_input is not None and (masks is not None or drafts != self._written_drafts):
            fill_step(self._step_input.begin(), self._key, drafts, masks)
            self._step_input.queue()
            self._written_drafts = drafts if masks is None else None

    def _write_rows(self, batch: list[SamplingParams], slots: list[int], limits: list[int]) -> None:
        """Queue the copy of the tables of the rows, padded."""
        rows, features = self._key.rows + 1, self._key.features
        more = rows - len(batch)
        values = {
            "slot": slots + [self._padding_slot] * more,
            "live": [1] * len(batch) + [0] * more,
            "depth_limit": limits + [NODES] * more,
            **column_values(batch, rows, features, int),
        }
        self._row_input.write(self._rows.flat(values, torch.int64))
        floats = column_values(batch, rows, features, float)
        self._float_input.write(self._floats.flat(floats, torch.float32))
