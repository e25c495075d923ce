"""Drafters whose networks run in a draft process. They count what the draft has processed, as local drafters do.

The draft runs over prompts while the target computes its next step: nothing waits for the answer to a Prefill message.
The tokens of trees are needed at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.engine.batch import Row
from specdecode_worker.engine.drafts.aux_hidden_states import StateColumns
from specdecode_worker.engine.drafts.draft_model import ModelDrafter
from specdecode_worker.engine.drafts.draft_passes import catch_up_runs
from specdecode_worker.engine.drafts.drafter import Expand, PagedDrafter
from specdecode_worker.engine.drafts.eagle import StateDrafter
from specdecode_worker.engine.drafts.own_device.draft_messages import Chunk, Place, Prefill, Propose, Tree
from specdecode_worker.engine.drafts.own_device.process_supervisor import ProcessSupervisor
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.engine.step.packed_batch import PackedBatch, PackedTensors
from specdecode_worker.models.configs.target_states import TargetStates
from specdecode_worker.speculation.sampling.row_selection import Nodes
from specdecode_worker.speculation.sampling.sampler import Proposer, Sampler
from specdecode_worker.speculation.trees import Forest


class OwnDrafter(PagedDrafter):
    """Drafter in a draft process. Its passes run before a graph that verifies, never in one."""

    captured = False
    reads: TargetStates
    columns: StateColumns
    _state: DeviceState

    def connect(self, supervisor: ProcessSupervisor) -> None:
        """Use the process of this supervisor."""
        self._supervisor = supervisor

    @property
    def problem(self) -> str:
        """Reason why the draft process cannot be used now; empty if it can."""
        return self._supervisor.problem

    @property
    def pid(self) -> int | None:
        """Process id of the draft process; None without one."""
        return self._supervisor.pid

    def take_restarted(self) -> bool:
        """Begin to use a restarted process and return whether there was one. It has no keys of any request."""
        return self._supervisor.take_restarted()

    def prefill(self, rows: Sequence[Row], aux_TA: Tensor) -> None:
        """Let the draft run over prefill chunks. Returns before it has."""
        if self._supervisor.usable:
            self._supervisor.send(Prefill(tuple(map(_chunk, rows)), ()), self._prefill_tensors(rows, aux_TA))
        self.record_prefill(rows)

    def begin(self, rows: Sequence[Row], forest: Forest, sampler: Sampler) -> Expand | None:
        """Draft the whole trees in the draft process, with the noise that the target chooses with."""
        drafting = self.drafting(rows, forest.trees)
        if not drafting:
            return None
        requests = [rows[b].request for b in drafting]
        counts = self.catch_up_counts(requests)
        self.record_catch_up(requests, counts)
        ranked_BNK = self._ask(rows, forest, drafting, counts)
        return lambda _, level: ranked_BNK[level.batch_R, level.node_R]

    @abstractmethod
    def record_prefill(self, rows: Sequence[Row]) -> None:
        """Record that the draft runs over these chunks."""

    def root_states(self, slots_T: Tensor, index_T: Tensor, packed: PackedBatch | PackedTensors) -> NoReturn:
        """Raise an error: no pass of this draft runs here."""
        raise NotImplementedError("the draft runs in another process")

    def node_states(self, hidden_RE: Tensor, packed: PackedBatch | PackedTensors) -> NoReturn:
        """Raise an error: no pass of this draft runs here."""
        raise NotImplementedError("the draft runs in another process")

    def rank(self, hidden_RE: Tensor, at: Nodes, depth: int, sampler: Proposer) -> NoReturn:
        """Raise an error: no pass of this draft runs here."""
        raise NotImplementedError("the draft runs in another process")

    def _ask(self, rows: Sequence[Row], forest: Forest, drafting: list[int], counts: list[int]) -> Tensor:
        """Return the ranked tokens behind every node [B, N, K], -1 where the process has none or is lost."""
        nodes = max(len(tree.parents) for tree in forest.trees)
        ranked_BNK = torch.full((len(rows), nodes, MAX_RANKS), -1, device=self._device)
        if not self._supervisor.usable:
            return ranked_BNK
        trees = [
            Tree(
                place=_place(rows[b].request),
                count=count,
                parents=forest.trees[b].parents if forest.trees[b].drafted_depth else (-1,),
                params=replace(rows[b].request.sampling_params, guided=False),
            )
            for b, count in zip(drafting, counts, strict=True)
        ]
        counting = tuple(i for i, tree in enumerate(trees) if tree.params.counts)
        message = Propose(tuple(trees), counting, ())
        tensors = self._tree_tensors([rows[b].request for b in drafting], counts, counting)
        if not forest.levels:
            self._supervisor.send(message, tensors)
        elif answer := self._supervisor.ask(message, tensors):
            mine_BNK = answer[0].to(self._device)
            ranked_BNK[to_device(drafting, self._device), : mine_BNK.shape[1]] = mine_BNK
        return ranked_BNK

    def _prefill_tensors(self, rows: Sequence[Row], aux_TA: Tensor) -> list[Tensor]:
        """Return the tensors of a Prefill message."""
        tokens = [self._state.tokens_SP[row.request.slot, row.start : row.start + row.count] for row in rows]
        if not self.reads:
            return [torch.cat(tokens)]
        slots_B = to_device([row.request.slot for row in rows], self._device)
        before_B = to_device([max(row.start - 1, 0) for row in rows], self._device)
        before_BA = self._state.aux(slots_B, before_B)
        return [torch.cat(tokens), self.columns.of(aux_TA), self.columns.of(before_BA)]

    def _tree_tensors(
        self, requests: Sequence[Request], counts: Sequence[int], counting: Sequence[int]
    ) -> list[Tensor]:
        """Return the tensors of a Propose message."""
        state = self._state
        _, index_T, slots_T = catch_up_runs(state, requests, counts)
        slots_B = to_device([request.slot for request in requests], self._device)
        tensors = [state.length_S[slots_B], state.tokens_SP[slots_T, index_T]]
        if self.reads:
            tensors.append(self.columns.of(state.aux(slots_T, index_T - 1)))
        texts = [requests[i] for i in counting]
        return tensors + [state.tokens_SP[one.slot, : 1 + max(one.cached_bound, one.prefilled)] for one in texts]

    @property
    def _device(self) -> torch.device:
        return self._state.length_S.device


class OwnStateDrafter(OwnDrafter, StateDrafter):
    """Drafter of the methods eagle3 and eagle in a draft process."""

    def __init__(self, reads: TargetStates, last_position: int, state: DeviceState) -> None:
        """Create a drafter for a head that reads these states, up to this position."""
        self.reads, self.columns, self._state = reads, StateColumns(), state
        self.first_slot, self.last_position = 1, last_position

    def ready(self, request: Request) -> bool:
        """Return whether there is a draft process, and the ring holds the target state that the head needs."""
        return self._supervisor.usable and StateDrafter.ready(self, request)

    def record_prefill(self, rows: Sequence[Row]) -> None:
        """Record that the head runs over these chunks."""
        StateDrafter.record_prefill(self, rows)

    def _fused(self, aux_TA: Tensor, packed: PackedBatch | PackedTensors) -> NoReturn:
        raise NotImplementedError("the draft runs in another process")


class OwnModelDrafter(OwnDrafter, ModelDrafter):
    """Drafter of the method draft-model in a draft process."""

    def __init__(self, last_position: int, state: DeviceState) -> None:
        """Create a drafter for a model that supports positions up to ``last_position``."""
        self.reads, self.columns, self._state = TargetStates(), StateColumns(), state
        self.first_slot, self.last_position = 0, last_position

    def ready(self, request: Request) -> bool:
        """Return whether there is a draft process, and the request is within the positions of the draft model."""
        return self._supervisor.usable and ModelDrafter.ready(self, request)

    def record_prefill(self, rows: Sequence[Row]) -> None:
        """Record that the draft model runs over these chunks."""
        ModelDrafter.record_prefill(self, rows)


def _place(request: Request) -> Place:
    return Place(request.slot, tuple(request.blocks), request.draft.start)


def _chunk(row: Row) -> Chunk:
    request = row.request
    return Chunk(_place(request), row.start, row.count, request.cached_bound, request.prefilled)
