"""/metrics: the engine's report in Prometheus' words, so that the two cannot disagree.

A report holds no speculation by task; the server counts that from the tokens that pass through it, and ``other``
takes the rest of the report's totals (requests without a task, and steps whose tokens nobody waited for).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)
from prometheus_client.registry import Collector

from specdecode_worker.contract import OTHER_TASK, Metric, Report, TrafficCell
from specdecode_worker.engine.messages import Tokens

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY = {
    "ttft": (Metric.time_to_first_token_seconds, "From arrival to the first token."),
    "ttit": (Metric.inter_token_latency_seconds, "From one token to the next."),
    "e2e": (Metric.e2e_request_latency_seconds, "From arrival to the last token."),
    "queue": (Metric.request_queue_time_seconds, "From arrival to the first step."),
}


@dataclass(slots=True)
class TaskCounts:
    """Speculation of one task; ``per_position[i]`` counts accepted tokens at depth i + 1."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    per_position: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))


class SpeculationCounts:
    """Counts by task of what passed through this server."""

    def __init__(self) -> None:
        self.by_task: defaultdict[str, TaskCounts] = defaultdict(TaskCounts)

    def observer(self, task: str) -> Callable[[Tokens], None]:
        """To be called with every message of one request, in order; messages carry the request's sums so far."""
        counts = self.by_task[task]
        seen = Tokens(request_id="", tokens=())

        def observe(tokens: Tokens) -> None:
            nonlocal seen
            accepted = tokens.accepted - seen.accepted
            counts.drafts += tokens.drafts - seen.drafts
            counts.draft_tokens += tokens.draft_tokens - seen.draft_tokens
            counts.accepted += accepted
            for position in range(accepted):
                counts.per_position[position] += 1
            seen = tokens

        return observe


def render(report: Report, counts: SpeculationCounts) -> bytes:
    """The text of /metrics."""
    registry = CollectorRegistry()
    registry.register(_Once([*_speculation(report, counts), *_traffic(report), *_load(report), *_time(report)]))
    return generate_latest(registry)


class _Once(Collector):
    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def _speculation(report: Report, counts: SpeculationCounts) -> Iterator[Family]:
    totals = (
        (Metric.num_drafts, "Steps of a sequence that verified a draft.", report.drafts, "drafts"),
        (Metric.num_draft_tokens, "Drafted tokens that were verified.", report.draft_tokens, "draft_tokens"),
        (Metric.num_accepted_tokens, "Drafted tokens that were kept.", report.accepted_tokens, "accepted"),
    )
    for name, text, total, attribute in totals:
        named = {t: int(getattr(c, attribute)) for t, c in counts.by_task.items() if t != OTHER_TASK}
        family = CounterMetricFamily(name, text, labels=("model_name", "task"))
        for task, value in named.items():
            family.add_metric((report.model, task), value)
        family.add_metric((report.model, OTHER_TASK), max(0, total - sum(named.values())))
        yield family
    per_position = CounterMetricFamily(
        Metric.num_accepted_tokens_per_pos,
        "Drafted tokens that were kept, by position in the draft.",
        labels=("model_name", "task", "position"),
    )
    for task, counted in counts.by_task.items():
        for position, value in sorted(counted.per_position.items()):
            per_position.add_metric((report.model, task, str(position)), value)
    yield per_position


def _traffic(report: Report) -> Iterator[Family]:
    counters: tuple[tuple[Metric, str, Callable[[TrafficCell], int]], ...] = (
        (Metric.prompt_tokens, "Tokens of prompts.", lambda cell: cell.prompt_tokens),
        (Metric.generation_tokens, "Tokens of answers.", lambda cell: cell.output_tokens),
        (Metric.request_success, "Requests that finished.", lambda cell: cell.finished),
    )
    for name, text, value in counters:
        family = CounterMetricFamily(name, text, labels=("model_name", "task"))
        for cell in report.traffic:
            family.add_metric((report.model, cell.task), value(cell))
        yield family


def _load(report: Report) -> Iterator[Family]:
    used = report.kv_tokens_used / report.kv_tokens_total if report.kv_tokens_total else 0.0
    suppressed = sum(cell.suppressed for cell in report.guard)
    gauges = (
        (Metric.num_requests_running, "Requests in the batch.", report.running),
        (Metric.num_requests_waiting, "Requests that wait for a place in it.", report.waiting),
        (Metric.kv_cache_usage_perc, "Share of the KV cache in use; 1 is all of it.", used),
        (Metric.plan_version, "Version of the speculation plan in force.", report.plan.version),
        (Metric.guard_suppressed, "Loads at which the guard holds speculation back.", suppressed),
        (Metric.synthetic, "1 while a synthetic knob distorts measurements.", report.synthetic is not None),
    )
    for name, text, value in gauges:
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric((report.model,), float(value))
        yield family


def _time(report: Report) -> Iterator[Family]:
    for histogram in report.latency:
        name, text = _LATENCY[histogram.name]
        edges = [*(str(edge) for edge in histogram.edges), "+Inf"]
        family = HistogramMetricFamily(name, text, labels=("model_name",))
        buckets = list(zip(edges, map(float, accumulate(histogram.counts)), strict=True))
        family.add_metric((report.model,), buckets, histogram.sum)
        yield family
    steps = SummaryMetricFamily(Metric.iteration_seconds, "Wall time of engine steps.", labels=("model_name",))
    count, seconds = sum(cell.count for cell in report.steps), sum(cell.wall_seconds for cell in report.steps)
    steps.add_metric((report.model,), count, seconds)
    yield steps
