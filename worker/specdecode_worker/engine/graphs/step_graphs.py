"""Selection, capture and replay of CUDA graphs for decode steps.

Steps that no graph can run are executed eagerly by the caller; they are counted by reason.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_worker.contract import TreeShape
from specdecode_worker.engine.drafts.draft_registry import DraftRegistry
from specdecode_worker.engine.drafts.drafter import PagedDrafter
from specdecode_worker.engine.graphs.capture_backends import CaptureBackend, Captured
from specdecode_worker.engine.graphs.captured_step import CapturedStep, StepParts
from specdecode_worker.engine.graphs.graph_key import GraphKey, key_of
from specdecode_worker.engine.graphs.row_tables import CatchUp, floats_of, rows_of
from specdecode_worker.engine.graphs.step_plan import EagerReason, StepPlanner
from specdecode_worker.engine.graphs.tree_tables import topology
from specdecode_worker.engine.memory.memory_budget import MOST_GRAPHS
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.scheduler import Row
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.engine.step.host_copy import HostCopy, to_host
from specdecode_worker.engine.step.target_pass import Target
from specdecode_worker.speculation.acceptance import Outcome
from specdecode_worker.speculation.trees import PLAIN, Tree, tree_of

log = logging.getLogger(__name__)

CAPTURE_AFTER_STEPS = 3
"""Number of steps with the same key after which it is captured while serving. A capture costs about 3 eager steps."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Decode step and its captured form.

    The time of the step was measured on padding rows alone. It is still a fair estimate, because padding rows also
    read all weights.
    """

    step: CapturedStep
    captured: Captured


@dataclass(frozen=True, slots=True)
class Replayed:
    """Queued step whose results are being copied to the host.

    ``draft_seconds`` is the estimated time of its draft passes.
    """

    outcome: Outcome
    ranked_BNK: Tensor | None
    host_copy: HostCopy
    draft_seconds: float


class StepGraphs:
    """All CUDA graphs of one engine.

    ``replayed`` counts the steps that a graph ran. ``eager`` counts the steps that no graph ran, by reason.
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
        """
        self._target, self._drafts, self._state, self._backend = target, drafts, state, backend
        self._rows, self._max_tokens, self._capture_after_steps = tuple(rows), max_tokens, capture_after_steps
        self._planner = StepPlanner(drafts, self._rows, max_tokens)
        self._graphs: dict[GraphKey, Graph] = {}
        self._drafters: dict[str, PagedDrafter] = {}
        """Drafters of the captured passes, by name."""
        self._key_counts: Counter[GraphKey] = Counter()
        self.replayed = 0
        self.eager: Counter[EagerReason] = Counter()

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Discard all graphs.

        Call this after the drafts or the stored target states have changed, since graphs refer to their tensors.
        """
        self._graphs.clear()
        self._backend.clear()
        self._key_counts.clear()
        self._drafters.clear()

    def prepare(self, wanted: Iterable[TreeShape]) -> None:
        """Capture the graphs of the tree shapes ``wanted`` and of plain steps, the largest first.

        Graphs share one memory pool, so the smaller ones reuse the memory of the largest. If there are more than
        MOST_GRAPHS keys, plain steps have priority and sampling with top-k, top-p or min-p comes last.
        """
        drafters = {name: one for name, one in self._drafts.paged().items() if not one.parallel}
        trees = {(PLAIN, ""), *((tree_of(shape), name) for shape in wanted for name in drafters)}
        candidates = {
            key_of(rows, [tree], tree.verified, cuts=cuts, draft=name)
            for rows in self._rows
            for tree, name in trees
            for cuts in (False, True)
        }
        keys = [
            key for key in candidates if key is not None and key.tokens <= self._max_tokens and key not in self._graphs
        ]
        keys.sort(key=lambda key: (key.cuts, key.passes > 0, key))
        room = max(MOST_GRAPHS - len(self._graphs), 0)
        if len(keys) > room:
            log.warning("%d graphs are beyond %d and will not be captured", len(keys) - room, MOST_GRAPHS)
        chosen = sorted(keys[:room], key=lambda key: (key.tokens, key), reverse=True)
        for index, key in enumerate(chosen, start=1):
            self._capture(key, drafters.get(key.draft))
            log.info("captured graph %d of %d: %s", index, len(chosen), key)

    def launch(self, rows: Sequence[Row], depth_limits: Sequence[int] | None, *, ranked: bool) -> Replayed | None:
        """Queue a step of ``rows`` by a graph. Return None, without side effects, if no graph can run it.

        Args:
            rows: Decoding rows of the step.
            depth_limits: Maximum accepted depth of each row, as in `rows_of`; None for no limit.
            ranked: Copy the ranked draft tokens to the host too.
        """
        plan = self._planner.plan(rows)
        graph = plan if isinstance(plan, EagerReason) else self._graph(plan.key, plan.drafter)
        if isinstance(plan, EagerReason) or isinstance(graph, EagerReason):
            self._count_eager(graph)
            return None
        key, catch_up, drafter, requests = plan.key, plan.catch_up, plan.drafter, [row.request for row in rows]
        if drafter is not None and key.passes:
            drafting = [(r, n) for r, n in zip(requests, catch_up.counts, strict=True) if n]
            drafter.record_catch_up([request for request, _ in drafting], [count for _, count in drafting])
            catch_up = CatchUp(catch_up.counts, tuple(drafter.first_key(request) for request in requests))
        self._fill(graph.step, tuple(row.tree for row in rows), requests, catch_up, depth_limits)
        graph.captured.replay()
        self.replayed += 1
        return self._replayed(graph, len(rows), ranked=ranked)

    def _graph(self, key: GraphKey, drafter: PagedDrafter | None) -> Graph | EagerReason:
        """Return the graph of ``key``, captured now if it is needed often enough, or the reason why there is none."""
        if key in self._graphs:
            return self._graphs[key]
        if len(self._graphs) >= MOST_GRAPHS:
            return EagerReason.LIMIT
        self._key_counts[key] += 1
        if self._key_counts[key] < self._capture_after_steps:
            return EagerReason.NEW
        graph = self._capture(key, drafter)
        log.info("captured a graph that was asked for: %s", key)
        return graph

    def _capture(self, key: GraphKey, drafter: PagedDrafter | None) -> Graph:
        """Capture a graph for ``key``. The step that runs during the capture has padding rows only."""
        if key.passes:
            assert drafter is not None, "a key with passes has a draft"
            assert self._drafters.setdefault(key.draft, drafter) is drafter, "graphs are discarded when drafts change"
        step = CapturedStep(
            key, StepParts(self._target, drafter if key.passes else None, self._state, self._drafts.reads)
        )
        self._fill(step, (), [], CatchUp(), None)
        graph = Graph(step, self._backend.capture(step.run))
        self._graphs[key] = graph
        return graph

    def _fill(
        self,
        step: CapturedStep,
        trees: tuple[Tree, ...],
        requests: Sequence[Request],
        catch_up: CatchUp,
        depth_limits: Sequence[int] | None,
    ) -> None:
        key, int_inputs, float_inputs = step.key, step.int_inputs, step.float_inputs
        of_rows = rows_of(requests, key, catch_up, depth_limits, self._state.padding_slot)
        int_inputs.write((topology(trees, key), step.row_layout.flat(of_rows, int_inputs.dtype)))
        float_inputs.write((step.floats.flat(floats_of(requests, key), float_inputs.dtype),))

    def _replayed(self, graph: Graph, rows: int, *, ranked: bool) -> Replayed:
        """Queue the copies of the results to the host, before the next replay overwrites the static tensors."""
        step, depth = graph.step, graph.step.key.passes
        results = (step.out, step.ranked_BNK) if ranked and step.ranked_BNK is not None else (step.out,)
        (out, *more), host_copy = to_host(results, overwritten=True)
        emitted, path, rank, count = torch.split(out[:rows], [depth + 1, depth, depth + 1, 1], dim=1)
        outcome = Outcome(emitted, count[:, 0], path, rank)
        return Replayed(outcome, more[0][:rows] if more else None, host_copy, self._draft_seconds(graph))

    def _draft_seconds(self, graph: Graph) -> float:
        """Return the measured time of the step minus that of a plain step with as many rows, in seconds.

        This overestimates the draft time if no graph of the plain step exists.
        """
        key = graph.step.key
        plain = self._graphs.get(GraphKey(key.rows, 1, cuts=key.cuts))
        plain_seconds = plain.captured.seconds if plain is not None else 0.0
        return max(graph.captured.seconds - plain_seconds, 0.0) if key.passes else 0.0

    def _count_eager(self, reason: EagerReason) -> None:
        if reason not in self.eager:
            log.info("a step runs without a graph: %s", reason)
        self.eager[reason] += 1
