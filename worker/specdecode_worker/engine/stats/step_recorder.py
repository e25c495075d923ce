"""Recorder of collected steps: acceptance ranks, shadow scores, step costs and latencies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdecode_worker.engine.batch import Row
from specdecode_worker.engine.ipc.messages import Logprobs
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.stats.statistics import AcceptanceCategory, RankCounts, Statistics, Traffic
from specdecode_worker.engine.stats.step_costs import StepSize
from specdecode_worker.speculation.merge_order import Credit
from specdecode_worker.speculation.shadow_scores import ShadowDraft, scores
from specdecode_worker.speculation.trial_costs import BlockCosts


@dataclass(slots=True)
class RowResult:
    """Results of one row, read by the host. Not frozen, because that would double the time to create one.

    ``tokens`` are the emitted tokens, ``path`` the accepted nodes after the root, and ``ranks`` the rank of each
    emitted token among the draft's candidates: MAX_RANKS for a miss, negative if nothing was ranked. ``depth_limit`` is
    the maximum accepted depth, which synthetic knobs may limit.
    """

    tokens: list[int]
    path: list[int]
    ranks: list[int]
    depth_limit: int
    ranked_NK: list[list[int]] | None = None
    """Ranked draft tokens of each node, if the row drafted shadow nodes (drafted but not verified)."""
    logprobs: tuple[Logprobs, ...] = ()
    """Log probabilities of each token, if requested."""
    credits: tuple[Credit, ...] = ()
    """Ranks of the tokens in the order of each draft, if the row's task merges drafts."""


class StepRecorder:
    """Recorder that updates Statistics. It stores shadow drafts until the tokens to score them have been emitted."""

    def __init__(self, statistics: Statistics) -> None:
        self.statistics = statistics
        self.block: BlockCosts | None = None
        """Costs of the block of a draft trial that runs; None without one."""
        self._shadows: dict[str, list[ShadowDraft]] = {}

    def record_arrival(self, request: Request) -> None:
        """Count the arrival of a request. One that continues an earlier attempt has arrived there."""
        if request.is_continued:
            return
        traffic = self.statistics.traffic(request.submit.task)
        traffic.arrivals += 1
        traffic.prompt_tokens += len(request.submit.prompt)

    def record_admission(self, request: Request, now: float) -> None:
        """Record the queue time and cached tokens of a request at its first chunk. Re-admission does not count."""
        if request.epoch == 0 and not request.is_continued:
            self.statistics.queue.add(now - request.arrived_seconds)
            self.statistics.traffic(request.submit.task).cached_tokens += request.cached_tokens

    def admit_to_block(self, request: Request) -> None:
        """Make a request that starts to run a member of the block of a draft trial, unless it has run before."""
        if self.block is not None and request.epoch == int(bool(request.submit.emitted)):
            self.block.admit(request.id)

    def record_row(self, row: Row, result: RowResult, taken: list[int], now: float) -> None:
        """Record a row that emitted tokens. ``taken`` are those that count; tokens after a stop are dropped."""
        request = row.request
        traffic = self.statistics.traffic(request.submit.task)
        if not row.is_chunk:
            traffic.decode_steps += 1
            traffic.decode_tokens += len(result.tokens)
            if not row.tree.given:
                self.statistics.record_draft(row.tree.verified - 1, len(result.tokens) - 1)
            if self.block is not None:
                self.block.add_row(request.id, request.submit.task, len(taken))
            if result.path or result.ranks[0] >= 0:  # else a plain step, in which nothing was ranked
                self._count_ranks(row, result, len(taken))
            if result.ranked_NK is not None:
                self._store_shadow(row, result, result.ranked_NK)
        self._count_latency(request, traffic, len(taken), now)
        traffic.output_tokens += len(taken)
        if self._shadows:
            self._score_shadows(request)

    def record_end(self, request: Request, now: float) -> None:
        """Record the end of a request. Only requests that finished normally are counted.

        The latency of a request that continues an earlier attempt is unknown.
        """
        self._shadows.pop(request.id, None)
        if self.block is not None:
            self.block.end_request(request.id, emitted=request.generated > 0)
        if request.finish not in ("stop", "length"):
            return
        self.statistics.record_request(category_of(request), request.accepted, request.drafts)
        if not request.is_continued:
            self.statistics.e2e.add(now - request.arrived_seconds)
        self.statistics.traffic(request.submit.task).finished += 1

    def record_step(self, context_bucket: int, size: StepSize, emitted: int, seconds: float) -> None:
        """Record the cost of a step, in seconds of wall time."""
        # Device time equals wall time on a CPU, and as long as no step is queued behind another.
        self.statistics.costs.add(context_bucket, size, emitted, seconds, seconds)

    def record_block_step(self, concurrency: int, context: int, seconds: float) -> None:
        """Add the duration of a step to the block of a draft trial, with the buckets that the step ran in."""
        if self.block is not None:
            self.block.end_step(concurrency, context, seconds)

    def _count_ranks(self, row: Row, result: RowResult, taken: int) -> None:
        category, end = category_of(row.request), min(len(result.tokens), taken)
        _count(self.statistics.ranks, category, row, result, result.ranks[:end])
        for credit in result.credits:
            own = category._replace(draft=credit.hash)
            _count(self.statistics.credit, own, row, result, credit.ranks[:end])

    def _store_shadow(self, row: Row, result: RowResult, ranked_NK: list[list[int]]) -> None:
        # The request already includes the tokens of this step, so its root is that many tokens back.
        root = row.request.cached - len(result.tokens)
        ranked = tuple(tuple(ranked_NK[node]) for node in row.tree.main_path[:-1])
        shadow = ShadowDraft(root, ranked, row.tree.main_depth + 1, result.depth_limit)
        self._shadows.setdefault(row.request.id, []).append(shadow)

    def _score_shadows(self, request: Request) -> None:
        shadows = self._shadows.get(request.id)
        if not shadows:
            return
        pending = []
        for shadow in shadows:
            shadow_scores = scores(shadow, request.tokens)
            if shadow_scores is None:
                pending.append(shadow)
                continue
            for score in shadow_scores:
                self.statistics.record_rank(category_of(request), score.depth, main=True, rank=score.rank)
        self._shadows[request.id] = pending

    @staticmethod
    def _count_latency(request: Request, traffic: Traffic, tokens: int, now: float) -> None:
        if request.generated == tokens:  # The first tokens after a change of workers have no predecessor here.
            if not request.is_continued:
                traffic.ttft.add(now - request.arrived_seconds)
        elif tokens:
            traffic.itl.add((now - request.last_emit_seconds) / tokens, tokens)
        request.last_emit_seconds = now


def _count(
    counters: Callable[[AcceptanceCategory], RankCounts],
    category: AcceptanceCategory,
    row: Row,
    result: RowResult,
    ranks: Sequence[int],
) -> None:
    """Count the ranks of a row's tokens in a category, by depth and by whether their parent is on the main path."""
    if not ranks or max(ranks) < 0:
        return
    counts, main, tree_ranks = counters(category), True, row.tree.ranks
    levels = counts.levels(len(ranks), main=True)
    for level, rank in enumerate(ranks):
        if level and main and tree_ranks[result.path[level - 1]]:
            main, levels = False, counts.levels(len(ranks), main=False)
        if rank >= 0:
            levels[level][rank] += 1


def category_of(request: Request) -> AcceptanceCategory:
    """Return the category in which the acceptance of the request is counted."""
    return AcceptanceCategory(request.submit.task, not request.sampling_params.greedy, request.draft.draft)


def step_size_of(rows: Sequence[Row], draft_passes: int) -> StepSize:
    """Return the features of a step. Call it before the step is collected, which changes the lengths."""
    sequences = verify = keys = prefill = 0
    for row in rows:
        keys += row.request.cached
        sequences += row.emits
        if row.is_chunk:
            prefill += row.count
        else:
            verify += row.count
    return StepSize(
        sequences=sequences,
        verify_tokens=verify,
        kv_tokens=keys,
        draft_passes=draft_passes,
        prefill_tokens=prefill,
    )
