"""Latency metrics of requests, tokens, engine steps and step phases."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric as Family
from prometheus_client.core import SummaryMetricFamily

from specdecode_worker.contract import OTHER_TASK, LatencyHistogram, Metric, Report
from specdecode_worker.metrics.families import Histograms, counter, histogram
from specdecode_worker.metrics.server_counters import ServerCounters

_BY_TASK = {
    "ttft": (Metric.time_to_first_token_seconds, "Time from arrival to the first token."),
    "ttit": (Metric.inter_token_latency_seconds, "Time between consecutive tokens."),
}
_TOGETHER = {
    "e2e": (Metric.e2e_request_latency_seconds, "Time from arrival to the last token."),
    "queue": (Metric.request_queue_time_seconds, "Time from arrival to the first step."),
}


def latency(report: Report, counts: ServerCounters) -> Iterator[Family]:
    """Yield the latency and size histograms of requests, and the time of engine steps."""
    for cell in report.latency:
        if cell.name in _BY_TASK:
            name, text = _BY_TASK[cell.name]
            yield histogram(name, text, report.model, ("task",), cell.edges, _by_task(report, cell))
        else:
            name, text = _TOGETHER[cell.name]
            yield histogram(name, text, report.model, (), cell.edges, [((), cell.counts, cell.sum)])
    counted = (
        (Metric.request_prompt_tokens, "Prompt tokens per request.", counts.prompt_tokens),
        (Metric.request_generation_tokens, "Generated tokens per request.", counts.generation_tokens),
        (
            Metric.request_time_per_output_token_seconds,
            "Mean time per output token of a request after its first token, as the client sees it.",
            counts.seconds_per_token,
        ),
    )
    for name, text, sizes in counted:
        yield histogram(name, text, report.model, (), sizes.edges, [((), sizes.counts, sizes.sum)])
    timeouts = [((reason,), float(count)) for reason, count in counts.timeouts.items()]
    text = "Requests that were cancelled at their deadline, or after the longest time in the queue."
    yield counter(Metric.request_timeouts, text, report.model, ("reason",), timeouts)
    yield from _steps(report)


def _by_task(report: Report, cell: LatencyHistogram) -> Histograms:
    """Yield the histogram of each task. Without counts by task, everything belongs to ``other``."""
    if not report.tasks:
        yield (OTHER_TASK,), cell.counts, cell.sum
    for task in report.tasks:
        counted = task.ttft if cell.name == "ttft" else task.itl
        yield (task.task,), counted.counts, counted.sum


def _steps(report: Report) -> Iterator[Family]:
    steps = SummaryMetricFamily(Metric.iteration_seconds, "Wall time of engine steps.", labels=("model_name",))
    count, seconds = sum(cell.count for cell in report.steps), sum(cell.wall_seconds for cell in report.steps)
    steps.add_metric((report.model,), count, seconds)
    yield steps
    if report.phases is not None:
        phases = [((phase,), value) for phase, value in report.phases.model_dump().items()]
        text = "Time of engine steps, by phase."
        yield counter(Metric.step_phase_seconds, text, report.model, ("phase",), phases)
