"""Tests of the router's metrics: names, bounded labels, and gauges that follow the queue."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specdecode_router.telemetry.metrics import (
    MAX_TENANTS,
    HedgeOutcome,
    ResumeOutcome,
    ResumeReason,
    RouterMetrics,
    Stage,
)


def value(metrics: RouterMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"specdecode_router_{name}", labels)


def test_two_routers_in_one_process_share_no_series() -> None:
    first, second = RouterMetrics(), RouterMetrics()
    first.count_request("a", 200)
    assert value(second, "requests_total", tenant="a", code="200") is None


def test_exposition_parses_and_has_every_series() -> None:
    metrics = RouterMetrics()
    families = {family.name for family in text_string_to_metric_families(metrics.exposition().decode())}
    assert {family.name for family in metrics.registry.collect()} <= families
    assert "process_resident_memory_bytes" in families


def test_requests_count_by_tenant_and_status() -> None:
    metrics = RouterMetrics()
    for status in (200, 200, 429):
        metrics.count_request("a", status)
    assert value(metrics, "requests_total", tenant="a", code="200") == 2
    assert value(metrics, "requests_total", tenant="a", code="429") == 1


def test_the_number_of_tenant_labels_is_bounded() -> None:
    metrics = RouterMetrics()
    for number in range(2 * MAX_TENANTS):
        metrics.count_request(f"tenant-{number}", 200)
    metrics.count_request("tenant-0", 200)
    (family,) = (family for family in metrics.registry.collect() if family.name == "specdecode_router_requests")
    tenants = {sample.labels["tenant"] for sample in family.samples}
    assert len(tenants) == MAX_TENANTS + 1
    assert value(metrics, "requests_total", tenant="other", code="200") == MAX_TENANTS
    assert value(metrics, "requests_total", tenant="tenant-0", code="200") == 2


def test_gauges_follow_the_queue() -> None:
    metrics = RouterMetrics()
    metrics.set_queue(waiting=3, held=4, oldest_held_seconds=5.5)
    assert value(metrics, "num_requests_waiting") == 3
    assert value(metrics, "num_requests_held") == 4
    assert value(metrics, "oldest_held_seconds") == 5.5


def test_running_requests_are_counted_down_on_errors_too() -> None:
    metrics = RouterMetrics()

    def fail() -> None:
        with metrics.running_request():
            assert value(metrics, "num_requests_running") == 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert value(metrics, "num_requests_running") == 0


def test_resumes_and_hedges_count_by_outcome_from_zero_on() -> None:
    metrics = RouterMetrics()
    labels = {"reason": "moved", "outcome": "resumed"}
    assert value(metrics, "resumes_total", **labels) == value(metrics, "hedges_total", outcome="lost") == 0
    metrics.count_resume(ResumeReason.moved, ResumeOutcome.resumed, 0.4)
    metrics.count_resume(ResumeReason.silence, ResumeOutcome.failed)
    metrics.count_hedge(HedgeOutcome.won)
    assert value(metrics, "resumes_total", **labels) == value(metrics, "hedges_total", outcome="won") == 1
    assert value(metrics, "resume_gap_seconds_count") == 1
    assert value(metrics, "resume_gap_seconds_sum") == pytest.approx(0.4)


def test_latency_placements_refusals_and_workers() -> None:
    metrics = RouterMetrics()
    metrics.observe_added_latency(Stage.write, 0.004)
    metrics.observe_queue_time(2)
    metrics.count_placement("spill")
    metrics.count_refusal("queue_full")
    metrics.set_workers({"ready": 2, "suspect": 1, "terminating": 0})
    assert value(metrics, "added_latency_seconds_bucket", stage="write", le="0.005") == 1
    assert value(metrics, "added_latency_seconds_bucket", stage="write", le="0.002") == 0
    assert value(metrics, "request_queue_time_seconds_sum") == 2
    assert value(metrics, "placements_total", outcome="spill") == 1
    assert value(metrics, "requests_refused_total", reason="queue_full") == 1
    assert [value(metrics, "workers", state=state) for state in ("ready", "suspect", "terminating")] == [2, 1, 0]
