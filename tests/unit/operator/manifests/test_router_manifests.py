"""Tests of the routers' children, and of when the public Service selects routers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator import manifests
from specdecode_operator.kube.kinds import APPLIED
from specdecode_operator.types import Manifest, Worker, Workload
from specdecode_router.__main__ import _parser as router_parser
from specdecode_router.settings import LiveSettings, RouterSettings
from specdecode_worker.contract import Report
from support.operators.fleet import DEFAULTS, decided, deployment_with, workload_with

TWO = {"router": {"replicas": 2}}


def children(routers: Workload | None = None, **spec: Any) -> dict[tuple[str, str], Manifest]:
    """Return the children of a decision by kind and name."""
    decision, _ = decided(deployment_with(**spec), routers=routers)
    return {(child["kind"], child["metadata"]["name"]): child for child in decision.children}


def pod(**spec: Any) -> dict[str, Any]:
    workload = manifests.router_workload(deployment_with(**{**TWO, **spec}), DEFAULTS)
    return workload["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def flags(**spec: Any) -> dict[str, str]:
    """Return the flags of the router by name."""
    command = pod(**spec)["containers"][0]["command"]
    assert command[:2] == ["specdecode-router", "serve"]
    return dict(word.removeprefix("--").split("=", 1) for word in command[2:])


def test_routers_have_an_account_with_rights_on_endpoints_and_their_own_config_map_alone() -> None:
    made = children(**TWO)
    assert made["RoleBinding", "demo-router"]["subjects"][0]["name"] == "demo-router"
    assert made["RoleBinding", "demo-router"]["roleRef"]["name"] == "demo-router"
    assert pod()["serviceAccountName"] == made["ServiceAccount", "demo-router"]["metadata"]["name"]
    assert made["Role", "demo-router"]["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["demo-demand"], "verbs": ["get", "patch"]},
    ]
    assert "data" not in made["ConfigMap", "demo-demand"], "they are left to the routers"


def test_children_of_routers_are_owned_and_have_the_role_of_routers() -> None:
    mine = [
        child for child in children(**TWO).values() if child["metadata"]["labels"]["specdecode.io/role"] == "router"
    ]
    assert {child["kind"] for child in mine} <= APPLIED.keys()
    assert len(mine) == 7
    for child in mine:
        assert child["metadata"]["ownerReferences"][0]["uid"] == "u1"
        assert child["metadata"]["labels"]["specdecode.io/name"] == "demo"
        assert "specdecode.io/variant" not in child["metadata"]["labels"], "a variant is of workers"


def test_workers_and_routers_are_selected_apart() -> None:
    made = children(workload_with(2), **TWO)
    workers = made["Deployment", "demo-worker"]["spec"]["selector"]["matchLabels"]
    routers = made["Deployment", "demo-router"]["spec"]["selector"]["matchLabels"]
    labels = made["Deployment", "demo-router"]["spec"]["template"]["metadata"]["labels"]
    assert routers.items() <= labels.items()
    assert not workers.items() <= labels.items()
    assert made["PodDisruptionBudget", "demo-router"]["spec"]["selector"]["matchLabels"] == routers
    assert made["Service", "demo-workers"]["spec"]["selector"]["specdecode.io/role"] == "worker"
    assert list(made)[-1] == ("Deployment", "demo-router"), "after the rights that its pods need"


@pytest.mark.parametrize(
    ("routers", "role"),
    [
        (None, "worker"),
        (workload_with(2, ready=0, available=0), "worker"),
        (workload_with(2, ready=1, available=1), "router"),
        (workload_with(2), "router"),
    ],
    ids=["none yet", "starting", "one ready", "all ready"],
)
def test_the_service_selects_routers_once_one_is_ready(routers: Workload | None, role: str) -> None:
    assert children(routers, **TWO)["Service", "demo"]["spec"]["selector"]["specdecode.io/role"] == role


@pytest.mark.parametrize(("keys", "role"), [(("k", "k"), "router"), (("k", ""), "worker"), ((), "router")])
def test_the_service_selects_workers_while_one_of_them_is_too_old_for_routers(keys: Sequence[str], role: str) -> None:
    workers = tuple(
        Worker(name=f"w{number}", uid=f"u{number}", address=None, ready=True,
               report=Report(boot_id="b", worker="w", clock_seconds=1, compatibility_key=key))
        for number, key in enumerate(keys)
    )  # fmt: skip
    decision, _ = decided(deployment_with(**TWO), workload=workload_with(2), workers=workers, routers=workload_with(2))
    (service,) = [child for child in decision.children if child["metadata"]["name"] == "demo"]
    assert service["spec"]["selector"]["specdecode.io/role"] == role


def test_routers_leave_after_the_service_selects_workers_again() -> None:
    made = children(workload_with(2))
    assert made["Service", "demo"]["spec"]["selector"]["specdecode.io/role"] == "worker"
    assert made["Deployment", "demo-router"]["spec"]["replicas"] == 0
    order = list(made)
    assert order.index(("Service", "demo")) < order.index(("Deployment", "demo-router"))
    assert ("Role", "demo-router") not in made


def test_an_autoscaler_keeps_the_number_of_routers() -> None:
    autoscaled = {"router": {"replicas": 2, "autoscaled": True}}
    assert "replicas" not in children(**autoscaled)["Deployment", "demo-router"]["spec"]
    off = {"router": {"replicas": 0, "autoscaled": True}}
    assert children(workload_with(5), **off)["Deployment", "demo-router"]["spec"]["replicas"] == 0


def test_flags_name_workers_demand_and_bounds() -> None:
    spec = {
        "router": {"replicas": 2, "holdTimeout": "15m"},
        "drain": {"endpointDelay": "7s", "gracePeriod": "90s"},
    }
    assert flags(**spec) == {
        "host": "0.0.0.0",
        "port": "8000",
        "namespace": "ns",
        "service": "demo-workers",
        "deployment": "demo",
        "demand-config-map": "demo-demand",
        "admin-token-file": "/etc/specdecode/tokens/router",
        "live-settings-file": "/etc/specdecode/settings/settings.json",
        "endpoint-delay-seconds": "7",
        "grace-period-seconds": "90",
    }
    assert pod(**spec)["terminationGracePeriodSeconds"] > 7 + 90


def test_a_router_mounts_its_own_token_and_no_other() -> None:
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    assert volumes["tokens"]["secret"]["secretName"] == "demo-tokens"
    assert volumes["tokens"]["secret"]["items"] == [{"key": "router", "path": "router"}]
    mounts = {mount["mountPath"]: mount for mount in pod()["containers"][0]["volumeMounts"]}
    assert mounts["/etc/specdecode/tokens"]["readOnly"]
    assert "subPath" not in mounts["/etc/specdecode/tokens"], "a replaced token must arrive"


def test_keys_and_certificates_of_workers_are_used_by_routers() -> None:
    spec = {"apiKeysSecretRef": {"name": "keys", "key": "all.txt"}, "tlsSecretRef": {"name": "cert"}}
    made = flags(**spec)
    assert made["api-keys-path"] == "/etc/specdecode/api-keys/all.txt"
    assert (made["tls-cert-file"], made["tls-key-file"], made["ca-file"]) == (
        "/etc/specdecode/tls/tls.crt",
        "/etc/specdecode/tls/tls.key",
        "/etc/specdecode/tls/ca.crt",
    )
    container = pod(**spec)["containers"][0]
    assert {probe["httpGet"]["scheme"] for probe in (container["readinessProbe"], container["livenessProbe"])} == {
        "HTTPS"
    }
    assert {volume["name"] for volume in pod(**spec)["volumes"]} == {"tokens", "api-keys", "tls", "settings", "tmp"}


def test_the_template_is_merged_and_the_labels_stay() -> None:
    assert "podAntiAffinity" in pod()["affinity"]
    container = {"name": "router", "image": "mine:1", "resources": {"limits": {"memory": "2Gi"}}}
    users = {"affinity": {"podAntiAffinity": None, "nodeAffinity": {}}, "nodeSelector": {"pool": "cpu"}}
    labels = {"specdecode.io/role": "worker", "team": "search"}
    template = {"metadata": {"labels": labels}, "spec": {**users, "containers": [container]}}
    made = children(router={"replicas": 2, "template": template})["Deployment", "demo-router"]["spec"]["template"]
    merged = made["metadata"]["labels"]
    assert (merged["specdecode.io/role"], merged["team"]) == ("router", "search")
    assert (made["spec"]["affinity"], made["spec"]["nodeSelector"]) == ({"nodeAffinity": {}}, {"pool": "cpu"})
    (router,) = made["spec"]["containers"]
    assert (router["image"], router["resources"]["limits"]) == ("mine:1", {"memory": "2Gi"})
    assert router["resources"]["requests"] == {"cpu": "250m", "memory": "256Mi"}, "what it does not say stays"
    assert pod()["containers"][0]["image"] == DEFAULTS.router_image


def test_shares_of_other_deployments_become_flags_and_mounted_tokens() -> None:
    """A share for the deployment itself is left out."""
    split = [{"deployment": name, "percent": percent} for name, percent in (("next", 10), ("small", 0), ("demo", 5))]
    made = pod(router={"replicas": 2, "trafficSplit": split})
    command = made["containers"][0]["command"]
    folder = "/etc/specdecode/other-tokens"
    assert [word for word in command if word.startswith("--backend=")] == [
        f"--backend=name=next,service=next-workers,token-file={folder}/next/router",
        f"--backend=name=small,service=small-workers,token-file={folder}/small/router",
    ]
    assert "--deployment=demo" in command
    volumes = {volume["name"]: volume.get("secret", {}) for volume in made["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in made["containers"][0]["volumeMounts"]}
    for name in ("next", "small"):
        secret = volumes[mounts[f"{folder}/{name}"]]
        assert (secret["secretName"], secret["optional"]) == (f"{name}-tokens", True), "routers start without it"
        assert secret["items"] == [{"key": "router", "path": "router"}]


def routed(percent: int, hold: str) -> dict[str, Any]:
    return {
        "replicas": 2,
        "holdTimeout": hold,
        "trafficSplit": [{"deployment": "next", "percent": percent}],
    }


def test_the_router_understands_its_flags_and_settings(tmp_path: Path) -> None:
    router = routed(10, "15m")
    given = router_parser().parse_args(pod(router=router)["containers"][0]["command"][1:])
    (tmp_path / "settings.json").write_text(
        children(router=router)["ConfigMap", "demo-router"]["data"]["settings.json"]
    )
    values = {name: value for name, value in vars(given).items() if name != "command"}
    assert values["live_settings_file"] == "/etc/specdecode/settings/settings.json"
    values["live_settings_file"] = str(tmp_path / "settings.json")
    settings = LiveSettings(RouterSettings.model_validate(values)).current
    (backend,) = settings.backends
    assert (backend.name, backend.percent, backend.service) == ("next", 10, "next-workers")
    assert (settings.hold_seconds, settings.no_worker_seconds) == (900, 900)
    assert settings.deployment == "demo"


def test_split_and_hold_change_without_a_rollout() -> None:
    before, after = (children(router=router) for router in (routed(10, "10m"), routed(25, "15m")))
    assert before["Deployment", "demo-router"] == after["Deployment", "demo-router"]
    assert before["ConfigMap", "demo-router"]["data"] != after["ConfigMap", "demo-router"]["data"]
    order = list(after)
    assert order.index(("ConfigMap", "demo-router")) < order.index(("Deployment", "demo-router")), "pods mount it"
