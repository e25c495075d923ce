"""Turns collected steps into counters: acceptance ranks, shadow scores, costs, latencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdecode_worker.engine.ipc.messages import Logprobs
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.scheduler import Row
from specdecode_worker.engine.stats.statistics import Sort, Statistics
from specdecode_worker.engine.stats.step_costs import StepSize
from specdecode_worker.speculation.shadow_scores import Shadow, scores
from specdecode_worker.speculation.trees import Tree


@dataclass(frozen=True, slots=True)
class Read:
    """What the host has read of one row: emitted tokens, the path behind the root, and the ranks along it."""

    tokens: list[int]
    path: list[int]
    ranks: list[int]
    ranked_NK: list[list[int]] | None
    """The draft's orderings by node, where the row drafted in the shadow."""
    kept_depth: int
    logprobs: tuple[Logprobs, ...] = ()
    """One for each token, where the request asked."""


class Recorder:
    """Writes into Statistics; keeps shadows until their tokens are out."""

    def __init__(self, statistics: Statistics) -> None:
        self.statistics = statistics
        self._shadows: dict[str, list[Shadow]] = {}

    def arrived(self, request: Request) -> None:
        traffic = self.statistics.traffic(request.submit.task)
        traffic.arrivals += 1
        traffic.prompt_tokens += len(request.submit.prompt)

    def admitted(self, request: Request, now: float) -> None:
        """Its first chunk runs; after a preemption this is not its first."""
        if request.epoch == 0:
            self.statistics.queue.add(now - request.arrived_seconds)
            self.statistics.traffic(request.submit.task).cached_tokens += request.cached_tokens

    def walked(self, row: Row, read: Read, taken: list[int], now: float) -> None:
        """A row that chose tokens, of which ``taken`` count (a stop may drop the rest)."""
        request = row.request
        if not row.is_chunk:
            self.statistics.drafted(row.tree.verified - 1, len(read.tokens) - 1)
            self._count_ranks(row.tree, sort_of(request), read, len(taken))
            self._shade(row, read)
        self._count_latency(request, len(taken), now)
        self.statistics.traffic(request.submit.task).output_tokens += len(taken)
        self._score(request)

    def ended(self, request: Request, now: float) -> None:
        self._shadows.pop(request.id, None)
        if request.finish not in ("stop", "length"):
            return
        self.statistics.finished(sort_of(request), request.accepted, request.drafts)
        self.statistics.e2e.add(now - request.arrived_seconds)
        self.statistics.traffic(request.submit.task).finished += 1

    def step(self, context_bucket: int, size: StepSize, emitted: int, seconds: float) -> None:
        # Device seconds are wall seconds wherever the device is a CPU, and while steps are never queued behind others.
        self.statistics.costs.add(context_bucket, size, emitted, seconds, seconds)

    def _count_ranks(self, tree: Tree, sort: Sort, read: Read, taken: int) -> None:
        main = True
        for level, rank in enumerate(read.ranks[: min(len(read.tokens), taken)]):
            if level:
                main = main and tree.ranks[read.path[level - 1]] == 0
            if rank >= 0:
                self.statistics.rank(sort, level + 1, main=main, rank=rank)

    def _shade(self, row: Row, read: Read) -> None:
        if read.ranked_NK is None:
            return
        # The request has taken this step's tokens already: its root stands in front of those.
        root = row.request.cached - len(read.tokens)
        ranked = tuple(tuple(read.ranked_NK[node]) for node in row.tree.main_path[:-1])
        shadow = Shadow(root, ranked, row.tree.main_depth + 1, read.kept_depth)
        self._shadows.setdefault(row.request.id, []).append(shadow)

    def _score(self, request: Request) -> None:
        pending = []
        for shadow in self._shadows.get(request.id, ()):
            found = scores(shadow, request.tokens)
            if found is None:
                pending.append(shadow)
                continue
            for score in found:
                self.statistics.rank(sort_of(request), score.depth, main=True, rank=score.rank)
        if request.id in self._shadows:
            self._shadows[request.id] = pending

    def _count_latency(self, request: Request, tokens: int, now: float) -> None:
        if request.emitted == tokens:
            self.statistics.ttft.add(now - request.arrived_seconds)
        elif tokens:
            self.statistics.ttit.add((now - request.last_emit_seconds) / tokens, tokens)
        request.last_emit_seconds = now


def sort_of(request: Request) -> Sort:
    return Sort(request.submit.task, not request.law.greedy, request.draft.draft)


def size_of(rows: Sequence[Row], draft_passes: int) -> StepSize:
    """The features of a step, read before it is collected."""
    verify = sum(row.count for row in rows if not row.is_chunk)
    return StepSize(
        sequences=sum(row.chooses for row in rows),
        verify_tokens=verify,
        kv_tokens=sum(row.request.cached for row in rows),
        draft_passes=draft_passes,
        prefill_tokens=sum(row.count for row in rows if row.is_chunk),
    )
