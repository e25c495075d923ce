"""Latency metrics of requests, tokens, engine steps and step phases."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric as Family
from prometheus_client.core import SummaryMetricFamily

from specdecode_worker.contract import Metric, Report
from specdecode_worker.metrics.families import counter, histogram
from specdecode_worker.metrics.server_counters import ServerCounters

_REPORTED = {
    "ttft": (Metric.time_to_first_token_seconds, "Time from arrival to the first token."),
    "ttit": (Metric.inter_token_latency_seconds, "Time between consecutive tokens."),
    "e2e": (Metric.e2e_request_latency_seconds, "Time from arrival to the last token."),
    "queue": (Metric.request_queue_time_seconds, "Time from arrival to the first step."),
}


def latency(report: Report, counts: ServerCounters) -> Iterator[Family]:
    """Yield the latency and size histograms of requests, and the time of engine steps."""
    for cell in report.latency:
        name, text = _REPORTED[cell.name]
        yield histogram(name, text, report.model, cell.edges, cell.counts, cell.sum)
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
        yield histogram(name, text, report.model, sizes.edges, sizes.counts, sizes.sum)
    yield from _steps(report)


def _steps(report: Report) -> Iterator[Family]:
    steps = SummaryMetricFamily(Metric.iteration_seconds, "Wall time of engine steps.", labels=("model_name",))
    count, seconds = sum(cell.count for cell in report.steps), sum(cell.wall_seconds for cell in report.steps)
    steps.add_metric((report.model,), count, seconds)
    yield steps
    if report.phases is not None:
        phases = [((phase,), value) for phase, value in report.phases.model_dump().items()]
        text = "Time of engine steps, by phase."
        yield counter(Metric.step_phase_seconds, text, report.model, ("phase",), phases)
