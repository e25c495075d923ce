"""The drafts that a worker serves: how they are loaded, which ones draft for which request, and how they are merged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdecode_kernels.rope_cache.reference import Scales
from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import MAX_NODES, MAX_RANKS, DraftConfig, DraftState, MergedDraft, Method, TaskMatch
from specdecode_worker.core.device_state import AuxStates, DeviceState, HostCopy, PagedCache, to_host
from specdecode_worker.core.request import DraftProgress, Request, Row
from specdecode_worker.drafts.base import (
    DEFAULT_DRAFT,
    DraftContext,
    Drafter,
    LoadedDraft,
    PagedDrafter,
    any_request,
    columns_of,
    draft_trees,
    no_ranks,
    own_progress,
    union_reads,
    write_children,
)
from specdecode_worker.drafts.draft_files import Calibration, draft_hash, read_calibration
from specdecode_worker.drafts.draft_model import ModelDrafter
from specdecode_worker.drafts.eagle import EagleDrafter
from specdecode_worker.drafts.lookup import NgramDrafter, SuffixDrafter
from specdecode_worker.drafts.medusa import MedusaDrafter
from specdecode_worker.drafts.parallel import DFlashDrafter, PEagleDrafter
from specdecode_worker.drafts.swap import SwapStatus
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.config import CausalLMConfig, DFlashConfig, Eagle3Config, EagleConfig
from specdecode_worker.models.drafts import load_draft
from specdecode_worker.models.optimize import fuse, quantise_draft
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.sampling.sampler import HostMasks, Proposer
from specdecode_worker.sampling.trees import PLAIN, Forest, forest_of

log = logging.getLogger(__name__)

# Loader of drafts: weights, KV cache and calibration of a DraftConfig, at start and for a draft swap.

METHODS: dict[Method, Callable[[Any, DraftContext], Drafter]] = {
    "eagle3": EagleDrafter.of,
    "eagle": EagleDrafter.of,
    "peagle": PEagleDrafter.of,
    "dflash": DFlashDrafter.of,
    "medusa": MedusaDrafter.of,
    "draft-model": ModelDrafter.of,
    "ngram": NgramDrafter.of,
    "suffix": SuffixDrafter.of,
}
"""Constructor of the drafter of each method, from its network (None for a method without weights)."""
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
        network, calibration, folder = None, Calibration(sharpness=()), None
        if config.uri is not None:
            folder = self.resolve(config.uri)
            network = load_draft(
                config.method,
                folder,
                self.target,
                target_folder=self.target_folder,
                dtype=self.state.dtype,
                device=self.state.length_S.device,
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
        return LoadedDraft(METHODS[config.method](network, context), state)

    def _cache(self, config: CachedConfig) -> PagedCache:
        return paged_cache(config, config.num_hidden_layers, self.blocks, self.state.dtype, self.state.length_S.device)


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
        drafts: Mapping[str, LoadedDraft | DraftState],
        state: DeviceState,
        hidden_size: int,
        *,
        merges: bool = True,
    ) -> None:
        """Take over drafts by name.

        Args:
            drafts: Loaded drafts, and the states of those that could not be loaded, with the reason.
            state: Device state of the running requests.
            hidden_size: Width of the target's hidden states.
            merges: False for a sampler that cannot merge drafts.
        """
        self._drafts = {name: one for name, one in drafts.items() if isinstance(one, LoadedDraft)}
        self._unusable = {name: one for name, one in drafts.items() if isinstance(one, DraftState)}
        self.paged: dict[str, PagedDrafter] = {}
        """Loaded drafts that must catch up with the text of their requests, by name."""
        self._state, self._size = state, hidden_size
        self.tasks = TaskDrafts(self._drafts, merges=merges)
        """Drafts of each task."""
        self.proposals = StepProposals(self._drafts, self.tasks, state)
        self.reads = TargetStates()
        """Target states that the loaded drafts read, in total."""
        self._align()
        state.allocate_states(self.reads.width(hidden_size))

    def __bool__(self) -> bool:
        return bool(self._drafts)

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
        if (loaded := self._drafts.get(name)) is not None and loaded.drafter.problem:
            state = state.model_copy(update={"problem": loaded.drafter.problem})
        if (swap := swaps.get(name)) is None:
            return state
        return state.model_copy(update={"name": name, "pending": swap.pending, "swap_problem": swap.problem})

    def set_tasks(self, tasks: Iterable[TaskMatch]) -> None:
        """Set the drafts of each task, by name. Tasks without one use the default draft."""
        self.tasks.set_tasks(tasks)
        self._assign_requests()
        self.proposals.order.retain(self.tasks.merging)

    def assign_draft(self, request: Request) -> None:
        """Record the draft of a request.

        A prefix found in the cache can then be matched with the draft whose keys it holds.
        """
        loaded = self._drafts.get(self.tasks.name(request.submit.task))
        if loaded is not None:
            self._restart_if_changed(request, loaded.state.hash)

    def ready(self, request: Request) -> bool:
        """Return whether a draft can propose for the request in the next step.

        If the draft of the request has changed, its progress restarts.
        """
        loaded = self._drafts.get(self.tasks.name(request.submit.task))
        if loaded is None:
            return False
        self._restart_if_changed(request, loaded.state.hash)
        return self.proposals.ready(request) if self.tasks.merges else loaded.drafter.ready(request)

    def prefill(self, rows: Sequence[Row], aux_TA: Tensor | None) -> None:
        """Run each draft over the prefill chunks of its rows. ``aux_TA`` is None if no draft reads target states."""
        states_TA = self._state.length_S.new_empty(sum(row.count for row in rows), 0) if aux_TA is None else aux_TA
        begins = [sum(row.count for row in rows[:b]) for b in range(len(rows))]
        for name, loaded in self._drafts.items():
            mine = [b for b, row in enumerate(rows) if self.tasks.serves(name, row.request.submit.task)]
            for b in mine:
                if self.tasks.name(rows[b].request.submit.task) == name:
                    self._restart_if_changed(rows[b].request, loaded.state.hash)
            if len(mine) == len(rows):
                loaded.drafter.prefill(rows, states_TA)
            elif mine:
                parts = [states_TA[begins[b] : begins[b] + rows[b].count] for b in mine]
                loaded.drafter.prefill([rows[b] for b in mine], torch.cat(parts))
        for row in rows:
            row.request.draft.lag = 1  # if its draft has a cache, it is at the end of the chunk now

    def record_end(self, request: Request) -> None:
        """Show a request that ends to the drafts that learn from its answer."""
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
        restarted = [one.state.hash for one in self._drafts.values() if one.drafter.take_restarted()]
        for request in requests if restarted else ():
            if request.draft.draft in restarted:
                request.draft.draft = ""
        return restarted

    def _align(self) -> None:
        drafters = {name: loaded.drafter for name, loaded in self._drafts.items()}
        self.reads = union_reads(loaded.drafter.reads for loaded in self._drafts.values())
        for loaded in self._drafts.values():
            loaded.drafter.columns = columns_of(loaded.drafter.reads, self.reads, self._size)
        self.paged = {name: drafter for name, drafter in drafters.items() if isinstance(drafter, PagedDrafter)}
        self._assign_requests()

    def _assign_requests(self) -> None:
        """Tell each draft which requests it serves, and where its progress through their text is."""
        for name, loaded in self._drafts.items():
            # Called for every row of a step: without drafts of tasks, the default draft serves all requests.
            serves_all, drafter = name == DEFAULT_DRAFT and self.tasks.is_empty, loaded.drafter
            drafter.serves = any_request if serves_all else partial(self._serves, name)
            drafter.progress = own_progress if serves_all else partial(self._progress, name)

    def _progress(self, name: str, request: Request) -> DraftProgress:
        """Return the progress of a draft through the text of a request, as its own draft or as one that is merged."""
        if self.tasks.name(request.submit.task) == name:
            return request.draft
        identity, progress = self._drafts[name].state.hash, request.merged.get(name)
        if progress is None or progress.draft != identity:
            progress = request.merged[name] = _progress_behind(request, identity)
        return progress

    def _serves(self, name: str, request: Request) -> bool:
        return self.tasks.serves(name, request.submit.task)

    @staticmethod
    def _restart_if_changed(request: Request, identity: str) -> None:
        if request.draft.draft != identity:
            request.draft = _progress_behind(request, identity)


def _progress_behind(request: Request, identity: str) -> DraftProgress:
    """Return the progress of a draft that has processed nothing of the request's text."""
    behind = max(request.cached_bound, request.prefilled) + 1
    start = max(request.prefix, 1)  # the prefix holds no keys of this draft
    return DraftProgress(identity, lag=behind, start=start, features_from=request.draft.features_from)


# Merged drafts: several drafts that propose into the tree of one request.

# Order of the candidates of several drafts behind one node: by how often each was right lately.
#
# A candidate is a draft with a rank: the best token of the head, the second best of the lookup, and so on. The rates of
# a draft are those of the nodes where it proposes something.

PRIOR_NODES = 16.0
"""Weight of the prior, in nodes: rank r is right with probability 2^-(r + 1), whatever draft proposes it.

Equal rates are ordered by rank and then by draft, so drafts alternate until their rates are known.
"""
MOST_NODES = 512.0
"""Nodes after which all counts of a draft are halved, so that the order follows a change of the traffic."""


class Credit(NamedTuple):
    """Ranks of the tokens that a row emitted in one draft's own order, from the root on.

    ``ranks`` has MAX_RANKS for a miss, and -1 where the draft proposed nothing. ``draft`` is its name and ``hash`` its
    hash.
    """

    draft: str
    hash: str
    ranks: Sequence[int]


class Candidate(NamedTuple):
    """Candidate of a draft: position of the draft among those of a request, and rank in its own order."""

    draft: int
    rank: int


class MergeOrder:
    """Rates of all candidates, by task and by greedy and sampled requests."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, bool, str], list[float]] = {}

    def record(self, task: str, credit: Credit, *, sampled: bool) -> None:
        """Count the ranks of the tokens of one row for a draft."""
        counts = self._counts.setdefault((task, sampled, credit.draft), [0.0] * (MAX_RANKS + 1))
        for rank in credit.ranks:
            if rank >= 0:
                counts[rank] += 1
        if sum(counts) > MOST_NODES:
            counts[:] = [count / 2 for count in counts]

    def order(self, task: str, drafts: Sequence[str], *, sampled: bool) -> list[Candidate]:
        """Return all candidates of the named drafts, that of the highest rate first. Each draft's own order holds."""
        rates = [self._rates(task, draft, sampled=sampled) for draft in drafts]
        candidates = (Candidate(draft, rank) for draft in range(len(drafts)) for rank in range(MAX_RANKS))
        return sorted(candidates, key=lambda one: (-rates[one.draft][one.rank], one.rank, one.draft))

    def retain(self, tasks: Sequence[str]) -> None:
        """Forget the rates of all other tasks."""
        self._counts = {key: counts for key, counts in self._counts.items() if key[0] in tasks}

    def _rates(self, task: str, draft: str, *, sampled: bool) -> list[float]:
        """Return how often the candidates of a draft were right, by rank. A rate is at most that of a better rank."""
        counts = self._counts.get((task, sampled, draft), [0.0] * (MAX_RANKS + 1))
        total = PRIOR_NODES + sum(counts)
        rates = ((PRIOR_NODES / 2 ** (rank + 1) + counts[rank]) / total for rank in range(MAX_RANKS))
        return list(accumulate(rates, min))


# Drafts of each task: the one that it names, and those that are merged with it.


class TaskDrafts:
    """Choice of drafts by task. Without tasks all requests use the default draft, and nothing is merged."""

    def __init__(self, drafts: Mapping[str, LoadedDraft], *, merges: bool = True) -> None:
        """Start without tasks.

        Args:
            drafts: Drafts that can run, by name; names of others are ignored. They may change between steps.
            merges: False if the sampler cannot merge drafts. Each task then uses its own draft alone.
        """
        self._drafts, self._can_merge = drafts, merges
        self._by_task: dict[str, TaskMatch] = {}
        self.merges = False
        """True if some task merges drafts."""

    def set_tasks(self, tasks: Iterable[TaskMatch]) -> None:
        """Replace all tasks."""
        self._by_task = {task.name: task for task in tasks if task.draft or task.merge}
        self.merges = self._can_merge and any(task.merge for task in self._by_task.values())

    @property
    def is_empty(self) -> bool:
        """True if no task has drafts of its own."""
        return not self._by_task

    @property
    def merging(self) -> Sequence[str]:
        """Names of the tasks that merge drafts."""
        return [name for name, task in self._by_task.items() if task.merge]

    @property
    def merged_names(self) -> set[tuple[str, ...]]:
        """Names of the drafts of each task that merges some, sorted."""
        return {tuple(sorted({*self.names(task)})) for task in (self.merging if self.merges else ())}

    def name(self, task: str) -> str:
        """Return the name of the draft of a task: the default one if it names none, or one that cannot run."""
        match = self._by_task.get(task) if self._by_task else None
        return match.draft if match is not None and match.draft and match.draft in self._drafts else DEFAULT_DRAFT

    def merged(self, task: str) -> tuple[MergedDraft, ...]:
        """Return the drafts that are merged with the draft of a task and can run; none if that draft cannot run."""
        match = self._by_task.get(task) if self.merges else None
        if match is None or not self._can_propose(own := self.name(task)):
            return ()
        return tuple(one for one in match.merge if one.draft != own and self._can_propose(one.draft))

    def names(self, task: str) -> tuple[str, ...]:
        """Return the names of the draft of a task and of those that are merged with it."""
        return (self.name(task), *(one.draft for one in self.merged(task)))

    def _can_propose(self, draft: str) -> bool:
        """Return whether a draft can run and propose node by node. One in a process of its own drafts whole trees."""
        return draft in self._drafts and not self._drafts[draft].drafter.own_process

    def serves(self, draft: str, task: str) -> bool:
        """Return whether a draft proposes for a task, alone or merged with others."""
        return draft in self.names(task)


# Credit of the drafts of a step for the tokens that the target chose.


@dataclass(frozen=True, slots=True)
class CreditedDraft:
    """Draft that proposed for a row: its name, its hash, and its position among the drafts of the step."""

    name: str
    hash: str
    index: int


@dataclass(frozen=True, slots=True)
class OwnRanks:
    """Ranked tokens of each draft of a step, for the rows of tasks that merge drafts."""

    proposers: dict[int, tuple[CreditedDraft, ...]]
    """Drafts of such a row, by the index of the row."""
    ranked_FBNK: Tensor | None = None
    """Target ids behind every node in each draft's own order, on the host after ``host_copy``.

    None if one draft alone proposed for all rows.
    """
    host_copy: HostCopy = field(default_factory=HostCopy)

    def credit(
        self, row: int, path: Sequence[int], tokens: Sequence[int], ranks: Sequence[int], depth_limit: int
    ) -> tuple[Credit, ...]:
        """Wait for the copy, and return the credit of each draft of a row; empty if its task merges nothing.

        Args:
            row: Index of the row.
            path: Accepted nodes after the root.
            tokens: Emitted tokens: those of the path and the one after it.
            ranks: Ranks of these tokens in the common order.
            depth_limit: Largest number of accepted nodes. The token after a cut counts as a miss.
        """
        proposers = self.proposers.get(row, ())
        if self.ranked_FBNK is None or len(proposers) == 1:
            return tuple(Credit(one.name, one.hash, ranks[: len(tokens)]) for one in proposers)
        self.host_copy.wait()
        nodes = [0, *path[: len(tokens) - 1]]
        credits = []
        for one in proposers:
            ranked_NK = self.ranked_FBNK[one.index, row]
            ranks_D = [_rank(ranked_NK[node].tolist(), token) for node, token in zip(nodes, tokens, strict=True)]
            if len(tokens) > depth_limit and ranks_D[-1] >= 0:
                ranks_D[-1] = MAX_RANKS
            credits.append(Credit(one.name, one.hash, ranks_D))
        return tuple(credits)


def _rank(ranked: Sequence[int], token: int) -> int:
    """Return the rank of a token: MAX_RANKS if it is not among the candidates, -1 without candidates."""
    if ranked[0] < 0:
        return -1
    return ranked.index(token) if token in ranked else MAX_RANKS


# Proposals of several drafts in one step: each for rows of its own, or merged in the trees of the same rows.
#
# The drafts take turns level by level. Behind every node the candidates of all drafts of its row are put into one
# order, equal tokens once, and the children of the node take the first of them. All drafts read these tokens at the
# next level, so a draft continues paths that another one proposed.


def propose_together(
    rows: Sequence[Row],
    forest: Forest,
    parts: Sequence[tuple[Drafter, Forest]],
    orders: Sequence[Sequence[int]],
    state: DeviceState,
    sampler: Proposer,
) -> tuple[Tensor | None, Tensor]:
    """Draft the trees of a forest with several drafts.

    Args:
        rows: Rows of the step.
        forest: Trees of all rows.
        parts: Drafts of the step, and the trees that each proposes for: PLAIN for rows that it does not draft.
        orders: Order of the candidates of each row, as by `StepProposals.orders`.
        state: Device state of the running requests.
        sampler: Sampler of the step.

    Returns:
        The best target ids behind every expanded node in the common order, [B, N, K], None if no tree has a node; and
        those of each draft in its own order, [F, B, N, K]. Both are -1 elsewhere.
    """
    device = state.length_S.device
    expands = [drafter.begin(rows, own, sampler) for drafter, own in parts]
    own_FBNK = torch.stack([no_ranks(forest, device)] * len(parts))
    if not forest.levels:
        return None, own_FBNK
    slots_B = to_device([row.request.slot for row in rows], device)
    order_BM = to_device(orders, device, dtype=torch.int64)
    ranked_BNK = no_ranks(forest, device)
    for depth, level in enumerate(forest.levels):
        for f, ((_, own), expand) in enumerate(zip(parts, expands, strict=True)):
            if expand is None or depth >= len(own.levels):
                continue
            mine = own.levels[depth]
            ranked_RK = expand(depth, mine)
            own_FBNK[f, mine.batch_R, mine.node_R, : ranked_RK.shape[1]] = ranked_RK
        own_RFK = own_FBNK[:, level.batch_R, level.node_R].transpose(0, 1)
        ranked_BNK[level.batch_R, level.node_R] = in_order(own_RFK, order_BM[level.batch_R])
        write_children(ranked_BNK, level, slots_B, state)
    return ranked_BNK, own_FBNK


def in_order(own_RFK: Tensor, order_RM: Tensor) -> Tensor:
    """Return the best tokens [R, K] of several drafts in the common order of each row, from those of each draft."""
    return first_distinct(own_RFK.flatten(1).gather(1, order_RM), own_RFK.shape[-1])


def first_distinct(tokens_RM: Tensor, count: int) -> Tensor:
    """Return the first ``count`` distinct tokens of each row, [R, count]. -1 is no token, and pads the result."""
    repeated_RM = (tokens_RM[:, :, None] == tokens_RM[:, None, :]).tril(-1).any(-1)
    dropped_RM = repeated_RM | (tokens_RM < 0)
    first_RK = dropped_RM.to(torch.int8).argsort(dim=1, stable=True)[:, :count]
    return torch.where(dropped_RM.gather(1, first_RK), -1, tokens_RM.gather(1, first_RK))


# Drafts that propose in a step: the drafts of each request, their passes, their proposals and their credit.


@dataclass(frozen=True, slots=True)
class Proposals:
    """Proposals of the drafts of a step.

    ``ranked_BNK`` holds the best target ids behind every expanded node, [B, N, K], best first, -1 elsewhere; None if no
    tree has a node. ``own_ranks`` is None if no task of the step merges drafts. Of what runs before a graph, ``masks``
    are the grammar masks of the packed tokens, and the drafts took ``seconds``.
    """

    ranked_BNK: Tensor | None = None
    own_ranks: OwnRanks | None = None
    masks: HostMasks | None = None
    seconds: float = 0.0


class StepProposals:
    """Proposals of the loaded drafts, for each request by its own draft and those that are merged with it."""

    def __init__(self, drafts: Mapping[str, LoadedDraft], tasks: TaskDrafts, state: DeviceState) -> None:
        """Read the drafts, by name, and those of each task at every step; both may change between steps."""
        self.order = MergeOrder()
        self._drafts, self._tasks, self._state = drafts, tasks, state

    def ready(self, request: Request) -> bool:
        """Return whether a draft can propose for the request in the next step, and record which drafts do."""
        own = self._tasks.name(request.submit.task)
        ready = self._drafts[own].drafter.ready(request)
        others = (one.draft for one in self._tasks.merged(request.submit.task))
        merged = [name for name in others if self._drafts[name].drafter.ready(request)]
        request.proposers = (own, *merged) if ready else tuple(merged)
        return bool(request.proposers)

    def passes(self, rows: Sequence[Row], depths: Sequence[int]) -> int:
        """Return the number of draft passes of a step in which the trees of ``rows`` are drafted to ``depths``.

        A parallel draft needs one pass for any depth. The passes of merged drafts add up.
        """
        if not self._tasks.merges and not any(map(self._has_one_pass, self._drafts)):
            return max(depths)
        return max(map(self._row_passes, rows, depths, self.proposers(rows)))

    def extension(self, request: Request) -> int:
        """Return the depth to which drafts without passes extend the request's tree in the next step; 0 for none."""
        if not self._tasks.merges:
            return 0
        merged = (one for one in self._tasks.merged(request.submit.task) if one.draft in request.proposers)
        return max((one.depth for one in merged if not self._drafts[one.draft].drafter.needs_passes), default=0)

    def orders(self, rows: Sequence[Row], used: Sequence[str]) -> list[list[int]]:
        """Return the order of the candidates of each row, [B, F * MAX_RANKS]: indices of [F, MAX_RANKS] of ``used``.

        Those of drafts that propose nothing for a row are the last.
        """
        orders: dict[tuple[str, bool, tuple[str, ...]], list[int]] = {}
        keys = [
            (row.request.submit.task, not row.request.sampling_params.greedy, names)
            for row, names in zip(rows, self.proposers(rows), strict=True)
        ]
        for task, sampled, names in set(keys):
            drafts = [name for name in names if name in used]
            ordered = self.order.order(task, drafts, sampled=sampled)
            listed = [used.index(drafts[draft]) * MAX_RANKS + rank for draft, rank in ordered]
            rest = set(range(len(used) * MAX_RANKS)).difference(listed)
            orders[task, sampled, names] = [*listed, *sorted(rest)]
        return [orders[key] for key in keys]

    def own_ranks(
        self, rows: Sequence[Row], used: Sequence[str], own_FBNK: Tensor | None = None, *, overwritten: bool = False
    ) -> OwnRanks | None:
        """Return the ranks of the drafts ``used`` for rows with trees of tasks that merge drafts; None without any.

        The copy to the host is queued; ``overwritten`` is as for `to_host`.
        """
        if not self._tasks.merges:
            return None
        merging = {task for task in self._tasks.merging if self._tasks.merged(task)}
        # The drafts of a row without a tree need not run in the step.
        proposers = {
            b: tuple(
                CreditedDraft(name, self._drafts[name].state.hash, used.index(name)) for name in row.request.proposers
            )
            for b, row in enumerate(rows)
            if row.tree.drafted_depth and row.request.submit.task in merging
        }
        if not proposers or own_FBNK is None:
            return OwnRanks(proposers) if proposers else None
        (ranked_FBNK,), host_copy = to_host([own_FBNK], overwritten=overwritten)
        return OwnRanks(proposers, ranked_FBNK, host_copy)

    def record_credit(self, request: Request, credits: Iterable[Credit]) -> None:
        """Take over the credit of each draft for the last tokens of a request, for the order of later candidates."""
        for credit in credits:
            self.order.record(request.submit.task, credit, sampled=not request.sampling_params.greedy)

    def propose(self, rows: Sequence[Row], forest: Forest, sampler: Proposer) -> Proposals:
        """Draft the trees of all rows, each row by its own draft and those that are merged with it."""
        names = self.proposers(rows)
        used = sorted({name for row in names for name in row if name in self._drafts})
        if not used:
            return Proposals()
        if len(used) == 1 and len(set(names)) == 1:
            expand = self._drafts[used[0]].drafter.begin(rows, forest, sampler)
            return Proposals(draft_trees(rows, forest, self._state, expand), self.own_ranks(rows, used))
        parts = [(self._drafts[name].drafter, self._own_forest(name, names, forest)) for name in used]
        ranked_BNK, own_FBNK = propose_together(rows, forest, parts, self.orders(rows, used), self._state, sampler)
        return Proposals(ranked_BNK, self.own_ranks(rows, used, own_FBNK))

    def proposers(self, rows: Sequence[Row]) -> list[tuple[str, ...]]:
        """Return the drafts that propose for each row; without a tree those that must know of the request's tokens."""
        merges = self._tasks.merges
        names = {task: self._tasks.names(task) for task in {row.request.submit.task for row in rows}}
        if len(names) == 1 and not merges:
            return [*names.values()] * len(rows)
        return [
            row.request.proposers if merges and row.tree.drafted_depth else names[row.request.submit.task]
            for row in rows
        ]

    def _row_passes(self, row: Row, depth: int, names: Sequence[str]) -> int:
        """Return the number of draft passes of these drafts for the first ``depth`` levels of a row's tree."""
        planned = min(depth, row.tree.planned_part.drafted_depth)
        if len(names) == 1 and row.tree.planned is None:
            return min(planned, 1) if self._has_one_pass(names[0]) else planned
        heads = [name for name in names if self._drafts[name].drafter.needs_passes]
        return sum(min(planned, 1) if self._has_one_pass(name) else planned for name in heads)

    def _has_one_pass(self, name: str) -> bool:
        loaded = self._drafts.get(name)
        return loaded is not None and loaded.drafter.one_pass

    def _own_forest(self, name: str, names: Sequence[tuple[str, ...]], forest: Forest) -> Forest:
        """Return the trees that one draft proposes for: of the rows that it drafts, without what needs no pass."""
        passes = self._drafts[name].drafter.needs_passes
        own = (tree.planned_part if passes else tree for tree in forest.trees)
        mine = tuple(tree if name in row else PLAIN for tree, row in zip(own, names, strict=True))
        return forest_of(mine, forest.parents_BN.device)
