"""Which steps are replayed, and the graphs that replay them. What no graph holds runs eagerly, and is counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_worker.contract import TreeShape
from specdecode_worker.engine.drafts.draft_registry import Roster
from specdecode_worker.engine.drafts.drafter import PagedDrafter
from specdecode_worker.engine.graphs.capture_backends import Captured, Runner
from specdecode_worker.engine.graphs.captured_step import Parts, Step
from specdecode_worker.engine.graphs.graph_key import Key, at_least, key_of
from specdecode_worker.engine.graphs.row_tables import CatchUp, floats_of, rows_of
from specdecode_worker.engine.graphs.tree_tables import topology
from specdecode_worker.engine.memory.memory_budget import MOST_GRAPHS
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.scheduler import Row
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.engine.step.host_copy import Arrival, to_host
from specdecode_worker.engine.step.target_pass import Target
from specdecode_worker.speculation.acceptance import Outcome
from specdecode_worker.speculation.trees import PLAIN, Tree, tree_of

log = logging.getLogger(__name__)

PATIENCE = 3
"""A key that is asked for so often is captured while requests wait: that takes about as long as as many eager steps."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A step and what repeats it. It was timed when nobody was there: the weights are read all the same."""

    step: Step
    captured: Captured


@dataclass(frozen=True, slots=True)
class Replayed:
    """A step that is queued, its results on their way to the host."""

    outcome: Outcome
    ranked_BNK: Tensor | None
    arrival: Arrival
    draft_seconds: float


class Graphs:
    """One per engine. ``replayed`` and ``eager`` count decode steps, the latter by why no graph ran them."""

    def __init__(
        self,
        target: Target,
        drafts: Roster,
        state: DeviceState,
        runner: Runner,
        *,
        rows: Sequence[int],
        most_tokens: int,
        patience: int = PATIENCE,
    ) -> None:
        """``rows`` are buckets as of `row_buckets`; ``most_tokens`` bounds the packed tokens of a graph."""
        self._target, self._drafts, self._state, self._runner = target, drafts, state, runner
        self._rows, self._most_tokens, self._patience = tuple(rows), most_tokens, patience
        self._graphs: dict[Key, Graph] = {}
        self._drafter: PagedDrafter | None = None
        self._asked: Counter[Key] = Counter()
        self.replayed = 0
        self.eager: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._graphs)

    def forget(self) -> None:
        """Drafts or kept states have changed, and with them the tensors that graphs were made over."""
        self._graphs.clear()
        self._runner.forget()
        self._asked.clear()
        self._drafter = None

    def prepare(self, wanted: Iterable[TreeShape]) -> None:
        """Captures what steps of these shapes and plain ones will ask for, the largest first: so the others fit into
        the memory that it leaves. Where that is too much, plain steps come first, and laws that cut last."""
        drafter = self._drafts.paged()
        trees = {PLAIN, *(tree_of(shape) for shape in wanted if drafter is not None)}
        found = {
            key_of(rows, [tree], tree.verified, cuts=cuts)
            for rows in self._rows
            for tree in trees
            for cuts in (False, True)
        }
        keys = [key for key in found if key is not None and key.tokens <= self._most_tokens and key not in self._graphs]
        keys.sort(key=lambda key: (key.cuts, key.passes > 0, key))
        room = max(MOST_GRAPHS - len(self._graphs), 0)
        if len(keys) > room:
            log.warning("%d graphs are beyond %d and will not be captured", len(keys) - room, MOST_GRAPHS)
        chosen = sorted(keys[:room], key=lambda key: (key.tokens, key), reverse=True)
        for index, key in enumerate(chosen, start=1):
            self._capture(key, drafter)
            log.info("captured graph %d of %d: %s", index, len(chosen), key)

    def launch(self, rows: Sequence[Row], kept_depths: Sequence[int] | None, *, ranked: bool) -> Replayed | None:
        """Queues a step of these rows; None when no graph may or can run it: then nothing has been done.
        ``kept_depths`` as in `rows_of`; ``ranked``: the draft's orderings are asked for."""
        found = self._planned(rows)
        if isinstance(found, str):
            self._missed(found)
            return None
        key, catch_up, drafter = found
        graph = self._graph(key, drafter)
        if graph is None:
            self._missed("new")
            return None
        requests = [row.request for row in rows]
        if drafter is not None and key.passes:
            drafting = [(r, n) for r, n in zip(requests, catch_up.counts, strict=True) if n]
            drafter.caught_up([request for request, _ in drafting], [count for _, count in drafting])
            catch_up = CatchUp(catch_up.counts, tuple(drafter.first_key(request) for request in requests))
        self._fill(graph.step, tuple(row.tree for row in rows), requests, catch_up, kept_depths)
        graph.captured.replay()
        self.replayed += 1
        return self._replayed(graph, len(rows), ranked=ranked)

    def _planned(self, rows: Sequence[Row]) -> tuple[Key, CatchUp, PagedDrafter | None] | str:
        """What would run these rows, or why no graph does."""
        if reason := _unfit(rows):
            return reason
        bucket, trees = at_least(len(rows), self._rows), [row.tree for row in rows]
        if bucket is None:
            return "size"
        drafts = any(tree.drafted_depth for tree in trees)
        drafter = self._drafts.paged() if self._drafts else None
        if self._drafts and drafter is None and (drafts or len(self._drafts) > 1):
            return "draft"
        behind = drafter.drafting(rows, trees) if drafter is not None else []
        if behind and not drafts:
            return "catch-up"
        counts = [0] * len(rows)
        if drafter is not None:
            for b, count in zip(behind, drafter.behind([rows[b].request for b in behind]), strict=True):
                counts[b] = count
        cuts = any(row.request.law.truncated and not row.request.law.greedy for row in rows)
        key = key_of(bucket, trees, max(counts), cuts=cuts)
        if key is None or key.tokens > self._most_tokens:
            return "size"
        return key, CatchUp(tuple(counts)), drafter

    def _graph(self, key: Key, drafter: PagedDrafter | None) -> Graph | None:
        graph = self._graphs.get(key)
        if graph is None and len(self._graphs) < MOST_GRAPHS:
            self._asked[key] += 1
            if self._asked[key] >= self._patience:
                graph = self._capture(key, drafter)
                log.info("captured a graph that was asked for: %s", key)
        return graph

    def _capture(self, key: Key, drafter: PagedDrafter | None) -> Graph:
        """While it is captured a step runs of which nobody is part."""
        assert self._drafter is None or drafter is self._drafter, "graphs are forgotten when drafts change"
        self._drafter = drafter
        step = Step(key, Parts(self._target, drafter if key.passes else None, self._state, self._drafts.reads))
        self._fill(step, (), [], CatchUp(), None)
        graph = Graph(step, self._runner.capture(step.run))
        self._graphs[key] = graph
        return graph

    def _fill(
        self,
        step: Step,
        trees: tuple[Tree, ...],
        requests: Sequence[Request],
        catch_up: CatchUp,
        kept_depths: Sequence[int] | None,
    ) -> None:
        key, whole, fractions = step.key, step.whole_numbers, step.fractions
        of_rows = rows_of(requests, key, catch_up, kept_depths, self._state.nobody)
        whole.write((topology(trees, key), step.laws.flat(of_rows, whole.dtype)))
        fractions.write((step.floats.flat(floats_of(requests, key), fractions.dtype),))

    def _replayed(self, graph: Graph, rows: int, *, ranked: bool) -> Replayed:
        """Results are copied before the next step may overwrite them."""
        step, depth = graph.step, graph.step.key.passes
        results = (step.out, step.ranked_BNK) if ranked and step.ranked_BNK is not None else (step.out,)
        (out, *more), arrival = to_host(results, overwritten=True)
        emitted, path, rank, count = torch.split(out[:rows], [depth + 1, depth, depth + 1, 1], dim=1)
        outcome = Outcome(emitted, count[:, 0], path, rank)
        return Replayed(outcome, more[0][:rows] if more else None, arrival, self._draft_seconds(graph))

    def _draft_seconds(self, graph: Graph) -> float:
        """What a step takes beyond a plain one of as many rows; too much, where there is no such graph."""
        key = graph.step.key
        plain = self._graphs.get(Key(key.rows, 1, cuts=key.cuts))
        beside = plain.captured.seconds if plain is not None else 0.0
        return max(graph.captured.seconds - beside, 0.0) if key.passes else 0.0

    def _missed(self, reason: str) -> None:
        if reason not in self.eager:
            log.info("a step runs without a graph: %s", reason)
        self.eager[reason] += 1


def _unfit(rows: Sequence[Row]) -> str:
    """Why no graph could ever run such rows; "" when one could."""
    if any(row.is_chunk for row in rows):
        return "prefill"
    if any(row.request.law.adjusts for row in rows):
        return "processors"
    if any(row.request.submit.sampling.logprobs is not None for row in rows):
        return "logprobs"
    return ""
