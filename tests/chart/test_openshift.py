"""Every pod of the chart and of the operator against OpenShift's security context constraint restricted-v2.

It is what an OpenShift cluster admits without further rights. The admission is modelled as far as a pod can differ from
the rules of the published object.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator import manifests
from support.operators.fleet import DEFAULTS, RUN, deployment_of

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
ASSIGNED = range(1000680000, 1000690000)
"""Users of a namespace, and its groups: the first of them is the one that a pod gets."""
OPENSHIFT = ("--api-versions", "security.openshift.io/v1")
PULLED = {"model": {"uri": "hf://org/model"}, "speculation": {"method": "eagle3", "draft": {"uri": "pvc://heads/one"}}}
SPECS: dict[str, dict[str, Any]] = {
    "plain": {"model": {"uri": "embedded://t"}, "speculation": {"method": "none"}},
    "all": {
        **PULLED,
        "tlsSecretRef": {"name": "tls"},
        "apiKeysSecretRef": {"name": "keys"},
        "workers": {"template": {"spec": {"serviceAccountName": "reader"}}},
        "modelCache": {"persistentVolumeClaim": {"claimName": "models"}},
        "distillation": {"storage": {"uri": "pvc://drafts"}, "promptsConfigMapRef": {"name": "prompts"}},
        "router": {"replicas": 2, "trafficSplit": [{"deployment": "other", "percent": 10}]},
    },
    "bucket": {
        **PULLED,
        "distillation": {"storage": {"uri": "s3://drafts/a", "region": "eu", "secretRef": {"name": "aws"}}},
    },
}


def violations(pod: dict[str, Any]) -> Iterator[str]:
    """Yield why the admission refuses a pod. What a pod leaves out is filled in by the admission."""
    yield from (f"{field} is not allowed" for field in ("hostIPC", "hostNetwork", "hostPID") if pod.get(field))
    for volume in pod.get("volumes", []):
        yield from (f"volume {volume['name']}: {kind}" for kind in volume.keys() - {"name", *VOLUMES})
    yield from _identity(pod.get("securityContext", {}), "pod")
    for container in (*pod.get("initContainers", []), *pod["containers"]):
        name, context = container["name"], container.get("securityContext", {})
        yield from _identity(context, name)
        yield from (f"{name}: {field}" for field in ("privileged", "allowPrivilegeEscalation") if context.get(field))
        capabilities = context.get("capabilities", {})
        yield from (f"{name}: capability {one}" for one in {*capabilities.get("add", [])} - {"NET_BIND_SERVICE"})
        if "ALL" not in capabilities.get("drop", ["ALL"]):
            yield f"{name}: drops {capabilities['drop']}"
        if any(port.get("hostPort") for port in container.get("ports", [])):
            yield f"{name}: hostPort"


def _identity(context: dict[str, Any], name: str) -> Iterator[str]:
    if context.get("runAsUser", ASSIGNED[0]) not in ASSIGNED:
        yield f"{name}: runAsUser {context['runAsUser']}"
    if context.get("fsGroup", ASSIGNED[0]) != ASSIGNED[0]:
        yield f"{name}: fsGroup {context['fsGroup']}"
    if "seLinuxOptions" in context:
        yield f"{name}: seLinuxOptions"
    profile = context.get("seccompProfile", {"type": "RuntimeDefault"})["type"]
    if profile != "RuntimeDefault":
        yield f"{name}: seccompProfile {profile}"
    # The constraint has no rule for it. A random user is in group 0 alone, to which the images give their folders.
    if "runAsGroup" in context:
        yield f"{name}: runAsGroup {context['runAsGroup']}"


def children(spec: dict[str, Any], *, fixed_user: bool) -> dict[str, dict[str, Any]]:
    """Return the pods that the operator makes for a deployment, by name."""
    defaults, deployment = replace(DEFAULTS, fixed_user=fixed_user), deployment_of(spec)
    storage = deployment.spec.distillation.storage
    claim = storage.claim if storage else ""
    run = RUN.model_copy(update={"claim": claim, "bucket": "" if claim else "s3://drafts/a"})
    jobs = {"distillation": manifests.distillation_job(deployment, run, defaults)}
    if claim:
        jobs["deletion"] = manifests.deletion_job(deployment, run, defaults)
    return {
        "worker": manifests.pod_template(deployment, defaults)["spec"],
        "router": manifests.router_workload(deployment, defaults)["spec"]["template"]["spec"],
        **{name: job["spec"]["template"]["spec"] for name, job in jobs.items()},
    }


def chart_pods(rendered: Any) -> dict[str, dict[str, Any]]:
    return {
        "operator": rendered.pod["spec"],
        **{pod["metadata"]["name"]: pod["spec"] for pod in rendered.of("Pod")},
    }


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_restricted_v2_admits_every_pod_of_the_operator(spec: dict[str, Any]) -> None:
    for name, pod in children(spec, fixed_user=False).items():
        assert not list(violations(pod)), name


@pytest.mark.parametrize(("values", "flags"), [({}, OPENSHIFT), ({"openshift": True}, ())], ids=["auto", "true"])
def test_restricted_v2_admits_every_pod_of_the_chart(
    chart: Any, values: dict[str, Any], flags: tuple[str, ...]
) -> None:
    rendered = chart.template(values, *flags)
    for name, pod in chart_pods(rendered).items():
        assert not list(violations(pod)), name
    assert operator_setting(rendered) == "false"


@pytest.mark.parametrize(("values", "flags"), [({}, ()), ({"openshift": False}, OPENSHIFT)], ids=["auto", "false"])
def test_elsewhere_pods_name_their_user_which_restricted_v2_refuses(
    chart: Any, values: dict[str, Any], flags: tuple[str, ...]
) -> None:
    refused = ["pod: fsGroup 65532", "pod: runAsGroup 65532", "pod: runAsUser 65532"]
    rendered = chart.template(values, *flags)
    assert operator_setting(rendered) == "true"
    for pod in (*chart_pods(rendered).values(), *children(SPECS["all"], fixed_user=True).values()):
        assert sorted(violations(pod)) == refused


def operator_setting(rendered: Any) -> str:
    return str(rendered.environment["SPECDECODE_OPERATOR_FIXED_USER"])


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"hostNetwork": True}, "hostNetwork is not allowed"),
        ({"volumes": [{"name": "cache", "hostPath": {"path": "/models"}}]}, "volume cache: hostPath"),
        ({"securityContext": {"seLinuxOptions": {"level": "s0"}}}, "pod: seLinuxOptions"),
        ({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, "pod: seccompProfile Unconfined"),
        ({"containers": [{"name": "c", "securityContext": {"privileged": True}}]}, "c: privileged"),
        (
            {"containers": [{"name": "c", "securityContext": {"allowPrivilegeEscalation": True}}]},
            "c: allowPrivilegeEscalation",
        ),
        (
            {"containers": [{"name": "c", "securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}}}]},
            "c: capability SYS_PTRACE",
        ),
        ({"containers": [{"name": "c", "securityContext": {"capabilities": {"drop": ["KILL"]}}}]}, "c: drops ['KILL']"),
        ({"containers": [{"name": "c", "ports": [{"hostPort": 80}]}]}, "c: hostPort"),
        ({"initContainers": [{"name": "i", "securityContext": {"runAsUser": 0}}]}, "i: runAsUser 0"),
    ],
)
def test_the_checker_refuses_what_the_constraint_forbids(change: dict[str, Any], refused: str) -> None:
    assert list(violations({"containers": [{"name": "worker"}], **change})) == [refused]


@pytest.mark.parametrize("recipe", ["worker/Dockerfile", "operator/Dockerfile"])
def test_group_0_may_write_where_the_images_user_may(root: Path, recipe: str) -> None:
    """A user that the namespace assigns is in group 0 and in no other group that an image could know."""
    text = (root / recipe).read_text()
    folders = {"/tmp"}
    for line in text.splitlines():
        if "65532" in line and not line.startswith("USER "):
            made = re.search(r"install -d -o 65532 -g 0 -m 0775((?: /\S+)+)", line)
            assert made, line
            folders |= {*made[1].split()}
    home = re.search(r"HOME=(\S+)", text)
    assert home
    assert home[1] in folders
