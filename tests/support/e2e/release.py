"""A helm release of the operator for the tests, in its own namespace, that watches one other namespace only."""

from __future__ import annotations

import json

from support.e2e.kube import Namespace
from support.kube import CHART, ROOT, Cluster, KubectlError, Manifest, wait_for

CRD = "specdecodedeployments.specdecode.io"
CRDS = (CRD, "specdecodedrafts.specdecode.io")
OWNER_OF_CRD = {
    # The labels and annotations of the README's `helm install`, so that a later release can adopt the CRD.
    "labels": {"app.kubernetes.io/managed-by": "Helm"},
    "annotations": {"meta.helm.sh/release-name": "specdecode", "meta.helm.sh/release-namespace": "specdecode-system"},
}


class Crd:
    """The CRDs, which the whole cluster shares.

    They are updated before the tests, and removed afterwards only if the tests installed them.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._brought = CRD not in cluster.kubectl("get", "crd", "--output", "name")

    def install(self) -> None:
        flags = ["--server-side", "--force-conflicts", "--field-manager", "specdecode-tests"]
        for crd in CRDS:
            self._cluster.kubectl("apply", *flags, "--filename", str(ROOT / "crds" / f"{crd}.yaml"))
            if self._brought:
                patch = json.dumps({"metadata": OWNER_OF_CRD})
                self._cluster.kubectl("patch", "crd", crd, "--type", "merge", "--patch", patch)
            self._cluster.kubectl("wait", "--for", "condition=Established", f"crd/{crd}", "--timeout", "30s")

    def remove(self) -> None:
        if self._brought and not self._cluster.kubectl("get", "sdd", "--all-namespaces", "--output", "name"):
            self._cluster.kubectl("delete", "crd", *CRDS)


ASSIGNED_USER = {"runAsUser": 1_000_650_000, "runAsGroup": 0, "fsGroup": 1_000_650_000}
"""A user as OpenShift assigns one to a namespace: known to no image, in group 0."""
REPLICAS = 2
"""Replicas of the operator, as the chart has them: one leader and one standby."""


class Release:
    """The chart, installed for one watched namespace."""

    def __init__(self, cluster: Cluster, home: str, watched: str) -> None:
        self.name = "e2e"
        self.deployment = "e2e-specdecode"
        self.namespace = Namespace(cluster, home)
        self._watched = watched

    def install(self) -> None:
        cluster = self.namespace.cluster
        repository, _, tag = cluster.operator_image.rpartition(":")
        values = {
            "image.repository": repository,
            "image.tag": tag,
            "worker.image": cluster.worker_image,
            "watchNamespaces[0]": self._watched,
            "crds.enabled": "false",
            "pollSeconds": "2",
            **{f"podSecurityContext.{field}": str(number) for field, number in ASSIGNED_USER.items()},
        }
        flags = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
        self._helm("install", self.name, str(CHART), *flags)
        wait_for("the operator runs", lambda: self._settled(REPLICAS), timeout_s=90)

    def test(self) -> str:
        return self._helm("test", self.name, "--logs", "--timeout", "90s")

    def uninstall(self) -> None:
        self._helm("uninstall", self.name, "--ignore-not-found")

    def stop(self) -> None:
        """Scale the operator to zero and return once no replica runs."""
        self._scale(0)

    def start(self) -> None:
        """Scale the operator up again and return once all replicas run."""
        self._scale(REPLICAS)

    def kill(self) -> None:
        """Kill all replicas without any grace period; the Deployment starts others."""
        names = [pod["metadata"]["name"] for pod in self._pods()]
        self.namespace.kubectl("delete", "pod", *names, "--grace-period=0", "--force", "--ignore-not-found")

    def _scale(self, replicas: int) -> None:
        self.namespace.kubectl("scale", "deployment", self.deployment, f"--replicas={replicas}")
        wait_for(f"{replicas} operators run", lambda: self._settled(replicas), timeout_s=90)

    def pod(self) -> str:
        """Return the name of the leader's pod."""
        names = [pod["metadata"]["name"] for pod in self._pods()]

        def leader() -> str:
            holder = self.namespace.get("lease", self.deployment)["spec"].get("holderIdentity") or ""
            return next((name for name in names if holder.startswith(name)), "")

        return wait_for("a replica leads", leader, timeout_s=40)

    def logs(self) -> str:
        """Return the logs of all replicas."""
        try:
            names = [pod["metadata"]["name"] for pod in self._pods()]
            return "\n".join(self.namespace.kubectl("logs", name, "--tail", "-1") for name in names)
        except KubectlError as error:
            return str(error)

    def _settled(self, replicas: int) -> bool:
        pods = self._pods()
        running = [pod for pod in pods if all(c["started"] and c["ready"] for c in _containers(pod))]
        return len(pods) == len(running) == replicas

    def _pods(self) -> list[Manifest]:
        labels = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/name=specdecode-operator"
        return self.namespace.list("pods", labels)

    def _helm(self, *words: str) -> str:
        return self.namespace.cluster.helm(*words, namespace=self.namespace.name)


def _containers(pod: Manifest) -> list[Manifest]:
    return pod["status"].get("containerStatuses") or [{"started": False, "ready": False}]
