"""Invalid reports are refused and named in a condition, and the plan stays unchanged.

A restarted worker and a report of a neighbouring contract version are accepted. Stand-ins answer on the pods' ports
(support/operator_faults/stand_in_worker.py); operator and API server are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdecode_worker.contract import CONTRACT_VERSION
from support.e2e.endpoint import Endpoint, resource
from support.e2e.kube import Namespace
from support.e2e.release import Release
from support.e2e.worker_faults import restarts
from support.kube import wait_for
from support.operator_faults.tenant import SCRIPT, SMALL, stand_in_template

NAME = "standins"
INVALID_REPORTS = {
    "nan": "running_request_seconds: nan is not a count",
    "negative": "draft_tokens: -5 is not a count",
    "backwards": "drafts: fell from",
    "garbage": "the report has more than 65536 bytes",
}
STALE_SECONDS = 30
CONTROL_PORT = 8002


@pytest.fixture(scope="module")
def standins(release: Release, watched: Namespace) -> Iterator[Endpoint]:
    """Yield a deployment of four Ready pods with reports that the test controls."""
    release.start()
    script = (Path(__file__).parents[1] / "support" / "operator_faults" / "stand_in_worker.py").read_text()
    watched.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": SCRIPT}, "data": {"worker.py": script}}
    )
    workers = {"template": stand_in_template({"running": 1}), "resources": SMALL}
    made = resource(NAME, {"draft": {"uri": "embedded://none"}}, workers)
    made["spec"]["replicas"] = len(INVALID_REPORTS)
    watched.apply(made)
    endpoint = Endpoint(watched, NAME)
    wait_for("all stand", lambda: len(endpoint.ready_pods()) == len(INVALID_REPORTS), timeout_s=90)
    yield endpoint
    watched.kubectl("delete", "sdd", NAME, "--timeout=30s")
    watched.kubectl("delete", "configmap", SCRIPT)


def behave(endpoint: Endpoint, pod: str, **behaviour: Any) -> None:
    with endpoint.namespace.reach("pod", pod, CONTROL_PORT) as url:
        httpx.put(f"{url}/behaviour", json=behaviour, timeout=10, trust_env=False).raise_for_status()


def wait_until_fresh(endpoint: Endpoint) -> None:
    wait_for("every report is believed", lambda: endpoint.condition("ReportsFresh")["status"] == "True", timeout_s=30)


def versions(endpoint: Endpoint) -> set[int]:
    return {endpoint.plan(pod).version for pod in endpoint.ready_pods()}


def settled_version(endpoint: Endpoint) -> int:
    """Return the plan version that all pods have taken, once the plan is made for their draft."""

    def read_version() -> int:
        (version,) = versions(endpoint)
        assert all(endpoint.plan(pod).draft for pod in endpoint.ready_pods())
        return version

    return wait_for("the plan is everywhere", read_version, timeout_s=30)


def is_named(endpoint: Endpoint, behaviour_by_pod: dict[str, str]) -> bool:
    """Assert that the condition names every pod with an invalid report, with the reason."""
    condition = endpoint.condition("ReportsFresh")
    assert condition["status"] == "False", condition
    missing = [
        behaviour
        for pod, behaviour in behaviour_by_pod.items()
        if f"pod {pod}: {INVALID_REPORTS[behaviour]}" not in condition["message"]
    ]
    assert not missing, condition
    return True


@pytest.mark.timeout(240)
def test_invalid_reports_are_named_and_the_plan_is_unchanged(standins: Endpoint) -> None:
    wait_until_fresh(standins)
    version, rows = settled_version(standins), standins.state()["rows"]
    behaviour_by_pod = dict(zip(sorted(standins.ready_pods()), INVALID_REPORTS, strict=True))
    for pod, behaviour in behaviour_by_pod.items():
        behave(standins, pod, report=behaviour)
    wait_for("each is named", lambda: is_named(standins, behaviour_by_pod), timeout_s=STALE_SECONDS + 30)
    assert versions(standins) == {version}
    state = standins.state()
    assert (state["rows"], state["plan"]["version"]) == (rows, version)
    assert all(cell["hits"] > 0.4 * cell["total"] for cell in state["acceptance"]), "nothing was learnt of lies"
    assert standins.condition("Ready")["status"] == "True", "nobody stops serving for what he says"
    for pod in behaviour_by_pod:
        behave(standins, pod, report="honest")
    wait_until_fresh(standins)


@pytest.mark.timeout(240)
def test_restart_and_neighbouring_contract_version_are_accepted(standins: Endpoint) -> None:
    """A restarted worker and one with a newer contract version still take new plans.

    Plans are pushed only to workers with an accepted report, so taking the new plan proves the acceptance.
    """
    first, second, *_ = sorted(standins.ready_pods())
    before = settled_version(standins)
    behave(standins, first, contract_version=CONTRACT_VERSION + 1)
    with pytest.raises(httpx.TransportError, match=r"disconnected|reset|closed"):
        behave(standins, second, exit=True)
    wait_for(
        "the container is new",
        lambda: restarts(standins, second) == 1 and second in standins.ready_pods(),
        timeout_s=60,
    )
    standins.patch({"speculation": {"depth": {"max": 4}}})
    wait_for("the new plan is everywhere", lambda: min(versions(standins)) > before, timeout_s=30)
    assert standins.condition("ReportsFresh")["status"] == "True"
