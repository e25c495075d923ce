"""Queries of the dashboard and of the alerts, run by a real Prometheus over an operator, a worker and a router.

The tests in tests/e2e run the same queries on a cluster with real traffic.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import prometheus_client
import pytest

from specdecode_operator import metrics
from specdecode_operator.controller.status import status_of
from specdecode_operator.state.session import Session
from specdecode_operator.types import Observation, Outcome
from specdecode_router.placement.choose import PlacementOutcome
from specdecode_router.queueing.refusals import RefusalReason
from specdecode_router.telemetry.metrics import HedgeOutcome, ResumeOutcome, ResumeReason, RouterMetrics, Stage
from specdecode_worker.contract import LatencyHistogram, Report
from specdecode_worker.metrics import ServerCounters, render
from support.kube import ROOT, wait_for
from support.operators.fleet import Truth, loop_over, workload_with
from support.prometheus import Promtool, queries_of
from support.prometheus_server import Prometheus, Target, prometheus_over

pytestmark = pytest.mark.slow

DASHBOARD = ROOT / "helm" / "specdecode" / "files" / "dashboard.json"
QUIET = {
    "specdecode_wanted_replicas",
    "specdecode_ready_prefill_replicas",
    "specdecode_capacity_requests_per_second",
    "specdecode_spec_decode_num_accepted_tokens_per_pos_total",
    "specdecode_task_",
    "specdecode_objective_seconds",
    "specdecode_device_hours_saved",
    "specdecode_operator_watch_contact_age_seconds",
    "specdecode_draft_loss_ratio",
    "specdecode_draft_drift_evidence",
    "specdecode_draft_phase",
    "specdecode_draft_candidate_gain_ratio",
    "changes(",
}
"""Parts of queries without an answer here: there is no scaling, no request with positions, no task, no objective, no
planner, no watch, no baseline of a draft, no rollout, and no plan change during the test."""


@pytest.fixture(scope="module")
def operator() -> Iterator[str]:
    """Yield the address of an operator's metrics after a decision whose gain was measured.

    The registry belongs to the process, so series of other tests are removed first.
    """
    metrics.forget_all()
    loop = loop_over(Truth(chances=[0.98] * 5), explore=0.1)
    observed = Observation(workload=workload_with(), workers=(), session=Session())
    for _ in range(40):
        decision = loop.poll()
        status = status_of(loop.deployment, observed, decision, Outcome(), now=loop.now)
        metrics.record(loop.deployment, observed, decision, status)
    metrics.RECONCILES.labels("success").inc()
    metrics.SCRAPE_ROUNDS.inc()
    metrics.SCRAPE_SECONDS.observe(0.01)
    metrics.LEADER.set(1)
    server, thread = prometheus_client.start_http_server(0, addr="127.0.0.1")
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    metrics.forget(*loop.deployment.key)


@contextmanager
def served(exposition: Callable[[], bytes]) -> Iterator[str]:
    """Yield the address at which an exposition is served."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(exposition())

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


@pytest.fixture(scope="module")
def router() -> Iterator[str]:
    """Yield the address of a router's metrics. Every scrape finds one more request that went through all stages.

    The refused request is one that no alert counts: a tenant at its own limit says nothing of the workers.
    """
    metrics_of_router = RouterMetrics()
    metrics_of_router.set_queue(waiting=0, held=0, oldest_held_seconds=0.0)
    metrics_of_router.set_workers({"ready": 2, "suspect": 0, "terminating": 0})

    def exposition() -> bytes:
        for stage in Stage:
            metrics_of_router.observe_added_latency(stage, 0.001)
        metrics_of_router.observe_queue_time(0.01)
        with metrics_of_router.running_request():
            metrics_of_router.count_request("alice", 200)
        for outcome in PlacementOutcome:
            metrics_of_router.count_placement(outcome)
        metrics_of_router.count_refusal(RefusalReason.tenant_full)
        metrics_of_router.count_resume(ResumeReason.moved, ResumeOutcome.resumed, gap_seconds=0.1)
        metrics_of_router.count_hedge(HedgeOutcome.won)
        return metrics_of_router.exposition()

    with served(exposition) as address:
        yield address


@pytest.fixture(scope="module")
def worker() -> Iterator[str]:
    """Address of a worker's metrics as its server renders them from a report."""
    loop = loop_over()
    loop.polls(4)
    latency = [
        LatencyHistogram.model_validate({"name": name, "edges": (0.1, 1.0), "counts": (3, 2, 1), "sum": 2.0})
        for name in ("ttft", "ttit", "e2e", "queue")
    ]
    report: Report = loop.worker.report().model_copy(update={"model": "m", "latency": tuple(latency)})

    with served(lambda: render(report, ServerCounters(time.monotonic))) as address:
        yield address


@pytest.fixture(scope="module")
def prometheus(
    promtool: Promtool, operator: str, worker: str, router: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    labels = {"namespace": "ns", "name": "demo", "pod": "demo-worker-1"}
    targets = [Target("operator", operator), Target("workers", worker, labels), Target("routers", router, labels)]
    with prometheus_over(promtool.folder, tmp_path_factory.mktemp("prometheus"), targets) as server:
        wait_for("two scrapes", lambda: server.query("count_over_time(up[1m]) > 2"), timeout_s=20)
        yield server


def queries() -> list[str]:
    return queries_of(json.loads(Path(DASHBOARD).read_text()))


@pytest.mark.parametrize("query", queries())
def test_a_query_of_the_dashboard_has_an_answer(prometheus: Prometheus, query: str) -> None:
    answer = prometheus.query(query)
    assert answer or any(words in query for words in QUIET), query


def test_every_alert_is_evaluated_and_none_fires_for_a_healthy_deployment(prometheus: Prometheus) -> None:
    wait_for("rules are evaluated", lambda: all(rule["health"] != "unknown" for rule in prometheus.rules()))
    rules = prometheus.rules()
    assert {rule["health"] for rule in rules} == {"ok"}
    assert [rule["name"] for rule in rules if rule["state"] != "inactive"] == []


def test_series_of_operator_and_worker_have_the_same_labels(prometheus: Prometheus) -> None:
    """Series of both have the labels namespace and name, so that a query can join them."""
    assert prometheus.query("specdecode_operator_plan_version - on (namespace, name) specdecode_plan_version")
