"""A helm release of the operator in a namespace of its own, and the CRDs that it needs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import httpx

from support.e2e.kube import Namespace
from support.kube import CHART, ROOT, Cluster, KubectlError, Manifest, is_ready, wait_for

CRD = "specdecodedeployments.specdecode.io"
CRDS = (CRD, "specdecodedrafts.specdecode.io")
OWNER_OF_CRD = {
    # The labels and annotations of the README's `helm install`, so that a later release can adopt the CRD.
    "labels": {"app.kubernetes.io/managed-by": "Helm"},
    "annotations": {"meta.helm.sh/release-name": "specdecode", "meta.helm.sh/release-namespace": "specdecode-system"},
}


@contextmanager
def installed_crds(cluster: Cluster) -> Iterator[None]:
    """Update the CRDs, which the whole cluster shares, and remove them after the block if it had none before."""
    is_new = CRD not in cluster.kubectl("get", "crd", "--output", "name")
    flags = ["--server-side", "--force-conflicts", "--field-manager", "specdecode-tests"]
    for crd in CRDS:
        cluster.kubectl("apply", *flags, "--filename", str(ROOT / "crds" / f"{crd}.yaml"))
        if is_new:
            patch = json.dumps({"metadata": OWNER_OF_CRD})
            cluster.kubectl("patch", "crd", crd, "--type", "merge", "--patch", patch)
        cluster.kubectl("wait", "--for", "condition=Established", f"crd/{crd}", "--timeout", "30s")
    yield
    if is_new and not cluster.kubectl("get", "sdd", "--all-namespaces", "--output", "name"):
        cluster.kubectl("delete", "crd", *CRDS)


ASSIGNED_USER = {"runAsUser": 1_000_650_000, "runAsGroup": 0, "fsGroup": 1_000_650_000}
"""A user as OpenShift assigns one to a namespace: known to no image, in group 0."""
NO_CLUSTER_ROLES = {"rbac.aggregateRoles": "false"}
"""Value without the roles whose names are cluster-wide: another release may have them."""
NAME, DEPLOYMENT = "e2e", "e2e-specdecode"
REPLICAS = 2
"""Replicas of the operator, as the chart has them: one leader and one standby."""


class Release:
    """The chart with its defaults, except for images, namespaces, a short poll interval and ``values``."""

    def __init__(self, namespace: Namespace, watched: Sequence[str], values: Mapping[str, str]) -> None:
        self.namespace = namespace
        repository, _, tag = namespace.cluster.operator_image.rpartition(":")
        self._values = {
            "image.repository": repository,
            "image.tag": tag,
            "worker.image": namespace.cluster.worker_image,
            "crds.enabled": "false",
            "pollSeconds": "2",
            **{f"watchNamespaces[{index}]": name for index, name in enumerate(watched)},
            **values,
        }

    def install(self) -> None:
        self._deploy("install")
        try:
            wait_for("the operator runs", self.is_running, timeout_s=90)
        except AssertionError as error:
            error.add_note(self.logs(40))
            raise

    def upgrade(self) -> None:
        """Upgrade the release, with new pods; the pods before are gone then."""
        before = {pod["metadata"]["name"] for pod in self.pods()}
        self._deploy("upgrade", "--set=podAnnotations.upgraded=yes")

        def is_new() -> bool:
            return self.is_running() and before.isdisjoint(pod["metadata"]["name"] for pod in self.pods())

        wait_for("the new operator runs", is_new, timeout_s=120)

    def test(self) -> str:
        return self._helm("test", NAME, "--logs", "--timeout", "90s")

    def uninstall(self) -> None:
        self._helm("uninstall", NAME, "--ignore-not-found")

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Run no replica while the block runs, and all of them again afterwards."""
        self._scale(0)
        try:
            yield
        finally:
            self._scale(REPLICAS)

    def kill(self) -> None:
        """Kill all replicas without any grace period; the Deployment starts others."""
        names = [pod["metadata"]["name"] for pod in self.pods()]
        self.namespace.kubectl("delete", "pod", *names, "--grace-period=0", "--force", "--ignore-not-found")

    def is_running(self) -> bool:
        """Return whether all wanted replicas run and no other pod is left."""
        wanted, pods = self.namespace.get("deployment", DEPLOYMENT)["spec"]["replicas"], self.pods()
        return len(pods) == wanted and all(map(is_ready, pods))

    def pods(self) -> list[Manifest]:
        return self.namespace.list("pods", "app.kubernetes.io/name=specdecode-operator")

    def leader(self) -> Manifest:
        """Return the pod that holds the Lease. Raises ValueError if none does."""
        holder = self.namespace.get("lease", DEPLOYMENT)["spec"].get("holderIdentity") or ""
        (leader,) = (pod for pod in self.pods() if holder.startswith(pod["metadata"]["name"]))
        return leader

    def leader_name(self) -> str:
        """Return the name of the leader's pod, once a replica leads."""
        return str(wait_for("a replica leads", self.leader, timeout_s=40)["metadata"]["name"])

    def gauge(self, metric: str, **labels: str) -> list[float]:
        """Return the values of a metric with these labels, over all operator pods."""
        values = []
        for pod in self.pods():
            text = httpx.get(f"http://{pod['status']['podIP']}:9090/metrics", timeout=10, trust_env=False).text
            lines = [line for line in text.splitlines() if line.startswith(metric + "{")]
            wanted = [f'{name}="{value}"' for name, value in labels.items()]
            values += [float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in wanted)]
        return values

    def logs(self, lines: int = -1) -> str:
        """Return the last lines of the log of each replica, all of them by default, or why there is none."""
        try:
            names = [pod["metadata"]["name"] for pod in self.pods()]
            return "\n".join(self.namespace.kubectl("logs", name, f"--tail={lines}") for name in names)
        except KubectlError as error:
            return str(error)

    def _scale(self, replicas: int) -> None:
        self.namespace.kubectl("scale", "deployment", DEPLOYMENT, f"--replicas={replicas}")
        wait_for(f"{replicas} operators run", self.is_running, timeout_s=90)

    def _deploy(self, command: str, *flags: str) -> None:
        values = [f"--set={name}={value}" for name, value in self._values.items()]
        self._helm(command, NAME, str(CHART), *values, *flags)

    def _helm(self, *words: str) -> str:
        return self.namespace.cluster.helm(*words, namespace=self.namespace.name)


@contextmanager
def installed(cluster: Cluster, purpose: str, watched: Sequence[str], values: Mapping[str, str]) -> Iterator[Release]:
    """Yield a release in a namespace of its own; both are removed afterwards."""
    with cluster.namespace(purpose) as home:
        release = Release(Namespace(cluster, home), watched, values)
        release.install()
        yield release
        release.uninstall()
