"""Rights on Jobs on a real API server: what the operator may do, what it is denied, and how it serves without them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator import manifests
from specdecode_operator.api.v1alpha1 import GROUP, KIND, VERSION
from specdecode_operator.kube.kinds import OWN_NAMESPACE_PERMISSIONS, PERMISSIONS
from specdecode_operator.state.draft_record import RunRecord
from specdecode_operator.types import Manifest
from support.kube import Cluster, KubectlError, wait_for
from support.operators.fleet import DEFAULTS, SPEC, deep, deployment_with
from support.operators.operator_account import RBAC, grant, kubeconfig_of
from support.operators.operator_process import OperatorProcess, install_crd

RUN = RunRecord(id="6740f2a1", started=1.0, draft_uri="embedded://draft", claim="drafts")
JOBS = ("batch", "jobs")
WITHOUT_JOBS = {right: verbs for right, verbs in PERMISSIONS.items() if right != JOBS}
FULL, POOR = "full", "poor"
"""Accounts with all rights of the operator, and without those on Jobs."""


@pytest.fixture(scope="module")
def full(cluster: Cluster, namespace: str) -> str:
    return grant(cluster, namespace, FULL, PERMISSIONS)


@pytest.fixture(scope="module")
def other(cluster: Cluster) -> Iterator[str]:
    """Yield a namespace in which the account has no rights."""
    with cluster.namespace("other") as name:
        yield name


def jobs_in(namespace: str) -> list[Manifest]:
    """Return the Jobs that the operator makes, without their owner, which does not exist."""
    deployment = replace(deployment_with(distillation={"storage": {"uri": "pvc://drafts"}}), namespace=namespace)
    made = (
        manifests.distillation_job(deployment, RUN, DEFAULTS, ("0123456789abcdef",)),
        manifests.deletion_job(deployment, RUN, DEFAULTS),
    )
    for job in made:
        job["metadata"].pop("ownerReferences")
        job["spec"]["suspend"] = True  # no pod of it may run here
    return list(made)


def send(cluster: Cluster, verb: str, manifest: Manifest, *flags: str) -> str:
    return cluster.kubectl(verb, *flags, "-f", "-", stdin=json.dumps(manifest))


def may(cluster: Cluster, account: str, namespace: str, *words: str) -> bool:
    try:
        return cluster.kubectl("auth", "can-i", *words, account, namespace=namespace).strip() == "yes"
    except KubectlError:
        return False


def test_jobs_may_be_read_created_and_deleted_in_served_namespaces_alone(
    cluster: Cluster, full: str, namespace: str, other: str
) -> None:
    for verb in ("get", "list", "watch", "create", "delete"):
        assert may(cluster, full, namespace, verb, "jobs.batch"), verb
        assert not may(cluster, full, other, verb, "jobs.batch"), verb
        assert not may(cluster, full, "kube-system", verb, "jobs.batch"), verb
    for verb in ("patch", "update", "deletecollection"):
        assert not may(cluster, full, namespace, verb, "jobs.batch"), verb


@pytest.mark.parametrize(
    "words",
    [
        ("create", "pods"),
        ("delete", "pods"),
        ("get", "pods", "--subresource=log"),
        ("create", "pods", "--subresource=exec"),
        ("create", "pods", "--subresource=attach"),
        ("create", "pods", "--subresource=portforward"),
        ("patch", "pods", "--subresource=ephemeralcontainers"),
        ("patch", "jobs.batch", "--subresource=status"),
        ("create", "cronjobs.batch"),
        ("get", "secrets"),
        ("list", "secrets"),
        ("patch", "secrets"),
        ("delete", "secrets"),
        ("get", "persistentvolumeclaims"),
        ("create", "persistentvolumeclaims"),
        ("delete", "configmaps"),
        ("escalate", f"roles.{RBAC}"),
        ("bind", f"roles.{RBAC}"),
    ],
    ids=" ".join,
)
def test_training_gives_no_other_right(words: tuple[str, ...], cluster: Cluster, full: str, namespace: str) -> None:
    assert not may(cluster, full, namespace, *words)


def test_the_api_server_admits_every_job_of_the_operator(cluster: Cluster, full: str, namespace: str) -> None:
    labels = ("pod-security.kubernetes.io/warn=restricted", "--overwrite")
    cluster.kubectl("label", "namespace", namespace, *labels)
    for job in jobs_in(namespace):
        assert "created" in send(cluster, "create", job, full, "--dry-run=server")


def test_calls_are_denied_and_not_only_undeclared(cluster: Cluster, full: str, namespace: str, other: str) -> None:
    (job, _), (elsewhere, _) = jobs_in(namespace), jobs_in(other)
    name = job["metadata"]["name"]
    send(cluster, "create", job, full)
    try:
        change = json.dumps({"spec": {"suspend": False}})
        with pytest.raises(KubectlError, match="cannot patch resource"):
            cluster.kubectl("patch", "job", name, "-p", change, full, namespace=namespace)
        with pytest.raises(KubectlError, match="cannot create resource"):
            send(cluster, "create", elsewhere, full)
        with pytest.raises(KubectlError, match="cannot list resource"):
            cluster.kubectl("get", "jobs", full, namespace=other)
        assert name in cluster.kubectl("get", "jobs", full, namespace=namespace)
    finally:
        cluster.kubectl("delete", "job", name, full, namespace=namespace)
    poor = grant(cluster, namespace, POOR, WITHOUT_JOBS, OWN_NAMESPACE_PERMISSIONS)
    with pytest.raises(KubectlError, match="cannot create resource"):
        send(cluster, "create", job, poor)


def test_without_rights_on_jobs_the_operator_serves_and_the_status_names_them(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    install_crd(cluster)
    grant(cluster, namespace, POOR, WITHOUT_JOBS, OWN_NAMESPACE_PERMISSIONS)
    spec: dict[str, Any] = {
        "replicas": 0,
        "distillation": {"capture": {}, "storage": {"uri": "pvc://drafts"}},
    }
    document = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": "poor"},
        "spec": json.loads(json.dumps(deep(SPEC, spec))),
    }

    def condition() -> dict[str, Any]:
        status = cluster.get("sdd", "poor", namespace).get("status", {})
        return next((one for one in status.get("conditions", []) if one["type"] == "DraftRollout"), {})

    kubeconfig = kubeconfig_of(cluster, namespace, POOR, tmp_path)
    with OperatorProcess(cluster, namespace, tmp_path, kubeconfig=kubeconfig):
        cluster.apply(document, namespace=namespace)
        wait_for("the plan of the workers", lambda: cluster.get("configmap", "poor-plan", namespace), timeout_s=60)
        assert cluster.get("deployment", "poor-worker", namespace)
        wait_for("the missing right", lambda: 'cannot list resource "jobs"' in condition()["message"], timeout_s=60)
        assert (condition()["status"], condition()["reason"]) == ("False", "RunRefused")
        ask_for_a_run(cluster, namespace, "1")
        version = cluster.get("configmap", "poor-plan", namespace)["metadata"]["resourceVersion"]
        change = json.dumps({"spec": {"speculation": {"depth": {"max": 2, "initial": 2}}}})
        cluster.kubectl("patch", "sdd", "poor", "--type=merge", "-p", change, namespace=namespace)

        def is_planned() -> bool:
            return cluster.get("configmap", "poor-plan", namespace)["metadata"]["resourceVersion"] != version  # type: ignore[no-any-return]

        wait_for("another plan", is_planned, timeout_s=60)
        assert 'cannot list resource "jobs"' in condition()["message"]
        grant(cluster, namespace, POOR, PERMISSIONS, OWN_NAMESPACE_PERMISSIONS)

        def is_used() -> bool:
            # The refusal of a request stays until the next one.
            ask_for_a_run(cluster, namespace, str(time.time_ns()))
            return "jobs" not in condition()["message"]

        wait_for("the right is used", is_used, timeout_s=120, every_s=4)


def ask_for_a_run(cluster: Cluster, namespace: str, number: str) -> None:
    change = json.dumps({"spec": {"distillation": {"trigger": {"request": number}}}})
    cluster.kubectl("patch", "sdd", "poor", "--type=merge", "-p", change, namespace=namespace)
