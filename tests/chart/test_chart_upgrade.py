"""Checks of `helm upgrade` from the chart before leader election to this one."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.kube import Cluster, wait_for

OLD = "e7feb28"
"""The last revision whose operator knows no leader election."""
OLD_ACCOUNT, ACCOUNT = "sd-specdecode", "sd-specdecode-operator"

LEASES = ("leases", "coordination.k8s.io")
GRANTED = (
    ("patch", "configmaps"),
    ("patch", "specdecodedeployments/status", "specdecode.io"),
    ("create", "pods/eviction"),
    ("update", *LEASES, "sd-specdecode"),
    ("get", "secrets", "", "specdecode-operator-token-key"),
)
DENIED = (
    ("get", "secrets", "", "others"),
    ("list", "secrets"),
    ("delete", "pods"),
    ("update", *LEASES, "others"),
    ("patch", "specdecodedeployments", "specdecode.io"),
)


@pytest.fixture(scope="module")
def old_folder(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the chart of the old revision, taken from git."""
    folder = tmp_path_factory.mktemp("old")
    archive = subprocess.run(["git", "-C", str(root), "archive", OLD, "helm"], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder / "helm" / "specdecode"


@pytest.fixture
def old(chart: Any, old_folder: Path, tmp_path: Path) -> Any:
    return type(chart)(old_folder, tmp_path)


SCOPES: list[dict[str, Any]] = [{}, {"watchNamespaces": ["team-a"]}]


@pytest.mark.parametrize("values", SCOPES, ids=["all namespaces", "one namespace"])
def test_immutable_fields_stay(chart: Any, old: Any, values: dict[str, Any]) -> None:
    """The API server refuses another selector of a Deployment and another role of a binding."""
    immutable: dict[str, Callable[[dict[str, Any]], Any]] = {
        "Deployment": lambda manifest: manifest["spec"]["selector"],
        "ClusterRoleBinding": lambda manifest: manifest["roleRef"],
        "RoleBinding": lambda manifest: manifest["roleRef"],
    }
    before, after = (
        {
            (manifest["kind"], manifest["metadata"]["name"]): immutable[manifest["kind"]](manifest)
            for manifest in rendered
            if manifest["kind"] in immutable
        }
        for rendered in (old.template(values), chart.template(values))
    )
    assert len(before) >= 2
    assert {key: after[key] for key in before} == before


@pytest.mark.parametrize("values", SCOPES, ids=["all namespaces", "one namespace"])
def test_the_old_operators_account_is_bound_to_nothing(chart: Any, old: Any, values: dict[str, Any]) -> None:
    """An old operator that still runs during the upgrade must not write."""
    assert old.template(values).one("ServiceAccount")["metadata"]["name"] == OLD_ACCOUNT
    rendered = chart.template(values)
    subjects = [
        subject["name"]
        for binding in (*rendered.of("ClusterRoleBinding"), *rendered.of("RoleBinding"))
        for subject in binding["subjects"]
    ]
    assert OLD_ACCOUNT not in subjects
    assert ACCOUNT in subjects


def test_values_that_the_old_chart_accepted_are_accepted(chart: Any, old: Any) -> None:
    values = {
        "image": {"repository": "registry.example/operator", "tag": "v2"},
        "imagePullSecrets": [{"name": "pull"}],
        "worker": {"image": "registry.example/worker:2", "proxy": "http://proxy:3128"},
        "watchNamespaces": ["team-a"],
        "metrics": {"podMonitor": {"enabled": True}, "rules": {"enabled": True, "labels": {"release": "p"}}},
        "resources": {"limits": {"memory": "1Gi", "cpu": 2}},
        "tolerations": [{"key": "a", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "fullnameOverride": "specdecode",
    }
    for release in (old, chart):
        done = release.try_template(values)
        assert done.returncode == 0, done.stderr


def test_reused_values_of_the_old_chart_are_refused_with_the_flag_to_use(chart: Any, old: Any, tmp_path: Path) -> None:
    """`helm upgrade --reuse-values` hides the defaults of the new chart from its templates."""
    shutil.copytree(chart.folder, tmp_path / "reused")
    shutil.copy(old.folder / "values.yaml", tmp_path / "reused" / "values.yaml")
    done = type(chart)(tmp_path / "reused", tmp_path).try_template({})
    assert done.returncode != 0
    assert "--reset-then-reuse-values" in done.stderr


class OnCluster:
    """One release of the old chart in a namespace of its own, without running pods."""

    def __init__(self, cluster: Cluster, namespace: str, chart: Any) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self._chart = chart

    def upgrade(self, folder: Path, *flags: str) -> None:
        """Install or upgrade to a chart; its image does not exist."""
        values = ["image.repository=localhost/absent", "image.pullPolicy=Never", "crds.enabled=false"]
        values += [f"watchNamespaces={{{self.namespace}}}"]
        settings = [word for value in values for word in ("--set", value)]
        command = ["upgrade", "--install", "sd", str(folder), "--namespace", self.namespace, *settings, *flags]
        environment = dict(self.cluster.environment)
        program = Path(self._chart.program)
        done = subprocess.run([program, *command], capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == 0, done.stderr

    def may(self, account: str, verb: str, resource: str, group: str = "", name: str = "") -> bool:
        """Return whether an account of the namespace has a right there. A subresource follows after a slash."""
        plural, _, subresource = resource.partition("/")
        attributes = {"namespace": self.namespace, "verb": verb, "group": group, "resource": plural, "name": name}
        user = f"system:serviceaccount:{self.namespace}:{account}"
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "resourceAttributes": {**attributes, "subresource": subresource}},
        }
        answer = self.cluster.kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(review))
        return bool(json.loads(answer)["status"]["allowed"])


@pytest.fixture
def release(cluster: Cluster, chart: Any) -> Iterator[OnCluster]:
    with cluster.namespace("chart") as namespace:
        yield OnCluster(cluster, namespace, chart)


@pytest.mark.cluster
@pytest.mark.timeout(240)
def test_upgrade_on_a_cluster(release: OnCluster, chart: Any, old_folder: Path) -> None:
    """The API server takes the upgrade, and from then on only the new account has rights."""
    release.upgrade(old_folder)
    assert release.may(OLD_ACCOUNT, "patch", "configmaps")
    release.upgrade(chart.folder, "--set", "networkPolicy.enabled=true")
    wait_for("the old operator has no rights", lambda: not release.may(OLD_ACCOUNT, "patch", "configmaps"))
    for right in GRANTED:
        assert release.may(ACCOUNT, *right), right
    for right in DENIED:
        assert not release.may(ACCOUNT, *right), right
    deployment = release.cluster.get("deployment", "sd-specdecode", release.namespace)
    assert deployment["spec"]["replicas"] == 2
    assert deployment["spec"]["strategy"]["type"] == "RollingUpdate"
