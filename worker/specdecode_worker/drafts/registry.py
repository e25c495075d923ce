"""The drafts that a worker serves: how they are loaded, and which one drafts for which request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from specdecode_kernels.rope_cache.reference import Scales
from specdecode_worker.contract import MAX_NODES, DraftConfig, DraftState, MergedDraft, TaskMatch
from specdecode_worker.core.batch import Row
from specdecode_worker.core.device_state import AuxStates, DeviceState
from specdecode_worker.core.paged_attention import PagedCache
from specdecode_worker.core.request import DraftProgress, Request
from specdecode_worker.drafts import draft_model, eagle, lookup, medusa, parallel
from specdecode_worker.drafts.base import (
    DEFAULT_DRAFT,
    DraftContext,
    DraftMethod,
    LoadedDraft,
    PagedDrafter,
    RestartedDrafter,
    UnusableDraft,
    any_request,
    columns_of,
    own_progress,
    union_reads,
)
from specdecode_worker.drafts.draft_files import Calibration, draft_hash, read_calibration
from specdecode_worker.drafts.merged import StepProposals, TaskDrafts
from specdecode_worker.drafts.swap import SwapStatus
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.config import CausalLMConfig, DFlashConfig, Eagle3Config, EagleConfig
from specdecode_worker.models.drafts import load_draft
from specdecode_worker.models.optimize import fuse, quantise_draft
from specdecode_worker.models.target_states import TargetStates

log = logging.getLogger(__name__)

# Loader of drafts: weights, KV cache and calibration of a DraftConfig, at start and for a draft swap.

METHODS: dict[str, DraftMethod] = {
    one.name: one for one in (*eagle.METHODS, *parallel.METHODS, *lookup.METHODS, medusa.METHOD, draft_model.METHOD)
}
"""Drafting methods by name."""
Resolve = Callable[[str], Path]
"""Callable that returns the local folder of a model URI."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLoader:
    """Loader of drafts for one target.

    Their caches have as many blocks as the target's. Loading does not affect drafts that are in use.
    """

    target: CausalLM
    target_folder: Path
    max_model_len: int
    state: DeviceState
    blocks: int
    resolve: Resolve
    host_is_current: bool
    """True if no step is launched before the previous one is collected; see NgramDrafter and SuffixDrafter."""

    def __call__(self, config: DraftConfig, name: str = DEFAULT_DRAFT) -> LoadedDraft:
        """Load the draft of ``config``. Raise ModelError if it cannot be loaded or does not fit the target."""
        network, calibration, folder = None, Calibration(), None
        if config.uri is not None:
            folder = self.resolve(config.uri)
            network = load_draft(
                config.method,
                folder,
                self.target,
                target_folder=self.target_folder,
                dtype=self._dtype,
                device=self._device,
                max_model_len=self.max_model_len,
            )
            quantise_draft(network, config.quantization)
            fuse(network)
            calibration = read_calibration(folder)
        context = DraftContext(
            config=config,
            sharpness=calibration.sharpness,
            state=self.state,
            vocab_size=self.target.config.vocab_size,
            positions=self.target.config.max_position_embeddings,
            host_is_current=self.host_is_current,
            make_cache=self._cache,
        )
        state = DraftState(
            name=name,
            method=config.method,
            # of the files that were read, whatever is there by now
            hash=draft_hash(config, self.resolve if folder is None else lambda _: folder),
            uri=config.uri or "",
            quantization=config.quantization,
            agreement=calibration.agreement[:MAX_NODES],
        )
        return LoadedDraft(METHODS[config.method].make(network, context), state)

    def _cache(self, config: CachedConfig) -> PagedCache:
        return paged_cache(config, config.num_hidden_layers, self.blocks, self._dtype, self._device)

    @property
    def _dtype(self) -> torch.dtype:
        return self.target.model.embed_tokens.weight.dtype

    @property
    def _device(self) -> torch.device:
        return self.target.model.embed_tokens.weight.device


CachedConfig = CausalLMConfig | Eagle3Config | EagleConfig | DFlashConfig
"""Configuration of a network that has a KV cache."""


def paged_cache(
    config: CachedConfig,
    layers: int,
    blocks: int,
    dtype: torch.dtype,
    device: torch.device,
    scales: Sequence[Scales] = (),
) -> PagedCache:
    """Create a paged KV cache of ``blocks`` blocks for ``layers`` layers of a network; in fp8 with ``scales``."""
    kinds = config.layer_kinds if isinstance(config, CausalLMConfig) else ()
    return PagedCache(
        layers=layers,
        blocks=blocks,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
        chunk=config.attention_chunk_size if isinstance(config, CausalLMConfig) else 0,
        chunked=[layer for layer, kind in enumerate(kinds) if kind.chunked],
        scales=scales,
    )


# Registry of the loaded drafts, and the choice of the draft for each request.
#
# The default draft serves every task that has no draft of its own. The target states that the drafts read are stored
# together. If a new draft reads other states, that store is rebuilt empty, and drafts continue from the states to come.

NO_SWAPS: Mapping[str, SwapStatus] = MappingProxyType({})


class DraftRegistry:
    """Loaded drafts by name. Without any draft, all rows decode plainly."""

    def __init__(
        self,
        drafts: Mapping[str, LoadedDraft | UnusableDraft],
        state: DeviceState,
        hidden_size: int,
        *,
        merges: bool = True,
    ) -> None:
        """Take over loaded drafts. ``merges`` is False for a sampler that cannot merge drafts."""
        self._drafts = {name: one for name, one in drafts.items() if isinstance(one, LoadedDraft)}
        self._unusable = {name: one.state for name, one in drafts.items() if isinstance(one, UnusableDraft)}
        self._restarted: dict[str, RestartedDrafter] = {}
        """Drafters of processes of their own, by name."""
        self._paged: dict[str, PagedDrafter] = {}
        self._state, self._size = state, hidden_size
        self._tasks = TaskDrafts(DEFAULT_DRAFT, self._drafts.__contains__, self._is_mergeable, merges=merges)
        self.proposals = StepProposals(self._drafts, self._tasks, state)
        self.reads = TargetStates()
        """Target states that the loaded drafts read, in total."""
        self._align()
        state.allocate_states(self.reads.width(hidden_size))

    def __bool__(self) -> bool:
        return bool(self._drafts)

    def paged(self) -> dict[str, PagedDrafter]:
        """Return the loaded drafts that must catch up with the text of their requests, by name."""
        return self._paged

    @property
    def merges(self) -> bool:
        """True if some task merges drafts."""
        return self._tasks.merges

    @property
    def merged_names(self) -> set[tuple[str, ...]]:
        """Names of the drafts of each task that merges some, sorted."""
        tasks = self._tasks.merging if self._tasks.merges else ()
        return {tuple(sorted({self.name_of(task), *(one.draft for one in self._tasks.merged(task))})) for task in tasks}

    def name_of(self, task: str) -> str:
        """Return the name of the draft of a task, loaded or not."""
        return self._tasks.name(task)

    def merged(self, task: str) -> tuple[MergedDraft, ...]:
        """Return the drafts that are merged with the draft of a task."""
        return self._tasks.merged(task)

    def serves(self, name: str, task: str) -> bool:
        """Return whether the draft of this name proposes for requests of a task, alone or merged with others."""
        return self._tasks.serves(name, task)

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
        if (drafter := self._restarted.get(name)) is not None:
            state = state.model_copy(update={"problem": drafter.problem or None})
        if (swap := swaps.get(name)) is None:
            return state
        return state.model_copy(update={"name": name, "pending": swap.pending, "swap_problem": swap.problem})

    def set_tasks(self, tasks: Iterable[TaskMatch]) -> None:
        """Set the drafts of each task, by name. Tasks without one use the default draft."""
        self._tasks.set_tasks(tasks)
        self._assign_requests()
        self.proposals.order.retain(self._tasks.merging)

    def assign_draft(self, request: Request) -> None:
        """Record the draft of a request.

        A prefix found in the cache can then be matched with the draft whose keys it holds.
        """
        loaded = self._drafts.get(self._tasks.name(request.submit.task))
        if loaded is not None:
            self._restart_if_changed(request, loaded.state.hash)

    def uses_default(self, request: Request) -> bool:
        """Return whether the request uses the default draft and not one of its task."""
        return self._tasks.name(request.submit.task) == DEFAULT_DRAFT

    def ready(self, request: Request) -> bool:
        """Return whether a draft can propose for the request in the next step.

        If the draft of the request has changed, its progress restarts.
        """
        loaded = self._drafts.get(self._tasks.name(request.submit.task))
        if loaded is None:
            return False
        self._restart_if_changed(request, loaded.state.hash)
        return self.proposals.ready(request) if self._tasks.merges else loaded.drafter.ready(request)

    def extension(self, request: Request) -> int:
        """Return the depth to which drafts without passes extend the request's tree in the next step; 0 for none."""
        return self.proposals.extension(request)

    def prefill(self, rows: Sequence[Row], aux_TA: Tensor | None) -> None:
        """Run each draft over the prefill chunks of its rows. ``aux_TA`` is None if no draft reads target states."""
        states_TA = self._state.length_S.new_empty(sum(row.count for row in rows), 0) if aux_TA is None else aux_TA
        begins = [sum(row.count for row in rows[:b]) for b in range(len(rows))]
        for name, loaded in self._drafts.items():
            mine = [b for b, row in enumerate(rows) if self._tasks.serves(name, row.request.submit.task)]
            for b in mine:
                if self._tasks.name(rows[b].request.submit.task) == name:
                    self._restart_if_changed(rows[b].request, loaded.state.hash)
            if len(mine) == len(rows):
                loaded.drafter.prefill(rows, states_TA)
            elif mine:
                parts = [states_TA[begins[b] : begins[b] + rows[b].count] for b in mine]
                loaded.drafter.prefill([rows[b] for b in mine], torch.cat(parts))
        for row in rows:
            row.request.draft.lag = 1  # if its draft has a cache, it is at the end of the chunk now

    def record_end(self, request: Request) -> None:
        """Show a request that ends to the drafts that store its text or learn from its answer."""
        for loaded in self._drafts.values():
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
            request.merged.pop(name, None)
            if states is not None:
                request.merged.clear()
                request.draft.features_from = request.cached
            if request.draft.draft == replaced:
                request.draft.draft = ""  # the cache of the new draft is empty, even if it has the same hash

    def take_restarted(self, requests: Iterable[Request]) -> list[str]:
        """Begin to use draft processes that were started again, and return the hashes of their drafts.

        Their progress in all requests restarts, and their keys in cached prefixes must be invalidated.
        """
        restarted = [self._drafts[name].state.hash for name, one in self._restarted.items() if one.take_restarted()]
        for request in requests if restarted else ():
            if request.draft.draft in restarted:
                request.draft.draft = ""
        return restarted

    def _align(self) -> None:
        drafters = {name: loaded.drafter for name, loaded in self._drafts.items()}
        self._restarted = {name: one for name, one in drafters.items() if isinstance(one, RestartedDrafter)}
        self.reads = union_reads(loaded.drafter.reads for loaded in self._drafts.values())
        for loaded in self._drafts.values():
            loaded.drafter.columns = columns_of(loaded.drafter.reads, self.reads, self._size)
        self._paged = {name: drafter for name, drafter in drafters.items() if isinstance(drafter, PagedDrafter)}
        self._assign_requests()

    def _assign_requests(self) -> None:
        """Tell each draft which requests it serves, and where its progress through their text is."""
        for name, loaded in self._drafts.items():
            # Called for every row of a step: without drafts of tasks, the default draft serves all requests.
            serves_all, drafter = name == DEFAULT_DRAFT and self._tasks.is_empty, loaded.drafter
            drafter.serves = any_request if serves_all else partial(self._serves, name)
            drafter.progress = own_progress if serves_all else partial(self._progress, name)

    def _is_mergeable(self, name: str) -> bool:
        """Return whether a draft proposes node by node. One on a device of its own drafts whole trees."""
        return name not in self._restarted

    def _progress(self, name: str, request: Request) -> DraftProgress:
        """Return the progress of a draft through the text of a request, as its own draft or as one that is merged."""
        if self._tasks.name(request.submit.task) == name:
            return request.draft
        identity, progress = self._drafts[name].state.hash, request.merged.get(name)
        if progress is None or progress.draft != identity:
            progress = request.merged[name] = _progress_behind(request, identity)
        return progress

    def _serves(self, name: str, request: Request) -> bool:
        return self._tasks.serves(name, request.submit.task)

    @staticmethod
    def _restart_if_changed(request: Request, identity: str) -> None:
        if request.draft.draft != identity:
            request.draft = _progress_behind(request, identity)


def _progress_behind(request: Request, identity: str) -> DraftProgress:
    """Return the progress of a draft that has processed nothing of the request's text."""
    behind = max(request.cached_bound, request.prefilled) + 1
    start = max(request.prefix, 1)  # the prefix holds no keys of this draft
    return DraftProgress(identity, lag=behind, start=start, features_from=request.draft.features_from)
