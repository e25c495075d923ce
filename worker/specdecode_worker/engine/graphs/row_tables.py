"""Tables of the rows of a step: slots, sampling parameters, and the slots that the draft must catch up with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
    """Return the shapes of the integer row tables of ``key``, by name. Row B of a [B + 1] table is padding.

    - ``slot``, ``live`` (1 for a request, 0 for padding), ``seed``, ``top_k`` and ``depth_limit`` (maximum accepted
      depth): [B + 1].
    - With draft passes: ``catch_base`` (first slot to catch up with, relative to the root), ``key_start`` (first
      visible draft slot) and ``catch_start`` (packed start of each row): [B + 1]; ``catch_sequence`` and
      ``catch_offset`` (relative to the root) of the packed slots of the catch-up pass: [T]; ``catch_last``, the packed
      index of each root: [B].
    - Those of the features of ``key``, see `feature_tables.int_shapes`.
    """
    rows = key.rows + 1
    table_shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("slot", "live", "seed", "top_k", "depth_limit"), (rows,))
    if key.passes:
        table_shapes |= dict.fromkeys(("catch_base", "key_start", "catch_start"), (rows,))
        table_shapes |= {"catch_sequence": (key.tokens,), "catch_offset": (key.tokens,), "catch_last": (key.rows,)}
    return {**table_shapes, **feature_tables.int_shapes(key)}


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
    requests: Sequence[Request],
    key: GraphKey,
    catch_up: CatchUp,
    depth_limits: Sequence[int] | None,
    padding_slot: int,
    masks: HostMasks | None = None,
) -> dict[str, list[int]]:
    """Return the values of the integer row tables of ``shapes``, flat and padded.

    Args:
        requests: Requests of the step, in row order.
        key: Key of the graph that runs the step.
        catch_up: Catch-up of the draft; ignored for a key without draft passes.
        depth_limits: Maximum accepted depth of each row; None for no limit.
        padding_slot: Slot of padding rows.
        masks: Grammar masks of the packed tokens; ignored for a key without them.
    """
    more = key.rows + 1 - len(requests)
    limits = [NODES] * len(requests) if depth_limits is None else list(depth_limits)
    tables = {
        "slot": [request.slot for request in requests] + [padding_slot] * more,
        "live": [1] * len(requests) + [0] * more,
        "seed": [request.sampling_params.seed for request in requests] + [0] * more,
        "top_k": [request.sampling_params.top_k for request in requests] + [0] * more,
        "depth_limit": limits + [NODES] * more,
    }
    tables |= feature_tables.ints_of(requests, key, masks)
    return tables | _catch_up(catch_up, key) if key.passes else tables


def _catch_up(catch_up: CatchUp, key: GraphKey) -> dict[str, list[int]]:
    more = key.rows + 1 - len(catch_up.counts)
    counts = [*catch_up.counts, *[0] * more]
    total = sum(counts)
    starts = list(accumulate(counts[: key.rows], initial=0))
    padding = key.tokens - total
    return {
        "catch_base": [1 - count for count in counts],
        "key_start": [*catch_up.key_starts, *[0] * more],
        "catch_start": starts,
        "catch_sequence": [b for b, count in enumerate(counts) for _ in range(count)] + [key.rows] * padding,
        "catch_offset": [row + 1 - count for count in counts for row in range(count)] + [0] * padding,
        "catch_last": [max(end - 1, 0) for end in starts[1:]],
    }
