"""Speculation metrics: drafted and accepted tokens, target ranks, loaded drafts and the state of the guard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric as Family

from specdecode_worker.contract import OTHER_TASK, Metric, Report
from specdecode_worker.metrics.families import Samples, counter, gauge
from specdecode_worker.metrics.server_counters import ServerCounters


def speculation(report: Report, counts: ServerCounters) -> Iterator[Family]:
    """Yield the metrics of speculation, by task, depth, draft and bucket of the guard."""
    yield from _by_task(report, counts)
    yield _ranked(report)
    text = "Steps of a sequence without a draft."
    yield counter(Metric.num_plain_steps, text, report.model, (), [((), report.plain_steps)])
    text = "Steps of a sequence after its prompt, with or without a draft."
    steps = [((cell.task,), float(cell.decode_steps)) for cell in report.tasks]
    yield counter(Metric.num_decode_steps, text, report.model, ("task",), steps)
    text = "Tokens that decode steps emitted. Divided by the number of decode steps: tokens per step."
    tokens = [((cell.task,), float(cell.decode_tokens)) for cell in report.tasks]
    yield counter(Metric.num_decode_tokens, text, report.model, ("task",), tokens)
    yield _drafts(report)
    yield from _guard(report)


def _by_task(report: Report, counts: ServerCounters) -> Iterator[Family]:
    """Yield the draft counters per task; ``other`` gets the remainder of the report's totals."""
    totals = (
        (Metric.num_drafts, "Steps of a sequence that verified a draft.", report.drafts, "drafts"),
        (Metric.num_draft_tokens, "Draft tokens that were verified.", report.draft_tokens, "draft_tokens"),
        (Metric.num_accepted_tokens, "Draft tokens that were accepted.", report.accepted_tokens, "accepted"),
    )
    for name, text, total, attribute in totals:
        named = {t: int(getattr(c, attribute)) for t, c in counts.by_task.items() if t != OTHER_TASK}
        rest = max(0, total - sum(named.values()))
        samples: Samples = (((task,), value) for task, value in (named | {OTHER_TASK: rest}).items())
        yield counter(name, text, report.model, ("task",), samples)
    positions = (
        ((task, str(position)), value)
        for task, counted in counts.by_task.items()
        for position, value in sorted(counted.per_position.items())
    )
    text = "Draft tokens that were accepted, by position in the draft."
    yield counter(Metric.num_accepted_tokens_per_pos, text, report.model, ("task", "position"), positions)


def _ranked(report: Report) -> Family:
    """Build the counter of target ranks, summed over the cells that the report separates.

    The sum is over drafts, greedy and sampled requests, and both kinds of parents.
    """
    rank_counts: Counter[tuple[str, str, str]] = Counter()
    for cell in report.acceptance:
        for rank, count in enumerate(cell.ranks):
            rank_counts[cell.task, str(cell.depth), "miss" if rank == len(cell.ranks) - 1 else str(rank)] += count
    text = "Ranks of the target's token among the draft's candidates, counted where the parent token was accepted."
    return counter(Metric.num_ranked, text, report.model, ("task", "depth", "rank"), rank_counts.items())


def _drafts(report: Report) -> Family:
    samples = (
        ((draft.name, draft.method, draft.hash, draft.uri, draft.problem or ""), 1.0)
        for draft in (report.draft, *report.named_drafts)
    )
    text = "1 for each configured draft; problem is the reason why it is not loaded, else empty."
    return gauge(Metric.draft_info, text, report.model, ("draft", "method", "hash", "uri", "problem"), samples)


def _guard(report: Report) -> Iterator[Family]:
    suppressed = sum(cell.suppressed for cell in report.guard)
    text = "Plan buckets in which the guard suppresses speculation."
    yield gauge(Metric.guard_suppressed, text, report.model, (), [((), suppressed)])
    cells = [((str(cell.concurrency), str(cell.context)), cell) for cell in report.guard]
    text = "1 if the guard suppresses speculation in this plan bucket, else 0."
    state: Samples = ((load, cell.suppressed) for load, cell in cells)
    yield gauge(Metric.guard_state, text, report.model, ("concurrency", "context"), state)
    seconds: Samples = (
        ((*load, how), value)
        for load, cell in cells
        for how, value in (("speculative", cell.speculative), ("plain", cell.plain))
        if value is not None
    )
    text = "Seconds per token with and without speculation, as the guard compares them."
    yield gauge(Metric.guard_time_per_token_seconds, text, report.model, ("concurrency", "context", "mode"), seconds)
