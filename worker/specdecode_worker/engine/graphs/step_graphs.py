"""Selection, capture and replay of CUDA graphs for decode steps.

Steps that no graph can run are executed eagerly by the caller; they are counted by reason. So are chunks of prompts,
which a graph never runs.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from specdecode_worker.contract import TreeShape
from specdecode_worker.engine.batch import Row, decoding_rows
from specdecode_worker.engine.drafts.draft_registry import DraftRegistry
from specdecode_worker.engine.drafts.drafter import PagedDrafter
from specdecode_worker.engine.graphs.capture_backends import CaptureBackend, Captured, CaptureFailed, RankCaptureFailed
from specdecode_worker.engine.graphs.captured_step import CapturedStep, Proposals, StepParts
from specdecode_worker.engine.graphs.feature_tables import HostMasks, MaskTable
from specdecode_worker.engine.graphs.graph_key import GraphKey, keys_of_shapes
from specdecode_worker.engine.graphs.mixed_steps import is_replay_faster
from specdecode_worker.engine.graphs.row_tables import CatchUp
from specdecode_worker.engine.graphs.step_plan import EagerReason, OutsideReason, StepPlan, StepPlanner
from specdecode_worker.engine.memory.memory_budget import MOST_GRAPHS
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.engine.step.host_copy import to_host
from specdecode_worker.engine.step.launched_step import QueuedRows
from specdecode_worker.engine.step.target_pass import Target
from specdecode_worker.speculation.trees import PLAIN, tree_of

log = logging.getLogger(__name__)

CAPTURE_AFTER_STEPS = 3
"""Number of steps with the same key after which it is captured while serving. A capture costs about 3 eager steps."""


SWAP_SECONDS = 1.0
"""Most seconds of captures at a draft swap, during which no request gets a token. Other keys are captured later."""


@dataclass(slots=True, eq=False)
class Graph:
    """Decode step and its captured form.

    The time of the step was measured on padding rows alone. It is still a fair estimate, because padding rows also
    read all weights.
    """

    step: CapturedStep
    captured: Captured
    replays: int = 0


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
        self._drafters: dict[str, PagedDrafter] = {}
        """Drafters of the captured passes, by name."""
        self._key_counts: Counter[GraphKey] = Counter()
        self._failed = False
        """True after a rank could not capture a step. Then none is captured again."""
        self._refused: set[GraphKey] = set()
        """Keys whose steps could not be captured; they run without a graph."""
        self.replayed = self.mixed = 0
        self.outside: Counter[OutsideReason] = Counter()
        self.eager: Counter[EagerReason] = Counter()

    def __len__(self) -> int:
        return len(self._graphs)

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
        flight. Before the first plan there are no graphs, and none are captured.
        """
        drafter = self._drafts.paged().get(name)
        if not self._graphs or (drafter is self._drafters.get(name) and not states_changed):
            return
        gone = [key for key in self._graphs if states_changed or key.has_passes_of(name)]
        used = [key for key in gone if self._graphs[key].replays]
        used.sort(key=lambda key: self._graphs[key].replays, reverse=True)
        if len(gone) == len(self._graphs):
            self.clear()
        else:
            self._discard(name, gone)
        self._capture_for(SWAP_SECONDS, [*used, *self._planned_keys(wanted)])

    def _discard(self, name: str, gone: Iterable[GraphKey]) -> None:
        """Discard some graphs, and what is known of all keys with passes of the draft ``name``."""
        for key in gone:
            self._graphs.pop(key).captured.release()
        for key in [key for key in self._key_counts if key.has_passes_of(name)]:
            del self._key_counts[key]
        self._refused = {key for key in self._refused if not key.has_passes_of(name)}
        self._drafters.pop(name, None)

    def _capture_for(self, seconds: float, keys: Iterable[GraphKey]) -> None:
        """Capture those of ``keys`` that loaded drafts can run, in this order, for at most about ``seconds``.

        Only the first capture may take longer, since how long a capture takes is known from those before it. Without
        other graphs it is the largest one, whose memory the others reuse.
        """
        began, longest, captured = time.monotonic(), 0.0, 0
        drafters = self._captured_drafters()
        missing = [
            key
            for key in dict.fromkeys(keys)
            if key not in self._graphs and key not in self._refused and (not key.passes or key.draft in drafters)
        ][: max(MOST_GRAPHS - len(self._graphs), 0)]
        if missing and not self._graphs:
            missing.insert(0, missing.pop(missing.index(max(missing, key=lambda key: (key.tokens, key)))))
        for key in missing:
            start = time.monotonic()
            if self._failed or start - began + longest > seconds:
                break
            captured += self._capture(key, drafters.get(key.draft)) is not None
            longest = max(longest, time.monotonic() - start)
        spent = time.monotonic() - began
        log.info("captured %d of %d graphs for the new draft, in %.2f s", captured, len(missing), spent)

    def _captured_drafters(self) -> dict[str, PagedDrafter]:
        """Return the loaded drafts whose passes graphs have, by name."""
        return {name: one for name, one in self._drafts.paged().items() if one.captured}

    def _planned_keys(self, wanted: Iterable[TreeShape]) -> list[GraphKey]:
        """Return the keys of the tree shapes ``wanted`` and of plain steps, the most important first."""
        shapes = {(PLAIN, ""), *((tree_of(shape), name) for shape in wanted for name in self._captured_drafters())}
        cuts = (False, True) if self._coupled else (False,)
        return keys_of_shapes(self._rows, shapes, self._max_tokens, cuts=cuts)

    def prepare(self, wanted: Iterable[TreeShape]) -> None:
        """Capture the graphs of the tree shapes ``wanted`` and of plain steps, the largest first.

        Graphs share one memory pool, so the smaller ones reuse the memory of the largest. If there are more than
        MOST_GRAPHS keys, plain steps have priority and sampling with top-k, top-p or min-p comes last.
        """
        drafters = self._captured_drafters()
        keys = [key for key in self._planned_keys(wanted) if key not in self._graphs and key not in self._refused]
        room = max(MOST_GRAPHS - len(self._graphs), 0)
        if len(keys) > room:
            log.warning("%d graphs are beyond %d and will not be captured", len(keys) - room, MOST_GRAPHS)
        chosen = sorted(keys[:room], key=lambda key: (key.tokens, key), reverse=True)
        for index, key in enumerate(chosen, start=1):
            if self._failed:
                return
            if self._capture(key, drafters.get(key.draft)) is not None:
                log.info("captured graph %d of %d: %s", index, len(chosen), key)

    def plan(self, rows: Sequence[Row]) -> ReadyStep | None:
        """Return the graph that runs the decoding rows of a step. Return None and count the reason if there is none.

        A graph that is needed often is captured here.
        """
        ready = self._ready(rows)
        if isinstance(ready, EagerReason):
            self._count_eager(ready)
            return None
        return ready

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
        return self._replayed(ready.graph, rows, ranked=ranked)

    def replay_drafts(self, ready: ReadyStep, rows: tuple[Row, ...], masks: HostMasks) -> tuple[Tensor, float]:
        """Queue the draft passes of a step by their own graph, before the one that verifies.

        Args:
            ready: Graphs of the step, from `plan`.
            rows: Decoding rows of the step.
            masks: Grammar masks of the roots.

        Returns:
            The ranked draft tokens as `Drafter.propose` returns them, and the duration of the passes in seconds.
        """
        graph, plan = ready.drafts, ready.plan.drafts
        assert graph is not None, "the drafts have a graph"
        assert plan is not None, "the drafts have a graph"
        self._write_inputs(graph, plan, rows, None, masks)
        graph.captured.replay()
        graph.replays += 1
        assert graph.step.ranked_BNK is not None, "a key with passes has ranks"
        return graph.step.ranked_BNK[: len(rows)], graph.captured.seconds

    def _write_inputs(
        self,
        graph: Graph,
        plan: StepPlan,
        rows: tuple[Row, ...],
        depth_limits: Sequence[int] | None,
        masks: HostMasks | None,
    ) -> None:
        """Queue the copy of the inputs of a graph, and record that its draft catches up."""
        catch_up, drafter, requests = plan.catch_up, plan.drafter, [row.request for row in rows]
        if drafter is not None:
            counts = catch_up.counts
            behind = requests if all(counts) else [one for one, n in zip(requests, counts, strict=True) if n]
            drafter.record_catch_up(behind, [count for count in counts if count])
            catch_up = CatchUp(catch_up.counts, tuple(drafter.first_key(request) for request in requests))
        if masks is not None:
            self._masks().write(masks.table_NW)
        graph.step.inputs.write(tuple(row.tree for row in rows), requests, catch_up, depth_limits, masks)

    def _ready(self, rows: Sequence[Row]) -> ReadyStep | EagerReason:
        plan = self._planner.plan(rows)
        if isinstance(plan, EagerReason):
            return plan
        graph = self._graph(plan)
        if isinstance(graph, EagerReason):
            return graph
        drafts = self._graph(plan.drafts) if plan.drafts is not None else None
        if isinstance(drafts, EagerReason):
            plan, drafts = plan.without_drafts(), None
        decoding = decoding_rows(rows)
        if decoding < len(rows) and not self._is_replay_faster(graph, sum(row.count for row in rows[decoding:])):
            return EagerReason.MIXED
        return ReadyStep(plan, graph, decoding, drafts)

    def _is_replay_faster(self, graph: Graph, chunk_tokens: int) -> bool:
        """Return whether a graph and a pass of the prompt chunks take less time than one eager pass of all rows."""
        seconds, passes, layers = graph.captured.seconds, graph.step.key.passes, self._target.layers
        verify_seconds = seconds - self._draft_seconds(graph)
        return is_replay_faster(seconds, verify_seconds, chunk_tokens, layers=layers, passes=passes)

    def _graph(self, plan: StepPlan) -> Graph | EagerReason:
        """Return the graph of a plan, captured now if it is needed often enough, or the reason why there is none."""
        key = plan.key
        graph = self._graphs.get(key)
        if graph is not None:
            return graph
        if self._failed or key in self._refused:
            return EagerReason.FAILED
        if len(self._graphs) >= MOST_GRAPHS:
            return EagerReason.LIMIT
        self._key_counts[key] += 1
        if self._key_counts[key] < self._capture_after_steps:
            return EagerReason.NEW
        graph = self._capture(key, plan.drafter)
        if graph is None:
            return EagerReason.FAILED
        log.info("captured a graph that was asked for: %s", key)
        return graph

    def _capture(self, key: GraphKey, drafter: PagedDrafter | None) -> Graph | None:
        """Capture a graph for ``key``. The step that runs during the capture has padding rows only.

        Return None if it cannot be captured. If a rank of several cannot, discard all graphs for good.
        """
        if key.passes:
            assert drafter is not None, "a key with passes has a draft"
            assert self._drafters.setdefault(key.draft, drafter) is drafter, "graphs are discarded when drafts change"
        masks_NW = self._masks().view() if key.features.masks else None
        own = drafter if key.passes else None
        step = CapturedStep(key, StepParts(self._target, own, self._state, self._drafts.reads, masks_NW))
        step.inputs.write((), [], CatchUp(), None)
        try:
            graph = self._graphs[key] = Graph(step, self._backend.capture(step.run))
        except RankCaptureFailed as error:
            log.warning("steps run without graphs from now on, as %s cannot be captured: %s", key, error)
            self._failed = True
            self.clear()
            return None
        except CaptureFailed as error:
            log.warning("steps like %s run without a graph, as it cannot be captured: %s", key, error)
            self._refused.add(key)
            return None
        return graph

    def _masks(self) -> MaskTable:
        """Return the table of grammar masks, with a mask for every packed token and one that allows all tokens."""
        if self._mask_table is None:
            device = self._state.length_S.device
            self._mask_table = MaskTable(self._max_tokens + 1, self._target.vocab_size, device)
        return self._mask_table

    def _replayed(self, graph: Graph, rows: tuple[Row, ...], *, ranked: bool) -> QueuedRows:
        """Queue the copies of the results to the host, before the next replay overwrites the static tensors."""
        step, count = graph.step, len(rows)
        output_logprobs = step.logprobs.queue_read(rows) if step.logprobs is not None else None
        results = (step.out, step.ranked_BNK) if ranked and step.ranked_BNK is not None else (step.out,)
        (out, *more), host_copy = to_host(results, overwritten=True)
        ranked_BNK = more[0][:count] if more else None
        return QueuedRows(
            rows=rows,
            outcome_BC=out[:count],
            ranked_BNK=ranked_BNK,
            host_copy=host_copy,
            output_logprobs=output_logprobs,
            draft_seconds=self._draft_seconds(graph),
        )

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

    def _count_eager(self, reason: EagerReason) -> None:
        if reason not in self.eager:
            log.info("a step runs without a graph: %s", reason)
        self.eager[reason] += 1
