"""The drafts that are loaded, and which of them follows which request.

The first draft serves every task that names no other. All that some draft reads of the target is kept together; on a
swap the kept states are remade when the new draft reads others, and requests go on from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdecode_worker.contract import DraftConfig, DraftState, TaskMatch
from specdecode_worker.engine.drafts.aux_hidden_states import columns, joined
from specdecode_worker.engine.drafts.draft_progress import DraftProgress
from specdecode_worker.engine.drafts.drafter import Drafter, PagedDrafter
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.scheduler import Row
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.models.configs.target_states import Reads
from specdecode_worker.speculation.sampling.sampler import Sampler
from specdecode_worker.speculation.trees import PLAIN, Forest, forest_of

FIRST = ""
"""Name of the draft that tasks use unless they name another."""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft that can run, and who it is."""

    drafter: Drafter
    state: DraftState


@dataclass(frozen=True, slots=True)
class Misfit:
    """A draft that was asked for and cannot run; its state says why."""

    state: DraftState


class LoadDraft(Protocol):
    """Loads a draft beside those that run; see DraftLoader. Raises ModelError."""

    def __call__(self, config: DraftConfig, name: str = FIRST) -> LoadedDraft: ...


class Roster:
    """Drafts by name. Without any, everything is plain."""

    def __init__(self, drafts: Mapping[str, LoadedDraft | Misfit], state: DeviceState, hidden_size: int) -> None:
        self._drafts = {name: one for name, one in drafts.items() if isinstance(one, LoadedDraft)}
        self._misfits = {name: one.state for name, one in drafts.items() if isinstance(one, Misfit)}
        self._state, self._size = state, hidden_size
        self._by_task: dict[str, str] = {}
        self.reads = Reads()
        """What the target has to hand out."""
        self._align()
        state.keep_states(self.reads.width(hidden_size))

    def __bool__(self) -> bool:
        return bool(self._drafts)

    def __len__(self) -> int:
        return len(self._drafts)

    def paged(self) -> PagedDrafter | None:
        """The only draft there is, if graphs can hold its passes."""
        drafters = [loaded.drafter for loaded in self._drafts.values()]
        return drafters[0] if len(drafters) == 1 and isinstance(drafters[0], PagedDrafter) else None

    def state(self, name: str = FIRST) -> DraftState:
        loaded = self._drafts.get(name)
        return loaded.state if loaded else self._misfits.get(name, DraftState())

    @property
    def named(self) -> tuple[DraftState, ...]:
        """All but the first."""
        return tuple(self.state(name) for name in sorted({*self._drafts, *self._misfits} - {FIRST}))

    def set_tasks(self, tasks: Iterable[TaskMatch]) -> None:
        """Which draft each task uses, by name."""
        self._by_task = {task.name: task.draft for task in tasks if task.draft}

    def follow(self, request: Request) -> None:
        """Names the draft of a request, so that what is found of it in the cache can be told to be that draft's."""
        loaded = self._of(request)
        if loaded is not None:
            self._follow(request, loaded.state.hash)

    def ready(self, request: Request) -> bool:
        """Whether a draft can propose for it in the next step. A request that changed its draft is followed anew."""
        loaded = self._of(request)
        if loaded is None:
            return False
        self._follow(request, loaded.state.hash)
        return loaded.drafter.ready(request)

    def prefill(self, rows: Sequence[Row], aux_TA: Tensor | None) -> None:
        """Follows prefill chunks; ``aux_TA`` are their states, None when no draft reads any."""
        states_TA = self._state.length_S.new_empty(sum(row.count for row in rows), 0) if aux_TA is None else aux_TA
        begins = [sum(row.count for row in rows[:b]) for b in range(len(rows))]
        for name, loaded in self._drafts.items():
            mine = [b for b, row in enumerate(rows) if self._name(row.request) == name]
            for b in mine:
                self._follow(rows[b].request, loaded.state.hash)
            if len(mine) == len(rows):
                loaded.drafter.prefill(rows, states_TA)
            elif mine:
                parts = [states_TA[begins[b] : begins[b] + rows[b].count] for b in mine]
                loaded.drafter.prefill([rows[b] for b in mine], torch.cat(parts))

    def propose(self, rows: Sequence[Row], forest: Forest, sampler: Sampler) -> Tensor | None:
        """As Drafter.propose, each row by its own draft."""
        names = [self._name(row.request) for row in rows]
        used = sorted(set(names) & self._drafts.keys())
        if len(used) == 1 and len(set(names)) == 1:
            return self._drafts[used[0]].drafter.propose(rows, forest, sampler)
        found: Tensor | None = None
        for name in used:
            own = tuple(tree if n == name else PLAIN for tree, n in zip(forest.trees, names, strict=True))
            mine = forest_of(own, forest.parents_BN.device)
            ranked_BNK = self._drafts[name].drafter.propose(rows, mine, sampler)
            found = _merged(found, ranked_BNK)
        return found

    def replace(self, name: str, loaded: LoadedDraft, requests: Iterable[Request]) -> None:
        """Lets ``loaded`` take over between two steps; nothing may be in flight."""
        before = self.reads
        self._drafts[name] = loaded
        self._misfits.pop(name, None)
        self._align()
        if self.reads != before:
            self._state.keep_states(self.reads.width(self._size))
            for request in requests:
                request.draft.features_from = request.cached

    def _align(self) -> None:
        self.reads = joined(loaded.drafter.reads for loaded in self._drafts.values())
        for loaded in self._drafts.values():
            loaded.drafter.columns = columns(loaded.drafter.reads, self.reads, self._size)

    def _name(self, request: Request) -> str:
        name = self._by_task.get(request.submit.task, FIRST)
        return name if name in self._drafts else FIRST

    def _of(self, request: Request) -> LoadedDraft | None:
        return self._drafts.get(self._name(request))

    @staticmethod
    def _follow(request: Request, identity: str) -> None:
        if request.draft.draft == identity:
            return
        behind = max(request.cached_bound, request.prefilled) + 1
        start = max(request.prefix, 1)  # behind it nothing of this draft's is known
        request.draft = DraftProgress(identity, lag=behind, start=start, features_from=request.draft.features_from)


def _merged(one: Tensor | None, two: Tensor | None) -> Tensor | None:
    """Both drafts' orderings: a node has one of them, and -1 in the other."""
    if one is None or two is None:
        return one if two is None else two
    nodes = max(one.shape[1], two.shape[1])
    wide = [torch.nn.functional.pad(t, (0, 0, 0, nodes - t.shape[1]), value=-1) for t in (one, two)]
    return torch.maximum(wide[0], wide[1])
