"""Static inputs of one captured step, and what the host writes to them before a replay.

Trees and parameters of the rows and the catch-up of the draft seldom change from step to step, so they are written only
if they differ from the last ones. Grammar masks change in every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdecode_worker.engine.graphs import row_tables, tree_tables
from specdecode_worker.engine.graphs.feature_tables import HostMasks
from specdecode_worker.engine.graphs.graph_key import GraphKey
from specdecode_worker.engine.graphs.row_tables import CatchUp
from specdecode_worker.engine.graphs.static_inputs import Layout, StagedTensor
from specdecode_worker.engine.request import Request
from specdecode_worker.speculation.sampling.params import SamplingParams
from specdecode_worker.speculation.trees import Tree

RowParams = tuple[list[SamplingParams], list[int], list[int] | None]
"""Sampling parameters, slots and depth limits of the rows of a step."""


class StepInputs:
    """Static input tables of a graph key. ``at`` has a view of each table on the device, by name."""

    def __init__(self, key: GraphKey, padding_slot: int, device: torch.device) -> None:
        self._key, self._padding_slot = key, padding_slot
        self._rows, self._floats = Layout(row_tables.shapes(key)), Layout(row_tables.float_shapes(key))
        trees, step = Layout(tree_tables.shapes(key)), Layout(row_tables.step_shapes(key))
        self._tree_input = StagedTensor(trees, torch.int64, device)
        self._row_input = StagedTensor(self._rows, torch.int64, device)
        self._float_input = StagedTensor(self._floats, torch.float32, device)
        self._step_input = StagedTensor(step, torch.int64, device) if step.size else None
        self.at: dict[str, Tensor] = self._tree_input.views() | self._row_input.views() | self._float_input.views()
        if self._step_input is not None:
            self.at |= self._step_input.views()
        self._written_trees: tuple[Tree, ...] | None = None
        self._written_rows: RowParams | None = None
        self._written_catch_up: CatchUp | None = None

    def write(
        self,
        trees: tuple[Tree, ...],
        requests: Sequence[Request],
        catch_up: CatchUp,
        depth_limits: Sequence[int] | None,
        masks: HostMasks | None = None,
    ) -> None:
        """Queue the copy of the inputs of a step that differ from those of the last one.

        Args:
            trees: Trees of the rows.
            requests: Requests of the rows.
            catch_up: Catch-up of the draft; ignored for a key without draft passes.
            depth_limits: Maximum accepted depth of each row; None for no limit.
            masks: Grammar masks of the packed tokens; ignored for a key without them.
        """
        if trees != self._written_trees:
            self._tree_input.write(tree_tables.topology(trees, self._key))
            self._written_trees = trees
        limits = None if depth_limits is None else list(depth_limits)
        params = [request.sampling_params for request in requests], [request.slot for request in requests], limits
        if params != self._written_rows:
            values = row_tables.rows_of(requests, self._key, depth_limits, self._padding_slot)
            self._row_input.write(self._rows.flat(values, torch.int64))
            self._float_input.write(self._floats.flat(row_tables.floats_of(requests, self._key), torch.float32))
            self._written_rows = params
        if self._step_input is not None and (masks is not None or catch_up != self._written_catch_up):
            row_tables.fill_step(self._step_input.begin(), self._key, catch_up, masks)
            self._step_input.queue()
            self._written_catch_up = catch_up if masks is None else None
