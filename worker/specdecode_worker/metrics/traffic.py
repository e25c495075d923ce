"""Metrics of traffic, queue, KV cache and device memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric as Family

from specdecode_worker.contract import Metric, Report, TrafficCell
from specdecode_worker.metrics.families import counter, gauge


def load(report: Report) -> Iterator[Family]:
    """Yield the metrics of traffic, scheduling, engine state and device memory."""
    yield from _traffic(report)
    yield from _work(report)
    yield from _state(report)
    if report.memory is not None:
        kinds = (((kind,), float(value)) for kind, value in report.memory.model_dump().items())
        text = "Bytes of the device's memory, by what they hold; limit is all there is."
        yield gauge(Metric.memory_bytes, text, report.model, ("kind",), kinds)


def _traffic(report: Report) -> Iterator[Family]:
    counters: tuple[tuple[Metric, str, Callable[[TrafficCell], int]], ...] = (
        (Metric.prompt_tokens, "Tokens of prompts.", lambda cell: cell.prompt_tokens),
        (Metric.generation_tokens, "Tokens of answers.", lambda cell: cell.output_tokens),
        (Metric.request_success, "Requests that finished.", lambda cell: cell.finished),
    )
    for name, text, value in counters:
        samples = [((cell.task,), float(value(cell))) for cell in report.traffic]
        yield counter(name, text, report.model, ("task",), samples)


def _work(report: Report) -> Iterator[Family]:
    counters = (
        (Metric.num_preemptions, "Requests that gave their blocks back and start again.", report.preemptions),
        (Metric.prefill_chunks, "Parts in which prompts went through the model.", report.prefill_chunks),
        (Metric.prefix_cache_queries, "Tokens of prompts looked up in the cache.", report.prefix_query_tokens),
        (Metric.prefix_cache_hits, "Tokens of prompts found there.", report.prefix_hit_tokens),
    )
    for name, text, value in counters:
        yield counter(name, text, report.model, (), [((), value)])


def _state(report: Report) -> Iterator[Family]:
    total = report.kv_tokens_total or 1
    gauges = (
        (Metric.num_requests_running, "Requests in the batch.", report.running),
        (Metric.num_requests_waiting, "Requests that wait for a place in it.", report.waiting),
        (Metric.kv_cache_usage_perc, "Share of the KV cache in use; 1 is all of it.", report.kv_tokens_used / total),
        (Metric.kv_cache_reusable_perc, "Share kept for prefixes that may return.", report.kv_tokens_cached / total),
        (Metric.plan_version, "Version of the speculation plan in force.", report.plan.version),
        (Metric.synthetic, "1 while a synthetic knob distorts measurements.", report.synthetic is not None),
    )
    for name, text, value in gauges:
        yield gauge(name, text, report.model, (), [((), float(value))])
