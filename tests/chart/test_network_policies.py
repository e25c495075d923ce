"""Checks of the NetworkPolicies, with a small model of how a network enforces them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.decision.decide import decide
from specdecode_operator.manifests import network_policy, pod_template, rolling_hash, router_workload, workload
from specdecode_operator.manifests.objects import NAME_LABEL, ROLE_LABEL, Role, selector
from specdecode_operator.settings import read_settings
from specdecode_operator.state.learned import LearnedState, Session
from specdecode_operator.types import Observation, PolicyPeers
from specdecode_worker.contract import Port
from support.operators.fleet import DEFAULTS, deployment_of

DEPLOYMENT = deployment_of({"model": {"uri": "embedded://t"}, "speculation": {"method": "none"}})
OPERATOR = ("sys", {"app.kubernetes.io/name": "specdecode-operator", "app.kubernetes.io/instance": "sd"})
STRANGER = ("team-a", {"app": "shell"})
PROMETHEUS = ("monitoring", {"app": "prometheus"})
WORKER = selector("llama")
ROUTER = router_workload(DEPLOYMENT, DEFAULTS)["spec"]["template"]["metadata"]["labels"]
"""Labels of the pods themselves, so that a change of the operator's labels is seen here."""
JOB = {NAME_LABEL: "llama", ROLE_LABEL: Role.job.value}
FROM_MONITORING = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]

Pod = tuple[str, dict[str, str]]
"""Namespace and labels of a pod."""


def allows(policy: dict[str, Any], source: Pod, port: int | str) -> bool:
    """Return whether an ingress policy lets a pod reach a port of the pods that the policy selects."""
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    return any(
        port in {item["port"] for item in rule["ports"]}
        and ("from" not in rule or any(matches(peer, policy, source) for peer in rule["from"]))
        for rule in policy["spec"]["ingress"]
    )


def matches(peer: dict[str, Any], policy: dict[str, Any], source: Pod) -> bool:
    namespace, labels = source
    if "namespaceSelector" in peer:
        wanted = peer["namespaceSelector"]["matchLabels"]
        if not wanted.items() <= {"kubernetes.io/metadata.name": namespace}.items():
            return False
    elif namespace != policy["metadata"].get("namespace", "sys"):
        return False
    selector = peer.get("podSelector", {})
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", ())
    )


def deployment_policy(rendered: Any) -> dict[str, Any]:
    """Return the policy that the operator of a rendered chart makes for the deployment llama of team-a."""
    settings = read_settings(rendered.environment)
    assert settings.policy_peers is not None
    return dict(network_policy(DEPLOYMENT, settings.policy_peers))


def operator_policy(rendered: Any) -> dict[str, Any]:
    return rendered.one("NetworkPolicy")  # type: ignore[no-any-return]


def test_one_value_turns_all_policies_off(chart: Any) -> None:
    rendered = chart.template({"networkPolicy": {"enabled": False}})
    assert not rendered.of("NetworkPolicy")
    assert "SPECDECODE_OPERATOR_POLICY_PEERS" not in rendered.environment


def test_only_operator_and_routers_reach_the_admin_port(chart: Any) -> None:
    policy = deployment_policy(chart.template())
    assert policy["metadata"]["namespace"] == "team-a"
    assert policy["metadata"]["ownerReferences"][0]["uid"] == "u"
    assert allows(policy, OPERATOR, Port.admin)
    impostor = ("team-a", OPERATOR[1])
    neighbour = ("sys", {"app": "shell"})
    other_job = ("team-a", {**JOB, NAME_LABEL: "qwen"})
    for source in (STRANGER, PROMETHEUS, impostor, neighbour, other_job, ("team-a", WORKER)):
        assert not allows(policy, source, Port.admin), source


@pytest.mark.parametrize("labels", [ROUTER, JOB], ids=["routers", "training jobs"])
def test_routers_and_training_jobs_of_the_namespace_reach_the_admin_port(chart: Any, labels: dict[str, str]) -> None:
    policy = deployment_policy(chart.template())
    assert allows(policy, ("team-a", labels), Port.admin)
    assert not allows(policy, ("team-b", labels), Port.admin)


def test_the_policy_admits_the_pods_of_the_charts_own_deployment(chart: Any) -> None:
    rendered = chart.template()
    policy = deployment_policy(rendered)
    labels = rendered.one("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert allows(policy, ("sys", labels), Port.admin)
    assert operator_policy(rendered)["spec"]["podSelector"]["matchLabels"].items() <= labels.items()


def test_anyone_reaches_the_public_port_unless_clients_are_listed(chart: Any) -> None:
    policy = deployment_policy(chart.template())
    assert allows(policy, STRANGER, Port.http)
    assert not allows(policy, STRANGER, Port.admin)
    values = {"networkPolicy": {"workers": {"clientsFrom": FROM_MONITORING}}}
    policy = deployment_policy(chart.template(values))
    assert allows(policy, PROMETHEUS, Port.http)
    assert not allows(policy, STRANGER, Port.http)
    assert not allows(policy, PROMETHEUS, Port.admin)


def test_further_peers_of_the_admin_port(chart: Any) -> None:
    values = {"networkPolicy": {"workers": {"adminFrom": FROM_MONITORING}}}
    policy = deployment_policy(chart.template(values))
    assert allows(policy, PROMETHEUS, Port.admin)
    assert allows(policy, OPERATOR, Port.admin)
    assert not allows(policy, STRANGER, Port.admin)


def test_the_operator_serves_health_and_metrics_only(chart: Any) -> None:
    rendered = chart.template()
    for port in (item["name"] for item in rendered.container["ports"]):
        assert allows(operator_policy(rendered), STRANGER, port)
    assert not allows(operator_policy(rendered), STRANGER, 8001)
    values = {"networkPolicy": {"metricsFrom": FROM_MONITORING}}
    policy = operator_policy(chart.template(values))
    assert allows(policy, PROMETHEUS, "metrics")
    assert not allows(policy, STRANGER, "metrics")
    assert allows(policy, STRANGER, "health")


def pods_of_the_operator() -> dict[str, dict[str, Any]]:
    """Return the pod templates that the operator makes, by role."""
    template = pod_template(DEPLOYMENT, DEFAULTS)
    workers = workload(DEPLOYMENT, template, rolling_hash(DEPLOYMENT.spec), 1)
    routers = router_workload(DEPLOYMENT, DEFAULTS)
    return {"worker": workers["spec"]["template"], "router": routers["spec"]["template"]}


def selects(policy: dict[str, Any], pod: dict[str, Any]) -> bool:
    labels, selector = pod["metadata"]["labels"], policy["spec"]["podSelector"]
    (roles,) = selector["matchExpressions"]
    assert roles["operator"] == "In"
    return selector["matchLabels"].items() <= labels.items() and labels[roles["key"]] in roles["values"]


@pytest.mark.parametrize("role", ["worker", "router"])
def test_policies_open_the_ports_of_the_operators_pods_and_no_others(chart: Any, role: str) -> None:
    """Only the HTTP and admin ports are open to others, and the block port only to workers of the deployment."""
    pod, policy = pods_of_the_operator()[role], deployment_policy(chart.template())
    assert selects(policy, pod)
    ports = {port["containerPort"] for container in pod["spec"]["containers"] for port in container["ports"]}
    sources = (OPERATOR, STRANGER, ("team-a", ROUTER), ("team-a", {**WORKER, NAME_LABEL: "qwen"}))
    opened = {port for port in range(1, 65536) if any(allows(policy, source, port) for source in sources)}
    assert opened == {Port.http, Port.admin}
    prefill = {**WORKER, ROLE_LABEL: "prefill"}
    assert all(allows(policy, ("team-a", labels), Port.blocks) for labels in (WORKER, prefill))
    assert selects(policy, {"metadata": {"labels": prefill}})
    assert ports <= {*opened, Port.blocks}


def test_the_operator_makes_a_policy_only_with_peers() -> None:
    observed = Observation(workload=None, workers=(), session=Session(learned=LearnedState(uid="u"), stored=False))
    for peers in (None, PolicyPeers()):
        decision, _ = decide(DEPLOYMENT, observed, replace(DEFAULTS, policy_peers=peers), now=0)
        made = [child["metadata"]["name"] for child in decision.children if child["kind"] == "NetworkPolicy"]
        assert made == (["llama"] if peers else [])
