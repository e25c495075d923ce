"""Invalid reports are refused and named in a condition, and the plan stays unchanged.

A restarted worker and a report of a neighbouring contract version are accepted. Stand-ins answer on the pods' ports
(harness/standin.py); operator and API server are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.e2e.endpoint import Endpoint, resource
from support.e2e.kube import Namespace
from support.e2e.release import Release
from support.kube import wait_for

NAME = "standins"
INVALID_REPORTS = {
    "nan": "running_request_seconds: nan is not a count",
    "negative": "draft_tokens: -5 is not a count",
    "backwards": "drafts: fell from",
    "garbage": "the report has more than 65536 bytes",
}
STALE_SECONDS = 30


@pytest.fixture(scope="module")
def standins(release: Release, watched: Namespace) -> Iterator[Endpoint]:
    """Yield a deployment of four Ready pods with reports that the test controls."""
    release.start()
    script = (Path(__file__).parents[1] / "support" / "e2e" / "standin.py").read_text()
    scripts = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}, "data": {"standin.py": script}}
    watched.apply(scripts)
    worker = {
        "name": "worker",
        "command": ["python3", "/standin/standin.py"],
        "volumeMounts": [{"name": "standin", "mountPath": "/standin"}],
    }
    template = {
        "spec": {
            "volumes": [{"name": "standin", "configMap": {"name": NAME}}],
            "initContainers": [{"name": "pull", "command": ["true"]}],
            "containers": [worker],
        }
    }
    small = {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"cpu": "200m", "memory": "128Mi"}}
    made = resource(NAME, {"draft": {"uri": "embedded://none"}}, {"template": template, "resources": small})
    made["spec"]["replicas"] = len(INVALID_REPORTS)
    watched.apply(made)
    endpoint = Endpoint(watched, NAME)
    wait_for("all stand", lambda: len(endpoint.ready_pods()) == len(INVALID_REPORTS), timeout_s=90)
    yield endpoint
    watched.kubectl("delete", "sdd", NAME, "--timeout=30s")
    watched.kubectl("delete", "configmap", NAME)


def set_behaviour(endpoint: Endpoint, pod: str, behaviour: str) -> None:
    with endpoint.admin(pod) as client:
        client.put("/behaviour", content=behaviour.encode()).raise_for_status()


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
        set_behaviour(standins, pod, behaviour)
    wait_for("each is named", lambda: is_named(standins, behaviour_by_pod), timeout_s=STALE_SECONDS + 30)
    assert versions(standins) == {version}
    state = standins.state()
    assert (state["rows"], state["plan"]["version"]) == (rows, version)
    assert all(cell["hits"] > 0.4 * cell["total"] for cell in state["acceptance"]), "nothing was learnt of lies"
    assert standins.condition("Ready")["status"] == "True", "nobody stops serving for what he says"
    for pod in behaviour_by_pod:
        set_behaviour(standins, pod, "honest")
    wait_until_fresh(standins)


@pytest.mark.timeout(240)
def test_restart_and_neighbouring_contract_version_are_accepted(standins: Endpoint) -> None:
    """A restarted worker and one with a newer contract version still take new plans.

    Plans are pushed only to workers with an accepted report, so taking the new plan proves the acceptance.
    """
    first, second, *_ = sorted(standins.ready_pods())
    before = settled_version(standins)
    set_behaviour(standins, first, "newer")
    with standins.admin(second) as client, pytest.raises(httpx.TransportError, match=r"disconnected|reset|closed"):
        client.put("/behaviour", content=b"exit")

    def restarts() -> int:
        (pod,) = (pod for pod in standins.pods() if pod["metadata"]["name"] == second)
        return sum(status["restartCount"] for status in pod["status"]["containerStatuses"])

    wait_for("the container is new", lambda: restarts() == 1 and second in standins.ready_pods(), timeout_s=60)
    standins.patch({"speculation": {"depth": {"max": 4}}})
    wait_for("the new plan is everywhere", lambda: min(versions(standins)) > before, timeout_s=30)
    assert standins.condition("ReportsFresh")["status"] == "True"
