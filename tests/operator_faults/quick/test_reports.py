"""Invalid reports are refused and named in a condition, and the plan stays unchanged.

A restarted worker and a report of a neighbouring contract version are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from specdecode_operator.state.learned import LearnedState, parse_state
from specdecode_worker.contract import CONTRACT_VERSION
from support.e2e.release import Release
from support.kube import wait_for
from support.operator_faults.tenant import ServedDeployment, Tenant

INVALID_REPORTS = {
    "nan": "running_request_seconds: nan is not a count",
    "negative": "draft_tokens: -5 is not a count",
    "backwards": "drafts: fell from",
    "garbage": "the report has more than 65536 bytes",
}


@pytest.fixture(scope="module")
def served(tenant: Tenant, installation: Release) -> Iterator[ServedDeployment]:
    with tenant.deployment("reports", replicas=len(INVALID_REPORTS), behaviour={"running": 1}) as served:
        yield served


def wait_until_fresh(served: ServedDeployment) -> None:
    wait_for("every report is believed", lambda: served.is_condition("ReportsFresh", "True"), timeout_s=30)


def learned(served: ServedDeployment) -> LearnedState:
    """Return what the operator has learnt of the workers and stored."""
    data = served.child("configmap", "-state")["data"]
    state = parse_state(data, served.get()["metadata"]["uid"])
    assert state is not None, "the state cannot be read"
    return state


@pytest.mark.timeout(240)
def test_invalid_reports_are_named_and_the_plan_is_unchanged(served: ServedDeployment) -> None:
    wait_until_fresh(served)
    version, rows = served.settled_plan_version(), learned(served).rows
    behaviours = list(zip(served.pods(), INVALID_REPORTS, strict=True))
    for pod, behaviour in behaviours:
        served.behave(pod, report=behaviour)
    wanted = [f"pod {pod['metadata']['name']}: {INVALID_REPORTS[behaviour]}" for pod, behaviour in behaviours]
    served.wait_named("ReportsFresh", *wanted, timeout_s=60)
    assert served.is_condition("ReportsFresh", "False")
    assert set(served.plan_versions()) == {version}
    state = learned(served)
    assert state.rows == rows
    assert all(cell.hits > 0.4 * cell.total for cell in state.acceptance), "nothing was learnt of lies"
    assert served.is_condition("Ready", "True"), "nobody stops serving for what he says"
    for pod, _ in behaviours:
        served.behave(pod, report="honest")
    wait_until_fresh(served)


@pytest.mark.timeout(240)
def test_restart_and_neighbouring_contract_version_are_accepted(served: ServedDeployment) -> None:
    """Plans are pushed only to workers with an accepted report, so taking the new plan proves the acceptance."""
    first, second, *_ = served.pods()
    before = served.settled_plan_version()
    served.behave(first, contract_version=CONTRACT_VERSION + 1)
    with pytest.raises(httpx.TransportError, match=r"disconnected|reset|closed"):
        served.behave(second, exit=True)
    wait_for("the container is new", lambda: served.restarts()[second["metadata"]["name"]] == 1, timeout_s=60)
    served.patch({"speculation": {"depth": {"max": 4}}})
    wait_for("the new plan is everywhere", lambda: min(served.plan_versions()) > before, timeout_s=30)
    wait_until_fresh(served)
