"""Tests of the router's metrics: names, bounded labels, and gauges that follow the queue."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from specdecode_router.telemetry.metrics import MAX_TENANTS, RouterMetrics


def value(metrics: RouterMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"specdecode_router_{name}", labels)


def test_exposition_parses_and_has_every_series() -> None:
    metrics = RouterMetrics()
    families = {family.name for family in text_string_to_metric_families(metrics.exposition().decode())}
    assert {family.name for family in metrics.registry.collect()} <= families
    assert "process_resident_memory_bytes" in families


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


def test_requests_without_a_tenant_leave_the_labels_to_tenants() -> None:
    metrics = RouterMetrics()
    for name in ("", *(f"tenant-{number}" for number in range(MAX_TENANTS))):
        metrics.count_request(name, 401)
    assert value(metrics, "requests_total", tenant="other", code="401") is None
    assert value(metrics, "requests_total", tenant="", code="401") == 1


def test_resumes_and_hedges_count_from_zero_on() -> None:
    metrics = RouterMetrics()
    assert value(metrics, "resumes_total", reason="moved", outcome="resumed") == 0
    assert value(metrics, "hedges_total", outcome="lost") == 0
