"""Registry of the loaded drafts, and the choice of the draft for each request.

The default draft serves every task that has no draft of its own. The target states that the drafts read are stored
together. If a new draft reads other states, that store is rebuilt empty, and drafts continue from the states to come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from specdecode_worker.contract import DraftConfig, DraftState, TaskMatch
from specdecode_worker.engine.drafts.aux_hidden_states import columns_of, union_reads
from specdecode_worker.engine.drafts.draft_progress import DraftProgress
from specdecode_worker.engine.drafts.draft_swap import SwapStatus
from specdecode_worker.engine.drafts.drafter import AnswerReader, Drafter, PagedDrafter, RestartedDrafter
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.scheduler import Row
from specdecode_worker.engine.step.device_state import AuxStates, DeviceState
from specdecode_worker.models.configs.target_states import TargetStates
from specdecode_worker.speculation.sampling.sampler import Sampler
from specdecode_worker.speculation.trees import PLAIN, Forest, forest_of

DEFAULT_DRAFT = ""
"""Name of the default draft, used by tasks that have no draft of their own."""
NO_SWAPS: Mapping[str, SwapStatus] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """Draft that can run, and its state for the worker report."""

    drafter: Drafter
    state: DraftState


@dataclass(frozen=True, slots=True)
class UnusableDraft:
    """Configured draft that cannot run; its state holds the reason."""

    state: DraftState


class LoadDraft(Protocol):
    """Callable that loads a draft while others run; see DraftLoader."""

    def __call__(self, config: DraftConfig, name: str = DEFAULT_DRAFT) -> LoadedDraft:
        """Load the draft of ``config`` under ``name``. Raise ModelError on failure."""
        ...


class DraftRegistry:
    """Loaded drafts by name. Without any draft, all rows decode plainly."""

    def __init__(self, drafts: Mapping[str, LoadedDraft | UnusableDraft], state: DeviceState, hidden_size: int) -> None:
        self._drafts = {name: one for name, one in drafts.items() if isinstance(one, LoadedDraft)}
        self._unusable = {name: one.state for name, one in drafts.items() if isinstance(one, UnusableDraft)}
        self._state, self._size = state, hidden_size
        self._by_task: dict[str, str] = {}
        self.reads = TargetStates()
        """Target states that the loaded drafts read, in total."""
        self._has_parallel = False
        self._align()
        state.allocate_states(self.reads.width(hidden_size))

    def __bool__(self) -> bool:
        return bool(self._drafts)

    def __len__(self) -> int:
        return len(self._drafts)

    def paged(self) -> dict[str, PagedDrafter]:
        """Return the loaded drafts with a paged cache, by name."""
        drafters = {name: loaded.drafter for name, loaded in self._drafts.items()}
        return {name: drafter for name, drafter in drafters.items() if isinstance(drafter, PagedDrafter)}

    def name_of(self, request: Request) -> str:
        """Return the name of the request's draft, loaded or not."""
        return self._name(request)

    def passes(self, rows: Sequence[Row], depths: Sequence[int]) -> int:
        """Return the number of draft passes of a step in which the trees of ``rows`` are drafted to ``depths``.

        A parallel draft needs one pass for any depth.
        """
        if not self._has_parallel:
            return max(depths)
        return max(
            (min(depth, 1) if self._is_parallel(row.request) else depth)
            for row, depth in zip(rows, depths, strict=True)
        )

    def loaded(self, name: str = DEFAULT_DRAFT) -> LoadedDraft | None:
        """Return the draft of this name, or None if it is not loaded."""
        return self._drafts.get(name)

    def state(self, name: str = DEFAULT_DRAFT) -> DraftState:
        """Return the state of the draft of this name, loaded or not; an empty DraftState if there is none."""
        loaded = self._drafts.get(name)
        return loaded.state if loaded else self._unusable.get(name, DraftState())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all drafts, loaded or not, sorted."""
        return tuple(sorted({*self._drafts, *self._unusable}))

    def named(self, swaps: Mapping[str, SwapStatus] = NO_SWAPS) -> tuple[DraftState, ...]:
        """Return the states of all drafts except the default one, sorted by name, including those yet to be loaded."""
        return tuple(self.reported(name, swaps) for name in sorted({*self.names, *swaps} - {DEFAULT_DRAFT}))

    def reported(self, name: str = DEFAULT_DRAFT, swaps: Mapping[str, SwapStatus] = NO_SWAPS) -> DraftState:
        """Return the state of the draft of this name with its swap, if there is one."""
        state = self.state(name)
        if name in self._drafts and isinstance(drafter := self._drafts[name].drafter, RestartedDrafter):
            state = state.model_copy(update={"problem": drafter.problem or None})
        if (swap := swaps.get(name)) is None:
            return state
        return state.model_copy(update={"name": name, "pending": swap.pending, "swap_problem": swap.problem})

    def set_tasks(self, tasks: Iterable[TaskMatch]) -> None:
        """Set the draft of each task, by draft name. Tasks without one use the default draft."""
        self._by_task = {task.name: task.draft for task in tasks if task.draft}

    def assign_draft(self, request: Request) -> None:
        """Record the draft of a request.

        A prefix found in the cache can then be matched with the draft whose keys it holds.
        """
        loaded = self._of(request)
        if loaded is not None:
            self._restart_if_changed(request, loaded.state.hash)

    def uses_default(self, request: Request) -> bool:
        """Return whether the request uses the default draft and not one of its task."""
        return self._name(request) == DEFAULT_DRAFT

    def ready(self, request: Request) -> bool:
        """Return whether a draft can propose for the request in the next step.

        If the draft of the request has changed, its progress restarts.
        """
        loaded = self._of(request)
        if loaded is None:
            return False
        self._restart_if_changed(request, loaded.state.hash)
        return loaded.drafter.ready(request)

    def prefill(self, rows: Sequence[Row], aux_TA: Tensor | None) -> None:
        """Run each draft over the prefill chunks of its rows. ``aux_TA`` is None if no draft reads target states."""
        states_TA = self._state.length_S.new_empty(sum(row.count for row in rows), 0) if aux_TA is None else aux_TA
        begins = [sum(row.count for row in rows[:b]) for b in range(len(rows))]
        for name, loaded in self._drafts.items():
            mine = [b for b, row in enumerate(rows) if self._name(row.request) == name]
            for b in mine:
                self._restart_if_changed(rows[b].request, loaded.state.hash)
            if len(mine) == len(rows):
                loaded.drafter.prefill(rows, states_TA)
            elif mine:
                parts = [states_TA[begins[b] : begins[b] + rows[b].count] for b in mine]
                loaded.drafter.prefill([rows[b] for b in mine], torch.cat(parts))

    def propose(self, rows: Sequence[Row], forest: Forest, sampler: Sampler) -> Tensor | None:
        """Draft the trees of all rows as `Drafter.propose` does, each row by its own draft."""
        names = [self._name(row.request) for row in rows]
        used = sorted(set(names) & self._drafts.keys())
        if len(used) == 1 and len(set(names)) == 1:
            return self._drafts[used[0]].drafter.propose(rows, forest, sampler)
        merged_BNK: Tensor | None = None
        for name in used:
            own = tuple(tree if n == name else PLAIN for tree, n in zip(forest.trees, names, strict=True))
            mine = forest_of(own, forest.parents_BN.device)
            ranked_BNK = self._drafts[name].drafter.propose(rows, mine, sampler)
            merged_BNK = _merged(merged_BNK, ranked_BNK)
        return merged_BNK

    def record_end(self, request: Request) -> None:
        """Show a request that ends to the drafts that learn from answers."""
        for loaded in self._drafts.values():
            if isinstance(loaded.drafter, AnswerReader):
                loaded.drafter.record_end(request)

    def new_states(self, name: str, loaded: LoadedDraft) -> AuxStates | None:
        """Allocate storage for the target states that all drafts read once ``loaded`` has replaced the draft ``name``.

        Return None if the present storage can be used. Raise the error of torch if there is too little memory.
        """
        drafts = {**self._drafts, name: loaded}
        reads = union_reads(one.drafter.reads for one in drafts.values())
        return None if reads == self.reads else self._state.new_states(reads.width(self._size))

    def replace(
        self, name: str, loaded: LoadedDraft, requests: Iterable[Request], states: AuxStates | None = None
    ) -> None:
        """Replace the draft of this name by ``loaded``. No step may be in flight. ``states`` is from `new_states`."""
        replaced = self.state(name).hash
        self._drafts[name] = loaded
        self._unusable.pop(name, None)
        self._align()
        if states is not None:
            self._state.use_states(states)
        for request in requests:
            if states is not None:
                request.draft.features_from = request.cached
            if request.draft.draft == replaced:
                request.draft.draft = ""  # the cache of the new draft is empty, even if it has the same hash

    def take_restarted(self, requests: Iterable[Request]) -> list[str]:
        """Begin to use draft processes that were started again, and return the hashes of their drafts.

        Their progress in all requests restarts, and their keys in cached prefixes must be invalidated.
        """
        restarted = [
            loaded.state.hash
            for loaded in self._drafts.values()
            if isinstance(loaded.drafter, RestartedDrafter) and loaded.drafter.take_restarted()
        ]
        for request in requests if restarted else ():
            if request.draft.draft in restarted:
                request.draft.draft = ""
        return restarted

    def _align(self) -> None:
        self.reads = union_reads(loaded.drafter.reads for loaded in self._drafts.values())
        for loaded in self._drafts.values():
            loaded.drafter.columns = columns_of(loaded.drafter.reads, self.reads, self._size)
        for name, drafter in self.paged().items():
            drafter.serves = partial(self._serves, name)
        self._has_parallel = any(drafter.parallel for drafter in self.paged().values())

    def _name(self, request: Request) -> str:
        if not self._by_task:
            return DEFAULT_DRAFT
        name = self._by_task.get(request.submit.task, DEFAULT_DRAFT)
        return name if name in self._drafts else DEFAULT_DRAFT

    def _serves(self, name: str, request: Request) -> bool:
        return self._name(request) == name

    def _is_parallel(self, request: Request) -> bool:
        loaded = self._of(request)
        return loaded is not None and isinstance(loaded.drafter, PagedDrafter) and loaded.drafter.parallel

    def _of(self, request: Request) -> LoadedDraft | None:
        return self._drafts.get(self._name(request))

    @staticmethod
    def _restart_if_changed(request: Request, identity: str) -> None:
        if request.draft.draft == identity:
            return
        behind = max(request.cached_bound, request.prefilled) + 1
        start = max(request.prefix, 1)  # the prefix holds no keys of this draft
        request.draft = DraftProgress(identity, lag=behind, start=start, features_from=request.draft.features_from)


def _merged(one: Tensor | None, two: Tensor | None) -> Tensor | None:
    """Merge the ranked tokens of two drafts, [B, N, K]. Each node has tokens of one draft and -1 in the other."""
    if one is None or two is None:
        return one if two is None else two
    nodes = max(one.shape[1], two.shape[1])
    wide = [torch.nn.functional.pad(t, (0, 0, 0, nodes - t.shape[1]), value=-1) for t in (one, two)]
    return torch.maximum(wide[0], wide[1])
