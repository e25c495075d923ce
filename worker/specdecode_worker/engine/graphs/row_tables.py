"""Tables of the rows of a step: slots, sampling parameters, and the slots that the draft must catch up with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdecode_worker.engine.graphs import feature_tables
from specdecode_worker.engine.graphs.feature_tables import HostMasks
from specdecode_worker.engine.graphs.graph_key import NODES, GraphKey
from specdecode_worker.engine.graphs.static_inputs import Shapes
from specdecode_worker.engine.request import Request

FLOATS = ("temperature", "top_p", "min_p")


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Catch-up of the draft for each row of a step.

    ``counts`` is the number of draft slots up to the root to run, 0 for a row without a draft. ``key_starts`` is the
    first draft slot whose keys are visible.
    """

    counts: tuple[int, ...] = ()
    key_starts: tuple[int, ...] = ()


def shapes(key: GraphKey) -> Shapes:
    """Return the shapes of the integer tables of the rows of ``key``, by name. Row B of a [B + 1] table is padding.

    - ``slot``, ``live`` (1 for a request, 0 for padding), ``seed``, ``top_k`` and ``depth_limit`` (maximum accepted
      depth): [B + 1].
    - Those of the features of ``key``, see `feature_tables.int_shapes`.
    """
    names = ("slot", "live", "seed", "top_k", "depth_limit")
    return {**dict.fromkeys(names, (key.rows + 1,)), **feature_tables.int_shapes(key)}


def step_shapes(key: GraphKey) -> Shapes:
    """Return the shapes of the integer tables that differ in every step, by name.

    - With draft passes: ``catch_base`` (first slot to catch up with, relative to the root), ``key_start`` (first
      visible draft slot) and ``catch_start`` (packed start of each row): [B + 1]; ``catch_sequence`` and
      ``catch_offset`` (relative to the root) of the packed slots of the catch-up pass: [T]; ``catch_last``, the packed
      index of each root: [B].
    - With grammars: ``mask_row`` [T], the row of the mask table for each packed token.
    """
    table_shapes: dict[str, tuple[int, ...]] = {}
    if key.passes:
        table_shapes |= dict.fromkeys(("catch_base", "key_start", "catch_start"), (key.rows + 1,))
        table_shapes |= {"catch_sequence": (key.tokens,), "catch_offset": (key.tokens,), "catch_last": (key.rows,)}
    if key.features.masks:
        table_shapes["mask_row"] = (key.tokens,)
    return table_shapes


def float_shapes(key: GraphKey) -> Shapes:
    """Return the shapes of the float row tables of ``key``, by name; row B is padding."""
    return {**dict.fromkeys(FLOATS, (key.rows + 1,)), **feature_tables.float_shapes(key)}


def floats_of(requests: Sequence[Request], key: GraphKey) -> dict[str, list[float]]:
    """Return the values of the float row tables, padded with greedy sampling without truncation."""
    batch_params, more = [request.sampling_params for request in requests], key.rows + 1 - len(requests)
    return {
        "temperature": [params.temperature for params in batch_params] + [0.0] * more,
        "top_p": [params.top_p for params in batch_params] + [1.0] * more,
        "min_p": [params.min_p for params in batch_params] + [0.0] * more,
        **feature_tables.floats_of(requests, key),
    }


def rows_of(
    requests: Sequence[Request], key: GraphKey, depth_limits: Sequence[int] | None, padding_slot: int
) -> dict[str, list[int]]:
    """Return the values of the integer row tables of ``shapes``, flat and padded.

    Args:
        requests: Requests of the step, in row order.
        key: Key of the graph that runs the step.
        depth_limits: Maximum accepted depth of each row; None for no limit.
        padding_slot: Slot of padding rows.
    """
    more = key.rows + 1 - len(requests)
    limits = [NODES] * len(requests) if depth_limits is None else list(depth_limits)
    return {
        "slot": [request.slot for request in requests] + [padding_slot] * more,
        "live": [1] * len(requests) + [0] * more,
        "seed": [request.sampling_params.seed for request in requests] + [0] * more,
        "top_k": [request.sampling_params.top_k for request in requests] + [0] * more,
        "depth_limit": limits + [NODES] * more,
        **feature_tables.ints_of(requests, key),
    }


def fill_step(
    tables: Mapping[str, NDArray[np.int64]], key: GraphKey, catch_up: CatchUp, masks: HostMasks | None
) -> None:
    """Write the values of the tables of ``step_shapes``, padding included."""
    if key.passes:
        _fill_catch_up(tables, key, catch_up)
    if key.features.masks:
        rows = [] if masks is None else masks.rows
        tables["mask_row"][: len(rows)] = rows
        tables["mask_row"][len(rows) :] = 0


def _fill_catch_up(tables: Mapping[str, NDArray[np.int64]], key: GraphKey, catch_up: CatchUp) -> None:
    rows = len(catch_up.counts)
    counts = np.zeros(key.rows + 1, dtype=np.int64)
    counts[:rows] = catch_up.counts
    starts = tables["catch_start"]
    starts[0] = 0
    np.cumsum(counts[:-1], out=starts[1:])
    total = int(starts[-1])
    np.subtract(1, counts, out=tables["catch_base"])
    tables["key_start"][:rows] = catch_up.key_starts
    tables["key_start"][rows:] = 0
    np.maximum(starts[1:] - 1, 0, out=tables["catch_last"])
    sequence, offset = tables["catch_sequence"], tables["catch_offset"]
    sequence[:total] = np.repeat(np.arange(key.rows + 1), counts)
    sequence[total:] = key.rows
    # The slots of a row end at its root, offset 0.
    offset[:total] = np.arange(total) - np.repeat(starts + counts - 1, counts)
    offset[total:] = 0
