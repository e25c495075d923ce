"""Request metrics by the name of the API key. The families are empty unless ``api_key_metrics`` is on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric as Family

from specdecode_worker.contract import Metric
from specdecode_worker.metrics.families import counter, histogram
from specdecode_worker.metrics.server_counters import LATENCY_EDGES, KeyCounts, ServerCounters

_LABELS = ("api_key",)


def api_keys(model: str, counts: ServerCounters) -> Iterator[Family]:
    """Yield the metrics of requests by the name of their API key."""
    by_key = counts.by_key
    counters: tuple[tuple[Metric, str, Callable[[KeyCounts], int]], ...] = (
        (Metric.api_key_requests, "Requests that were accepted, by API key.", lambda key: key.requests),
        (Metric.api_key_request_success, "Finished requests, by API key.", lambda key: key.finished),
        (
            Metric.api_key_prompt_tokens,
            "Prompt tokens of accepted requests, by API key.",
            lambda key: key.prompt_tokens,
        ),
        (Metric.api_key_generation_tokens, "Generated tokens, by API key.", lambda key: key.generation_tokens),
    )
    for name, text, value in counters:
        yield counter(name, text, model, _LABELS, [((key,), float(value(one))) for key, one in by_key.items()])
    ttft = [((key,), one.ttft.counts, one.ttft.sum) for key, one in by_key.items()]
    text = "Time from the start of a request to its first token, by API key."
    yield histogram(Metric.api_key_time_to_first_token_seconds, text, model, _LABELS, LATENCY_EDGES, ttft)
    e2e = [((key,), one.e2e.counts, one.e2e.sum) for key, one in by_key.items()]
    text = "Time from the start of a request to its last token, by API key."
    yield histogram(Metric.api_key_e2e_request_latency_seconds, text, model, _LABELS, LATENCY_EDGES, e2e)
