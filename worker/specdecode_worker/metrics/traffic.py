"""Metrics of traffic, queue, KV cache and device memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric as Family

from specdecode_worker.contract import Metric, Report, TrafficCell
from specdecode_worker.metrics.families import counter, gauge


def traffic(report: Report) -> Iterator[Family]:
    """Yield the metrics of traffic, scheduling, engine state and device memory."""
    yield from _traffic(report)
    yield from _work(report)
    yield from _state(report)
    if report.memory is not None:
        kinds = (((kind,), float(value)) for kind, value in report.memory.model_dump().items())
        text = "Device memory in bytes, by use; the kind limit is the total available to the worker."
        yield gauge(Metric.memory_bytes, text, report.model, ("kind",), kinds)


def _traffic(report: Report) -> Iterator[Family]:
    counters: tuple[tuple[Metric, str, Callable[[TrafficCell], int]], ...] = (
        (Metric.prompt_tokens, "Prompt tokens of all requests.", lambda cell: cell.prompt_tokens),
        (Metric.generation_tokens, "Generated tokens.", lambda cell: cell.output_tokens),
        (Metric.request_success, "Finished requests.", lambda cell: cell.finished),
    )
    for name, text, value in counters:
        samples = [((cell.task,), float(value(cell))) for cell in report.traffic]
        yield counter(name, text, report.model, ("task",), samples)


def _work(report: Report) -> Iterator[Family]:
    counters = (
        (
            Metric.num_preemptions,
            "Preemptions: requests that freed their KV blocks to restart.",
            report.preemptions,
        ),
        (Metric.prefill_chunks, "Prefill chunks that the model processed.", report.prefill_chunks),
        (Metric.prefix_cache_queries, "Prompt tokens looked up in the prefix cache.", report.prefix_query_tokens),
        (Metric.prefix_cache_hits, "Prompt tokens found in the prefix cache.", report.prefix_hit_tokens),
    )
    for name, text, value in counters:
        yield counter(name, text, report.model, (), [((), value)])


def _state(report: Report) -> Iterator[Family]:
    total = report.kv_tokens_total or 1
    gauges = (
        (Metric.num_requests_running, "Requests that are running.", report.running),
        (Metric.num_requests_waiting, "Requests that are waiting to run.", report.waiting),
        (Metric.kv_cache_usage_perc, "Fraction of the KV cache in use, from 0 to 1.", report.kv_tokens_used / total),
        (
            Metric.kv_cache_reusable_perc,
            "Fraction of the KV cache with reusable prefixes.",
            report.kv_tokens_cached / total,
        ),
        (Metric.plan_version, "Version of the current speculation plan.", report.plan.version),
        (Metric.synthetic, "1 while synthetic knobs distort the measurements, else 0.", report.synthetic is not None),
    )
    for name, text, value in gauges:
        yield gauge(name, text, report.model, (), [((), float(value))])
