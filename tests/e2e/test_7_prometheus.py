"""A real Prometheus scrapes the operator, a router and a worker, and evaluates every dashboard query and every alert.

An earlier file deletes the shared endpoint, so this file deploys its own. The status shows figures only after a minute
with 500 drafts in it, so there is traffic until they appear. Padded steps make drafts gain on every processor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from specdecode_worker.contract import Port, StepTime, SyntheticKnobs
from support.e2e.endpoint import ONE_CORE, Endpoint
from support.e2e.kube import Namespace
from support.e2e.loop import deployed
from support.e2e.release import Release
from support.e2e.routed import SMALL
from support.kube import ROOT, Manifest, wait_for
from support.prometheus import Promtool, queries_of
from support.prometheus_server import Prometheus, Target, prometheus_over

pytestmark = pytest.mark.timeout(420)

NAME = "scraped"
OPERATOR_METRICS = 9090
MAY_BE_EMPTY = {
    "changes(",  # annotations: the plan may not change meanwhile
    "specdecode_operator_decisions_total",  # there may be no decision meanwhile
    "specdecode_expected_gain_ratio",
    "specdecode_realised_gain_ratio",  # the gain may not have been measured yet
    "specdecode_objective_seconds",  # this deployment has no objective
    "specdecode_ready_prefill_replicas",  # this deployment has no prefill workers
    "specdecode_draft_",  # no baseline of a week, no rollout of a draft
    "specdecode_router_resume",  # no worker fails meanwhile
    "specdecode_router_hedges",
    "specdecode_router_requests_refused",
}
LONG_STEPS = SyntheticKnobs(step_time=(StepTime(seconds=0.25),))
"""Longer than every real step also while other programs use the processors: else the guard suspends speculation."""
SPECULATION: Manifest = {
    "depth": {"min": 1, "max": 4, "initial": 3},  # the minimum of 1 ensures drafts in every case
    "tasks": [{"name": "code", "match": "Python"}],
}


@pytest.fixture(scope="module")
def scraped(watched: Namespace) -> Iterator[Endpoint]:
    scaling = {"owner": "Operator", "minReplicas": 1, "maxReplicas": 1}
    router = {"replicas": 1, "template": {"spec": {"containers": [SMALL]}}}
    workers = {"resources": ONE_CORE}
    with deployed(watched, NAME, SPECULATION, workers, knobs=LONG_STEPS, scaling=scaling, router=router) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def prometheus(
    scraped: Endpoint, release: Release, promtool: Promtool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """Yield a Prometheus that scrapes all three with the labels of the chart's monitors.

    Traffic runs until the status shows a SPEEDUP.
    """
    pod = scraped.one_pod()
    (router_pod,) = scraped.pods("router")
    with ExitStack() as stack:
        operator = stack.enter_context(release.namespace.reach("pod", release.leader_name(), OPERATOR_METRICS))
        worker = stack.enter_context(scraped.namespace.reach("pod", pod, Port.http))
        router = stack.enter_context(scraped.namespace.reach("pod", router_pod["metadata"]["name"], Port.http))
        labels = {"namespace": scraped.namespace.name, "name": NAME, "pod": pod}
        targets = [
            Target("operator", operator.removeprefix("http://")),
            Target("workers", worker.removeprefix("http://"), labels),
            Target("routers", router.removeprefix("http://"), {**labels, "pod": "router"}),
        ]
        folder = tmp_path_factory.mktemp("prometheus")
        server = stack.enter_context(prometheus_over(promtool.folder, folder, targets))
        with scraped.traffic(4):
            speedup = f'specdecode_speedup{{name="{NAME}"}}'
            wait_for("SPEEDUP is measured", lambda: server.query(speedup), timeout_s=300, every_s=2)
            yield server


def queries() -> list[str]:
    file = Path(ROOT) / "helm" / "specdecode" / "files" / "dashboard.json"
    return [query.replace('name=~".*"', f'name=~"{NAME}"') for query in queries_of(json.loads(file.read_text()))]


def test_every_dashboard_query_returns_samples(prometheus: Prometheus) -> None:
    needed = [query for query in queries() if not any(words in query for words in MAY_BE_EMPTY)]

    def all_have_samples() -> bool:
        """Return whether no query is empty. Some look at the last minute, so a pause of the guard is waited for."""
        assert [query for query in needed if not prometheus.query(query)] == []
        return True

    wait_for("every query has samples", all_have_samples, timeout_s=150, every_s=5)


def test_metrics_equal_the_status(prometheus: Prometheus, scraped: Endpoint) -> None:
    def equal() -> bool:
        status = scraped.speculation()
        for series, shown in {
            "specdecode_acceptance_rate": status.get("acceptanceRate"),
            "specdecode_speedup": status.get("speedup"),
            "specdecode_depth": status.get("depth"),
        }.items():
            assert shown is not None, f"status has nothing for {series}"
            (sample,) = prometheus.query(f'{series}{{name="{NAME}"}}')
            assert float(sample["value"][1]) == pytest.approx(shown, abs=0.051), series
        return True

    wait_for("status and metrics agree", equal, timeout_s=60)


def test_operator_and_worker_series_join_by_name(prometheus: Prometheus) -> None:
    """The plan version of the operator equals that of the worker, joined by namespace and name."""
    gap = "specdecode_operator_plan_version - on (namespace, name) specdecode_plan_version"
    wait_for(
        "the plan has arrived",
        lambda: [sample["value"][1] for sample in prometheus.query(f'{gap} == 0 and on (name) up{{name="{NAME}"}}')],
        timeout_s=30,
    )


def test_every_alert_is_evaluated_without_an_error(prometheus: Prometheus) -> None:
    wait_for("rules are evaluated", lambda: all(rule["health"] != "unknown" for rule in prometheus.rules()))
    rules = prometheus.rules()
    assert [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []


def test_pin_that_cannot_run_raises_an_alert(prometheus: Prometheus, scraped: Endpoint) -> None:
    """The alert is pending at once; it fires five minutes later. Then a corrected pin takes effect."""
    scraped.patch({"speculation": {"pin": "chain:17"}})
    pending = 'ALERTS{alertname="SpecdecodeBadPin",alertstate="pending"}'
    wait_for("the alert is pending", lambda: prometheus.query(pending), timeout_s=30)
    assert scraped.condition("Pinned")["reason"] == "BadPin"
    version = scraped.plan().version
    scraped.patch({"speculation": {"pin": "chain:2"}})
    wait_for("the shape is pinned", lambda: scraped.plan().initial.depth == 2 and not scraped.plan().rows)
    assert scraped.plan().version > version
    wait_for("the condition says so", lambda: scraped.condition("Pinned")["status"] == "True")
    events = scraped.namespace.list("events")
    reasons = {event["reason"] for event in events if event["involvedObject"]["name"] == NAME}
    assert {"BadPin", "SteeringChanged"} <= reasons
