"""CUDA graphs of decode steps: which step runs through which graph, and when it is captured."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import torch

from specdecode_worker.contract import TreeShape
from specdecode_worker.core.device_state import DeviceState, to_host
from specdecode_worker.core.errors import RankLost
from specdecode_worker.core.request import Row, decoding_rows
from specdecode_worker.drafts.base import CapturedDrafter, PagedDrafter
from specdecode_worker.drafts.registry import DraftRegistry, OwnRanks, Proposals
from specdecode_worker.engine.captured_step import CapturedStep, StepParts
from specdecode_worker.engine.step_tables import (
    MOST_GRAPHS,
    NO_DRAFTS,
    OF_DEFAULT,
    SIBLINGS,
    WIDTHS,
    CatchUp,
    DraftInputs,
    GraphDrafts,
    GraphKey,
    MaskTable,
    at_least,
    key_of,
    key_outside,
    keys_of_shapes,
)
from specdecode_worker.engine.target import LEAST_TOP, QueuedRows, Target
from specdecode_worker.sampling.params import NO_FEATURES, Features, SamplingParams, features_of, truncates
from specdecode_worker.sampling.sampler import HostMasks
from specdecode_worker.sampling.trees import PLAIN, Tree, tree_of

log = logging.getLogger(__name__)

# Backends that make a step repeatable: CUDA graphs, or eager execution.
#
# The eager backend runs the same calls over the same tensors.

Work = Callable[[], None]
"""Callable that queues a step. It reads and writes tensors at fixed addresses."""


def _nothing() -> None:
    """Do nothing: a captured step is gone with the last reference to it."""


@dataclass(frozen=True, slots=True)
class Captured:
    """Captured work.

    ``replay`` queues it again, and ``release`` frees what other processes hold of it. ``seconds`` is its time measured
    at capture, 0 if not measured.
    """

    replay: Work
    seconds: float = 0.0
    release: Work = _nothing


class CaptureFailed(Exception):
    """A step cannot be captured; other steps can be, and steps captured before can be replayed."""


class RankCaptureFailed(CaptureFailed):
    """A step cannot be captured on one of several ranks; no rank may capture or replay any step from now on.

    The message gives the rank and its reason.
    """


class CaptureBackend(Protocol):
    """Backend that captures work for replay."""

    def capture(self, work: Work) -> Captured:
        """Capture ``work``, which may run several times meanwhile and must be harmless then.

        Raises:
            CaptureFailed: The work cannot be captured.
        """
        ...

    def clear(self) -> None:
        """Release what is shared by earlier captures; none of them is replayed again."""
        ...


class EagerBackend:
    """Backend without capture: every replay runs the work again. Used in tests."""

    def capture(self, work: Work) -> Captured:
        """Return ``work`` itself, untimed."""
        return Captured(work)

    def warm_up(self, work: Work) -> None:
        """Run ``work`` once."""
        work()

    def record(self, work: Work) -> Work:
        """Return ``work`` itself."""
        return work

    def timed(self, replay: Work) -> Captured:
        """Replay once, and return the replay, untimed."""
        replay()
        return Captured(replay)

    def clear(self) -> None:
        """Do nothing, since eager execution shares no state between captures."""


class CudaGraphBackend:
    """Backend that captures CUDA graphs.

    All graphs share one memory pool. This is safe because no two graphs run at once and none reads intermediate
    results of another.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, work: Work) -> Captured:
        """Run ``work`` once, capture it in a CUDA graph and time one replay.

        Raises:
            CaptureFailed: The device lacks memory for it or for a kernel, a kernel cannot be compiled, or the work
                calls what a capture forbids.
        """
        try:
            self.warm_up(work)
            return self.timed(self.record(work))
        except RankLost:  # from a signal, which may arrive here
            raise
        except Exception as error:  # errors of Triton, such as too little shared memory, are no RuntimeErrors
            self.clear()
            raise CaptureFailed(f"{type(error).__name__}: {' '.join(str(error).split())}") from error

    def warm_up(self, work: Work) -> None:
        """Run ``work`` once on the stream of captures and wait for it.

        This compiles kernels and allocates library workspaces, which is not possible during a capture.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.synchronize()

    def record(self, work: Work) -> Work:
        """Capture ``work`` in a CUDA graph and return its replay."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: CUDA calls of a thread that loads a draft meanwhile, or of NCCL's watchdog, which queries events
        # of earlier collectives (https://github.com/pytorch/pytorch/pull/104555), must not invalidate the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def timed(self, replay: Work) -> Captured:
        """Replay twice, and return the replay with the time of the second on the device.

        What is queued before it does not count: a draft that loads meanwhile copies its weights on the same stream.
        """
        replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        replay()
        end.record()
        end.synchronize()
        return Captured(replay, begin.elapsed_time(end) / 1000)

    def clear(self) -> None:
        """Start a new memory pool for the graphs to come, and undo what a capture that was broken off leaves in torch.

        Libraries may keep memory of the old pool after its last graph is gone; such a pool accepts no new graph. torch
        ends neither the pool's allocations nor the generator's capture if CUDA refuses the captured graph; until they
        end, its allocator gives no cached memory back for other sizes.
        """
        device = torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device, self._pool)
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())
        self._pool = torch.cuda.graph_pool_handle()
        gc.collect()
        torch.cuda.empty_cache()


StagedBackend = CudaGraphBackend | EagerBackend
"""Backend whose capture can be run stage by stage, so that several ranks can agree between the stages."""


def capture_backend(device: torch.device) -> StagedBackend | None:
    """Return the backend that captures the steps of ``device``, None if its steps cannot be captured."""
    return CudaGraphBackend() if device.type == "cuda" else None


# Choice for steps that mix decoding rows with prompt chunks: a graph and a pass of the chunks, or one eager pass.
#
# The graph saves the host the eager calls of the decoding rows, but the weights are read twice. One eager pass reads
# them once, but the device waits wherever the host queues calls more slowly than it runs them. The estimates here are
# those of docs/dev/gpu-engine.md.

HOST_SECONDS_OF_LAYER = 0.1e-3
"""Host time to queue a layer of the target eagerly: nine launches of about 10 us."""
HOST_SECONDS_OF_DRAFT_PASS = 0.6e-3
"""Host time to queue a draft pass eagerly: one layer, its logits, proposals and tables."""
HOST_SECONDS_OF_STEP = 2e-3
"""Host time to queue the rest of an eager step: packing, sampling, acceptance and commit."""
TOKENS_OF_ONE_READ = 150
"""Number of tokens whose matrix products take as long as one read of the weights; more take longer. From the rates of
an H200; other GPUs lie between 110 and 300."""


def is_replay_faster(
    graph_seconds: float, verify_seconds: float, chunk_tokens: int, *, layers: int, passes: int
) -> bool:
    """Return whether a graph and a pass of the prompt chunks take less time than one eager pass of all rows.

    Args:
        graph_seconds: Time of the graph, measured at its capture.
        verify_seconds: Part of it that is not drafting. A pass of the target over few tokens takes as long.
        chunk_tokens: Tokens of the chunks.
        layers: Layers of the target.
        passes: Draft passes of the graph, which an eager step would queue one by one.
    """
    replayed = graph_seconds + verify_seconds * max(1.0, chunk_tokens / TOKENS_OF_ONE_READ)
    eager = HOST_SECONDS_OF_STEP + layers * HOST_SECONDS_OF_LAYER + passes * HOST_SECONDS_OF_DRAFT_PASS
    return replayed < eager


# Decision whether a graph can run a step, which one, and which part of the step runs outside of it.
#
# `StepPlanner.plan` is the only place that sends a step to the eager path, apart from the reasons that depend on the
# captured graph (`EagerReason.NEW`, `LIMIT`, `FAILED` and `MIXED`, which `StepGraphs` adds). docs/dev/gpu-engine.md
# explains every reason.

HISTORIES = (1024, 4096, 16384, 65536)
"""Numbers of text positions that graphs with penalties count tokens in; the longest text is another one."""


class EagerReason(StrEnum):
    """Reason why no graph runs a step."""

    PREFILL = "prefill"
    """All rows are chunks of prompts."""
    MIXED = "mixed"
    """Decoding rows run beside chunks of prompts, and one eager pass of all rows is faster."""
    SAMPLER = "sampler"
    """A row is sampled in several rounds, and its draft runs before the graph and keeps its probabilities there."""
    BIAS = "bias"
    """A request has more allowed, biased or blocked tokens than the tables have columns."""
    LOGPROBS = "logprobs"
    """A request wants more log-probabilities than the tables have columns."""
    SIZE = "size"
    """More rows than the largest bucket, or more packed tokens than a graph may have."""
    NEW = "new"
    """The graph is not captured yet."""
    LIMIT = "limit"
    """The graph is not captured, and too few steps since the last plan needed it to replace one of those that are."""
    FAILED = "failed"
    """The graph could not be captured; on several devices, no graph is used after one that a rank could not capture."""


class OutsideReason(StrEnum):
    """Reason why the draft passes of a step run before its graph, which then only verifies."""

    GRAMMAR = "grammar"
    """All rows that draft follow a grammar, or the passes cannot have a graph of their own beside those that do. The
    host reads the drafted tokens, since the masks follow from them."""
    METHOD = "method"
    """The passes of the draft's method are not captured."""
    CATCH_UP = "catch-up"
    """A draft that proposes for no row must process tokens before it loses the states that it needs."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Graph that can run a step.

    ``drafters`` run in the graph, and each catches up with its entry of ``catch_ups``. ``drafts`` is a graph of the
    draft passes alone, which runs before this one. ``outside`` is the reason why drafts run before the graph without
    one of their own, None if they do not.
    """

    key: GraphKey
    catch_ups: tuple[CatchUp, ...] = ()
    drafters: tuple[CapturedDrafter, ...] = ()
    outside: OutsideReason | None = None
    drafts: StepPlan | None = None

    def without_drafts(self) -> StepPlan:
        """Return the plan of the same step whose drafts run without a graph."""
        return StepPlan(self.key, outside=OutsideReason.GRAMMAR)


@dataclass(frozen=True, slots=True)
class _Running:
    """Draft that runs in a step, and the indices of the rows that it runs for."""

    name: str
    drafter: PagedDrafter
    rows: list[int]


class StepPlanner:
    """Planner of steps.

    Args of the constructor: loaded drafts, row buckets of graphs, most packed tokens of a graph, longest text with its
    tree, and whether the sampler is ``coupled``.
    """

    def __init__(
        self, drafts: DraftRegistry, rows: Sequence[int], max_tokens: int, longest_text: int, *, coupled: bool
    ) -> None:
        self._drafts, self._rows, self._max_tokens, self._coupled = drafts, tuple(rows), max_tokens, coupled
        self._histories = (*(size for size in HISTORIES if size < longest_text), longest_text)

    def plan(self, rows: Sequence[Row]) -> StepPlan | EagerReason:
        """Return the graph that can run the decoding rows, or the reason why none can. Changes nothing."""
        if not (decoding := decoding_rows(rows)):
            return EagerReason.PREFILL
        rows = rows[:decoding]
        batch = [row.request.sampling_params for row in rows]
        bucket = at_least(len(rows), self._rows)
        if bucket is None:
            return EagerReason.SIZE
        trees = list({id(row.tree): row.tree for row in rows}.values())  # the rows of a task share a tree
        features = self._features(rows, trees, batch)
        if isinstance(features, EagerReason):
            return features
        plan = self._plan(rows, trees, bucket, features, cuts=truncates(batch))
        if plan is None or plan.key.most_tokens > self._max_tokens:
            return EagerReason.SIZE
        if features.rounds and plan.outside is not None and any(row.tree.drafted_depth for row in rows):
            return EagerReason.SAMPLER
        return plan

    def _features(
        self, rows: Sequence[Row], trees: Sequence[Tree], batch: Sequence[SamplingParams]
    ) -> Features | EagerReason:
        """Return the optional parts of the step, or the reason why a graph cannot have them."""
        tops = [top for row in rows if (top := row.request.submit.sampling.logprobs) is not None]
        if max(tops, default=0) > LEAST_TOP:
            return EagerReason.LOGPROBS
        siblings = at_least(1 + max([max(tree.ranks) for tree in trees]), SIBLINGS)
        assert siblings is not None, "a node has no more children than ranks"

        def history() -> int:
            return at_least(1 + max(row.request.cached_bound for row in rows), self._histories) or 0

        needed = features_of(batch, history, siblings, coupled=self._coupled)
        if needed is NO_FEATURES and not tops:
            return needed
        width = at_least(needed.adjusts, WIDTHS) if needed.adjusts else 0
        if width is None:
            return EagerReason.BIAS
        return replace(needed, adjusts=width, logprobs=bool(tops))

    def _plan(
        self, rows: Sequence[Row], trees: Sequence[Tree], bucket: int, features: Features, *, cuts: bool
    ) -> StepPlan | None:
        """Return the graph in a bucket of rows, None if a draft must catch up with more tokens than any graph has."""
        names = self._drafts.proposals.proposers(rows)
        running = self._running(rows, names)
        if (reason := self._outside(rows, names, running)) is not None:
            return StepPlan(key_outside(bucket, trees, cuts=cuts, features=features), outside=reason)
        if not features.masks:
            return self._whole(rows, trees, names, running, bucket, features, cuts=cuts)
        plan = StepPlan(key_outside(bucket, trees, cuts=cuts, features=features))
        if not running:
            return plan
        drafts = None
        if not features.rounds and _drafts_unguided(rows):
            own = replace(features, logprobs=False)
            drafts = self._whole(rows, trees, names, running, bucket, own, cuts=cuts)
        if drafts is None or drafts.key.most_tokens > self._max_tokens:
            return plan.without_drafts()
        return replace(plan, drafts=replace(drafts, key=replace(drafts.key, only_drafts=True)))

    def _whole(
        self,
        rows: Sequence[Row],
        trees: Sequence[Tree],
        names: Sequence[tuple[str, ...]],
        running: Sequence[_Running],
        bucket: int,
        features: Features,
        *,
        cuts: bool,
    ) -> StepPlan | None:
        """Return the graph with the passes of the drafts that run; None if one of them must catch up too far."""
        drafters, catch_ups, longest = {}, [], 0
        for draft in running:
            drafter, counts = draft.drafter, [0] * len(rows)
            assert isinstance(drafter, CapturedDrafter), "other drafts run before the graph"
            drafters[draft.name] = drafter
            behind = drafter.catch_up_counts([rows[b].request for b in draft.rows])
            for b, count in zip(draft.rows, behind, strict=True):
                counts[b] = count
            longest = max(longest, *counts)
            masks, proposes = tuple[int, ...](), tuple[bool, ...]()
            has_masks = drafter.one_pass and not drafter.block
            if has_masks or len(running) > 1:
                depths = [
                    row.tree.drafted_depth if draft.name in own else 0 for row, own in zip(rows, names, strict=True)
                ]
                masks = tuple([max(depth - 1, 0) for depth in depths]) if has_masks else ()
                proposes = tuple([depth > 0 for depth in depths]) if len(running) > 1 else ()
            catch_ups.append(CatchUp(tuple(counts), masks=masks, before=drafter.block, proposes=proposes))
        key = key_of(bucket, trees, longest, cuts=cuts, drafts=_graph_drafts(drafters), features=features)
        return None if key is None else StepPlan(key, tuple(catch_ups), tuple(drafters.values()))

    def _outside(
        self, rows: Sequence[Row], names: Sequence[tuple[str, ...]], running: Sequence[_Running]
    ) -> OutsideReason | None:
        """Return the reason why drafts run before the graph without one, None if they run in one or not at all.

        ``names`` are those of the drafts that propose for each row.
        """
        drafting = {name for row, own in zip(rows, names, strict=True) if row.tree.drafted_depth for name in own}
        if any(not isinstance(self._drafts.paged.get(name), CapturedDrafter) for name in drafting):
            return OutsideReason.METHOD
        return None if all(draft.name in drafting for draft in running) else OutsideReason.CATCH_UP

    def _running(self, rows: Sequence[Row], names: Sequence[tuple[str, ...]]) -> list[_Running]:
        """Return the drafts with a cache that run in a step, to draft or to catch up, by name."""
        running, tasks = [], {row.request.submit.task for row in rows}
        for name, drafter in sorted(self._drafts.paged.items()):
            served = {task for task in tasks if self._drafts.tasks.serves(name, task)}
            mine = [b for b, row in enumerate(rows) if served == tasks or row.request.submit.task in served]
            trees = [rows[b].tree if name in names[b] else PLAIN for b in mine]
            behind = drafter.drafting([rows[b] for b in mine], trees)
            if behind:
                running.append(_Running(name, drafter, [mine[index] for index in behind]))
        return running


def _graph_drafts(drafters: Mapping[str, CapturedDrafter]) -> GraphDrafts:
    """Return what a graph key holds of the drafts whose passes the graph has."""
    kinds = {(one.one_pass, one.block) for one in drafters.values()}
    return GraphDrafts(tuple(drafters), masks=(True, False) in kinds, block=(True, True) in kinds)


def _can_run(key: GraphKey, drafters: Mapping[str, CapturedDrafter]) -> bool:
    """Return whether drafts have the passes of a key. One of the same name may be of another kind since a swap."""
    if not drafters.keys() >= set(key.drafts):
        return False
    kinds = _graph_drafts({name: drafters[name] for name in key.drafts})
    return (key.catch_up_per_row > 0, key.block) == (kinds.masks, kinds.block)


def _drafts_unguided(rows: Sequence[Row]) -> bool:
    """Return whether a row without a grammar drafts.

    If none does, drafts run before the graph, where they propose under the masks of all nodes and not of the roots
    alone. More of their tokens are accepted then.
    """
    return any(row.tree.drafted_depth and not row.request.sampling_params.guided for row in rows)


# Selection, capture and replay of CUDA graphs for decode steps.
#
# Steps that no graph can run are executed eagerly by the caller; they are counted by reason. So are chunks of prompts,
# which a graph never runs.

CAPTURE_AFTER_STEPS = 3
"""Number of steps with the same key after which it is captured while serving. A capture costs about 3 eager steps."""


SWAP_SECONDS = 1.0
"""Most seconds of captures at a draft swap, during which no request gets a token. Other keys are captured later."""


@dataclass(slots=True, eq=False)
class Graph:
    """Decode step and its captured form.

    The time of the step was measured on padding rows alone. It is still a fair estimate, because padding rows also
    read all weights. ``needed`` is the number of steps since the last plan that needed this graph, replayed or not, and
    ``draft_seconds`` the estimated time of its draft passes.
    """

    step: CapturedStep
    captured: Captured
    needed: int = 0
    replays: int = 0
    draft_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ReadyStep:
    """Plan of a step and the captured graph that runs its first ``decoding`` rows; the others are prompt chunks.

    ``drafts`` is the graph of the draft passes, if they have one of their own.
    """

    plan: StepPlan
    graph: Graph
    decoding: int
    drafts: Graph | None = None


class StepGraphs:
    """All CUDA graphs of one engine.

    ``replayed`` counts the steps that a graph ran, ``mixed`` those of them with prompt chunks beside the graph, and
    ``outside`` those whose drafts ran before the graph, by reason. ``eager`` counts the steps that no graph ran, by
    reason.
    """

    def __init__(
        self,
        target: Target,
        drafts: DraftRegistry,
        state: DeviceState,
        backend: CaptureBackend,
        *,
        rows: Sequence[int],
        max_tokens: int,
        capture_after_steps: int = CAPTURE_AFTER_STEPS,
        coupled: bool = True,
    ) -> None:
        """Create an empty set of graphs.

        Args:
            target: Target model that verifies the drafts.
            drafts: Loaded drafts.
            state: Device state of the running requests.
            backend: Backend that captures steps.
            rows: Numbers of rows to capture, as from `row_buckets`.
            max_tokens: Maximum number of packed tokens of one graph.
            capture_after_steps: Number of steps with the same key after which it is captured while serving.
            coupled: The sampler is ``coupled``, else ``mss``.
        """
        self._target, self._drafts, self._state, self._backend = target, drafts, state, backend
        self._rows, self._max_tokens, self._capture_after_steps = tuple(rows), max_tokens, capture_after_steps
        self._coupled = coupled
        self._planner = StepPlanner(drafts, self._rows, max_tokens, state.scratch, coupled=coupled)
        self._mask_table: MaskTable | None = None
        """Table of grammar masks, which all graphs share. It is allocated when the first of them needs it."""
        self._graphs: dict[GraphKey, Graph] = {}
        self._drafters: dict[str, CapturedDrafter] = {}
        """Drafters of the captured passes, by name."""
        self._key_counts: Counter[GraphKey] = Counter()
        """Number of steps since the last plan that needed each key that has no graph."""
        self._failed = False
        """True after a rank could not capture a step. Then none is captured again."""
        self._refused: set[GraphKey] = set()
        """Keys whose steps could not be captured; they run without a graph."""
        self.replayed = self.mixed = 0
        self.outside: Counter[OutsideReason] = Counter()
        self.eager: Counter[EagerReason] = Counter()

    def __len__(self) -> int:
        return len(self._graphs)

    def release(self) -> None:
        """Release the graphs of this process, for its end; no step runs afterwards."""
        self._graphs.clear()

    def clear(self) -> None:
        """Discard all graphs."""
        self._graphs.clear()
        self._backend.clear()
        self._key_counts.clear()
        self._refused.clear()
        self._drafters.clear()

    def swap_draft(self, name: str, wanted: Iterable[TreeShape], *, states_changed: bool) -> None:
        """Discard the graphs that a swap of the draft ``name`` invalidates, and capture what is needed instead.

        These are the graphs with passes of that draft and, if the stored target states have changed, all graphs, since
        graphs refer to tensors of both. What is captured are the most used of the discarded keys and those of the tree
        shapes ``wanted``, for at most SWAP_SECONDS. Call this after the registry has the new draft, with no step in
        flight. Before the first plan, and where all captures failed, there are no graphs, and none are captured.
        """
        drafter = self._drafts.paged.get(name)
        if drafter is self._drafters.get(name) and not states_changed:
            return
        if not self._graphs:
            self._discard(name, ())
            return
        gone = [key for key in self._graphs if states_changed or name in key.drafts]
        used = [key for key in gone if self._graphs[key].replays]
        used.sort(key=lambda key: self._graphs[key].replays, reverse=True)
        if len(gone) == len(self._graphs):
            self.clear()
        else:
            self._discard(name, gone)
        keys = self._missing([*used, *self._planned_keys(wanted)])
        if keys and not self._graphs:  # the others reuse the memory of the largest
            keys.insert(0, keys.pop(keys.index(max(keys, key=_size_order))))
        self._capture_all(keys, SWAP_SECONDS)

    def _discard(self, name: str, gone: Iterable[GraphKey]) -> None:
        """Discard some graphs, and what is known of all keys with passes of the draft ``name``."""
        for key in gone:
            self._graphs.pop(key).captured.release()
        for key in [key for key in self._key_counts if name in key.drafts]:
            del self._key_counts[key]
        self._refused = {key for key in self._refused if name not in key.drafts}
        self._drafters.pop(name, None)

    def count_anew(self) -> None:
        """Count from now on how often each key is needed: with another plan, others may be."""
        self._key_counts.clear()
        for graph in self._graphs.values():
            graph.needed = 0

    def prepare(self, wanted: Iterable[TreeShape]) -> None:
        """Capture the graphs of the tree shapes ``wanted`` and of plain steps, the largest first.

        Graphs share one memory pool, so the smaller ones reuse the memory of the largest. If there are more than
        MOST_GRAPHS keys, plain steps have priority and sampling with top-k, top-p or min-p comes last.
        """
        self._capture_all(sorted(self._missing(self._planned_keys(wanted)), key=_size_order, reverse=True))

    def _missing(self, keys: Iterable[GraphKey]) -> list[GraphKey]:
        """Return the first of ``keys`` that are not captured and that loaded drafts can run, as many as may be."""
        drafters, room = self._captured_drafters(), max(MOST_GRAPHS - len(self._graphs), 0)
        missing = [
            key
            for key in dict.fromkeys(keys)
            if key not in self._graphs and key not in self._refused and _can_run(key, drafters)
        ]
        if len(missing) > room:
            log.warning("%d graphs are beyond %d and are captured when needed", len(missing) - room, MOST_GRAPHS)
        return missing[:room]

    def _capture_all(self, keys: Sequence[GraphKey], most_seconds: float = math.inf) -> None:
        """Capture ``keys`` in this order, for at most about ``most_seconds``.

        Only the first capture may take longer, since how long a capture takes is known from those before it.
        """
        began, longest = time.monotonic(), 0.0
        for index, key in enumerate(keys, start=1):
            start = time.monotonic()
            if self._failed or start - began + longest > most_seconds:
                return
            if self._capture(key) is not None:
                log.info("captured graph %d of %d: %s", index, len(keys), key)
            longest = max(longest, time.monotonic() - start)

    def _captured_drafters(self) -> dict[str, CapturedDrafter]:
        """Return the loaded drafts whose passes graphs have, by name."""
        return {name: one for name, one in self._drafts.paged.items() if isinstance(one, CapturedDrafter)}

    def _planned_keys(self, wanted: Iterable[TreeShape]) -> list[GraphKey]:
        """Return the keys of the tree shapes ``wanted`` and of plain steps, the most important first."""
        drafters = self._captured_drafters()
        together = {names for names in self._drafts.tasks.merged_names if drafters.keys() >= set(names)}
        together |= {(name,) for name in drafters}
        sets = [_graph_drafts({name: drafters[name] for name in names}) for names in together]
        shapes = {(PLAIN, OF_DEFAULT), *((tree_of(shape), drafts) for shape in wanted for drafts in sets)}
        cuts = (False, True) if self._coupled else (False,)
        return keys_of_shapes(self._rows, shapes, self._max_tokens, cuts=cuts)

    def plan(self, rows: Sequence[Row]) -> ReadyStep | None:
        """Return the graph that runs the decoding rows of a step. Return None and count the reason if there is none.

        A graph that is needed often is captured here.
        """
        ready = self._ready(rows)
        if not isinstance(ready, EagerReason):
            return ready
        if ready not in self.eager:
            log.info("a step runs without a graph: %s", ready)
        self.eager[ready] += 1
        return None

    def replay(
        self,
        ready: ReadyStep,
        rows: tuple[Row, ...],
        depth_limits: Sequence[int] | None,
        *,
        ranked: bool,
        proposals: Proposals | None = None,
    ) -> QueuedRows:
        """Queue the decoding rows of a step by their graph.

        Args:
            ready: Graph of the step, from `plan`.
            rows: All rows of the step, of which the graph runs the first ones.
            depth_limits: Maximum accepted depth of each row, as in `rows_of`; None for no limit.
            ranked: Copy the ranked draft tokens to the host too.
            proposals: Results of the drafts that ran before the graph, if the plan has any.
        """
        self.mixed += ready.decoding < len(rows)
        rows = rows[: ready.decoding]
        plan, proposals = ready.plan, proposals or Proposals()
        self._write_inputs(ready.graph, plan, rows, depth_limits, proposals.masks)
        if plan.key.outside:
            ready.graph.step.store_ranks(proposals.ranked_BNK)
        ready.graph.captured.replay()
        ready.graph.replays += 1
        self.replayed += 1
        if plan.outside is not None:
            self.outside[plan.outside] += 1
        # The results are copied before the next replay overwrites the static tensors.
        step, count = ready.graph.step, len(rows)
        own_ranks = proposals.own_ranks or self._own_ranks(ready.graph, rows)
        output_logprobs = step.logprobs.queue_read(rows) if step.logprobs is not None else None
        results = (step.out, step.ranked_BNK) if ranked and step.ranked_BNK is not None else (step.out,)
        (out, *more), host_copy = to_host(results, overwritten=True)
        return QueuedRows(
            rows=rows,
            outcome_BC=out[:count],
            ranked_BNK=more[0][:count] if more else None,
            host_copy=host_copy,
            output_logprobs=output_logprobs,
            own_ranks=own_ranks,
            draft_seconds=proposals.seconds or ready.graph.draft_seconds,
        )

    def replay_drafts(self, ready: ReadyStep, rows: tuple[Row, ...], masks: HostMasks) -> Proposals:
        """Queue the draft passes of a step by their own graph, before the one that verifies.

        Args:
            ready: Graphs of the step, from `plan`.
            rows: Decoding rows of the step.
            masks: Grammar masks of the roots.

        Returns:
            The proposals, without masks.
        """
        graph, plan = ready.drafts, ready.plan.drafts
        assert graph is not None, "the drafts have a graph"
        assert plan is not None, "the drafts have a graph"
        self._write_inputs(graph, plan, rows, None, masks)
        graph.captured.replay()
        graph.replays += 1
        assert graph.step.ranked_BNK is not None, "a key with passes has ranks"
        return Proposals(
            graph.step.ranked_BNK[: len(rows)], self._own_ranks(graph, rows), seconds=graph.captured.seconds
        )

    def _own_ranks(self, graph: Graph, rows: tuple[Row, ...]) -> OwnRanks | None:
        """Queue the copy of the ranks of each draft of a step, if tasks of its rows merge some."""
        own_FBNK = graph.step.own_FBNK
        mine_FBNK = None if own_FBNK is None else own_FBNK[:, : len(rows)]
        return self._drafts.proposals.own_ranks(rows, graph.step.key.drafts, mine_FBNK, overwritten=True)

    def _write_inputs(
        self,
        graph: Graph,
        plan: StepPlan,
        rows: tuple[Row, ...],
        depth_limits: Sequence[int] | None,
        masks: HostMasks | None,
    ) -> None:
        """Queue the copy of the inputs of a graph, and record that its drafts catch up."""
        requests, catch_ups, names = [row.request for row in rows], [], plan.key.drafts
        for drafter, catch_up in zip(plan.drafters, plan.catch_ups, strict=True):
            counts = catch_up.counts
            behind = requests if all(counts) else [one for one, n in zip(requests, counts, strict=True) if n]
            drafter.record_catch_up(behind, [count for count in counts if count])
            starts = tuple([drafter.first_key(request) for request in requests])
            catch_ups.append(CatchUp(counts, starts, catch_up.masks, catch_up.before, catch_up.proposes))
        if masks is not None:
            self._masks().write(masks.table_NW)
        orders = self._drafts.proposals.orders(rows, names) if len(names) > 1 else []
        drafts = DraftInputs(tuple(catch_ups), orders)
        graph.step.inputs.write(tuple(row.tree for row in rows), requests, drafts, depth_limits, masks)

    def _ready(self, rows: Sequence[Row]) -> ReadyStep | EagerReason:
        plan = self._planner.plan(rows)
        if isinstance(plan, EagerReason):
            return plan
        graph = self._graph(plan.key)
        if isinstance(graph, EagerReason):
            return graph
        drafts = self._graph(plan.drafts.key, beside=plan.key) if plan.drafts is not None else None
        if self._failed:  # that capture discarded all graphs
            return EagerReason.FAILED
        if isinstance(drafts, EagerReason):
            plan, drafts = plan.without_drafts(), None
        decoding = decoding_rows(rows)
        if decoding < len(rows) and not self._is_replay_faster(graph, sum(row.count for row in rows[decoding:])):
            return EagerReason.MIXED
        return ReadyStep(plan, graph, decoding, drafts)

    def _is_replay_faster(self, graph: Graph, chunk_tokens: int) -> bool:
        """Return whether a graph and a pass of the prompt chunks take less time than one eager pass of all rows."""
        key, seconds, layers = graph.step.key, graph.captured.seconds, self._target.layers
        passes = len(key.drafts) * (1 if key.catch_up_per_row or key.block else key.passes)
        verify_seconds = seconds - graph.draft_seconds
        return is_replay_faster(seconds, verify_seconds, chunk_tokens, layers=layers, passes=passes)

    def _graph(self, key: GraphKey, beside: GraphKey | None = None) -> Graph | EagerReason:
        """Return a graph, captured now if it is needed often enough, or the reason why there is none.

        Beyond MOST_GRAPHS, the one that the fewest steps needed gives way to one that over twice as many needed. It is
        neither the one of ``beside``, which runs in the same step, nor one of plain steps, whose times are needed.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            graph.needed += 1
            return graph
        self._key_counts[key] += 1
        if self._failed or key in self._refused:
            return EagerReason.FAILED
        if self._key_counts[key] < self._capture_after_steps:
            return EagerReason.NEW
        rarest = None
        if len(self._graphs) >= MOST_GRAPHS:
            others = (one for one in self._graphs if one != beside and not one.is_plain)
            use = {one: (self._graphs[one].needed, self._graphs[one].replays) for one in others}
            rarest = min(use, key=use.__getitem__, default=None)
            if rarest is None or 2 * use[rarest][0] >= self._key_counts[key]:
                return EagerReason.LIMIT
        graph = self._capture(key)
        if graph is None:
            return EagerReason.FAILED
        if rarest is not None:
            self._key_counts[rarest] = use[rarest][0]
            self._graphs.pop(rarest).captured.release()
        log.info("captured a graph that was asked for: %s", key)
        return graph

    def _capture(self, key: GraphKey) -> Graph | None:
        """Capture a graph for ``key``. The step that runs during the capture has padding rows only.

        Return None if it cannot be captured. If a rank of several cannot, discard all graphs for good.
        """
        loaded = self._captured_drafters()
        drafters = {name: loaded[name] for name in key.drafts}
        for name, drafter in drafters.items():
            assert self._drafters.setdefault(name, drafter) is drafter, "graphs are discarded when drafts change"
        masks_NW = self._masks().view() if key.features.masks else None
        parts = StepParts(self._target, tuple(drafters.values()), self._state, self._drafts.reads, masks_NW)
        step = CapturedStep(key, parts)
        step.inputs.write((), [], NO_DRAFTS, None)
        try:
            captured = self._backend.capture(step.run)
        except RankCaptureFailed as error:
            log.warning("steps run without graphs from now on, as %s cannot be captured: %s", key, error)
            self._failed = True
            self.clear()
            return None
        except CaptureFailed as error:
            log.warning("steps like %s run without a graph, as it cannot be captured: %s", key, error)
            self._refused.add(key)
            return None
        graph = self._graphs[key] = Graph(step, captured, needed=self._key_counts.pop(key, 0))
        for one in self._graphs.values():
            one.draft_seconds = self._draft_seconds(one)
        return graph

    def _masks(self) -> MaskTable:
        """Return the table of grammar masks, with a mask for every packed token and one that allows all tokens."""
        if self._mask_table is None:
            device = self._state.length_S.device
            self._mask_table = MaskTable(self._max_tokens + 1, self._target.vocab_size, device)
        return self._mask_table

    def _draft_seconds(self, graph: Graph) -> float:
        """Return the measured time of the step minus that of a plain step with as many rows, in seconds.

        This overestimates the draft time if no graph of the plain step exists.
        """
        key = graph.step.key
        if not key.passes:
            return 0.0
        plain = self._graphs.get(GraphKey(key.rows, 1, cuts=key.cuts))
        plain_seconds = plain.captured.seconds if plain is not None else 0.0
        return max(graph.captured.seconds - plain_seconds, 0.0)


def _size_order(key: GraphKey) -> tuple[int, GraphKey]:
    """Return the key by which graphs are ordered by their size."""
    return key.tokens, key
