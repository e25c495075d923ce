"""Checks that the chart runs two operators of which one leads, and that an upgrade or a drain leaves one running."""

from __future__ import annotations

from typing import Any

from specdecode_operator.settings import PREFIX


def operator_pod(rendered: Any) -> dict[str, Any]:
    return rendered.one("Deployment")["spec"]["template"]  # type: ignore[no-any-return]


def container(rendered: Any) -> dict[str, Any]:
    (only,) = operator_pod(rendered)["spec"]["containers"]
    return only  # type: ignore[no-any-return]


def variables(rendered: Any) -> dict[str, Any]:
    """Return the operator's variables without their prefix: a value, or the field of the pod that gives it."""
    return {
        variable["name"].removeprefix(PREFIX): variable.get("value")
        or variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        for variable in container(rendered)["env"]
    }


def test_two_operators_roll_without_a_gap(chart: Any) -> None:
    spec = chart.template().one("Deployment")["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def test_replicas_can_be_chosen(chart: Any) -> None:
    for replicas in (0, 1, 5):
        assert chart.template({"replicas": replicas}).one("Deployment")["spec"]["replicas"] == replicas


def test_every_operator_takes_part_in_the_election(chart: Any) -> None:
    for values in ({}, {"replicas": 1}):
        given = variables(chart.template(values))
        assert given["LEADER_ELECTION"] == "true"
        assert given["LEASE_NAME"] == "sd-specdecode"
        assert given["NAMESPACE"] == "metadata.namespace"
        assert given["IDENTITY"] == "metadata.name"


def test_the_lease_that_is_used_is_the_lease_that_rbac_allows(chart: Any) -> None:
    for values in ({}, {"leaderElection": {"leaseName": "other"}}):
        rendered = chart.template(values)
        (own,) = [role for role in rendered.of("Role") if role["metadata"]["name"].endswith(":own")]
        (names,) = [r["resourceNames"] for r in own["rules"] if r["resources"] == ["leases"] and "get" in r["verbs"]]
        assert names == [variables(rendered)["LEASE_NAME"]]


def test_two_releases_of_one_namespace_use_two_leases(chart: Any) -> None:
    names = {
        variables(chart.template({"fullnameOverride": name}))["LEASE_NAME"] for name in ("specdecode-a", "specdecode-b")
    }
    assert len(names) == 2


def test_an_operator_that_is_not_ready_yet_is_left_alive(chart: Any) -> None:
    probes = container(chart.template())
    paths = {name: probes[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/healthz", "readiness": "/ready", "liveness": "/healthz"}


def test_the_budget_lets_one_operator_go_and_blocks_no_drain(chart: Any) -> None:
    rendered = chart.template()
    spec = rendered.one("PodDisruptionBudget")["spec"]
    assert (spec["maxUnavailable"], spec["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    selector = spec["selector"]["matchLabels"].items()
    assert selector <= operator_pod(rendered)["metadata"]["labels"].items()
    assert not any(selector <= pod["metadata"]["labels"].items() for pod in rendered.of("Pod"))


def test_no_budget_for_a_single_operator(chart: Any) -> None:
    off = {"podDisruptionBudget": {"enabled": False}}
    for values in ({"replicas": 1}, {"replicas": 0}, off):
        assert not chart.template(values).of("PodDisruptionBudget")


def test_replicas_prefer_different_nodes(chart: Any) -> None:
    rendered = chart.template()
    (term,) = operator_pod(rendered)["spec"]["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    labels = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert labels == rendered.one("Deployment")["spec"]["selector"]["matchLabels"]


def test_the_workers_authority_is_mounted_as_a_folder_without_keys(chart: Any) -> None:
    """The Secret of an authority may have its private key: only the certificate is mounted."""
    rendered = chart.template({"worker": {"caSecret": "worker-ca"}})
    (volume,) = [v for v in operator_pod(rendered)["spec"]["volumes"] if "secret" in v]
    assert volume["secret"] == {"secretName": "worker-ca", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    (mount,) = [m for m in container(rendered)["volumeMounts"] if m["name"] == volume["name"]]
    assert mount["readOnly"] is True
    assert "subPath" not in mount, "the kubelet updates folders only"
    assert variables(rendered)["WORKER_CA"] == f"{mount['mountPath']}/ca.crt"


def test_without_an_authority_nothing_is_mounted(chart: Any) -> None:
    rendered = chart.template()
    assert "WORKER_CA" not in variables(rendered)
    assert [volume["name"] for volume in operator_pod(rendered)["spec"]["volumes"]] == ["tmp"]
