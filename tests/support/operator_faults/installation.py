"""A helm release of the operator, and its pods and processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from support import processes
from support.kube import CHART, Cluster, KubectlError, Manifest, is_ready, wait_for
from support.operator_faults.api_client import Api

RELEASE = "faults"
SELECTOR = "app.kubernetes.io/name=specdecode-operator"


class Installation:
    """The operator, installed by helm in a namespace of its own, watching some other namespaces."""

    def __init__(self, cluster: Cluster, api: Api, home: str, watched: tuple[str, ...]) -> None:
        self.api = api
        self.home = home
        self.watched = watched
        self._cluster = cluster

    def install(self) -> None:
        """Install the chart with its defaults, except for image, namespaces and a short poll interval."""
        self._helm("install", RELEASE, str(CHART), *self._flags())
        try:
            wait_for("the operator runs", self.is_running, timeout_s=90)
        except AssertionError as error:
            error.add_note(self.logs())
            raise

    def upgrade(self) -> None:
        """Upgrade the release, with new pods; the pods before are gone then."""
        before = {pod["metadata"]["name"] for pod in self.pods()}
        self._helm("upgrade", RELEASE, str(CHART), *self._flags(), "--set=podAnnotations.upgraded=yes")

        def is_new() -> bool:
            return self.is_running() and before.isdisjoint(pod["metadata"]["name"] for pod in self.pods())

        wait_for("the new operator runs", is_new, timeout_s=120)

    def _flags(self) -> list[str]:
        """Return the values for helm as flags."""
        repository, _, tag = self._cluster.operator_image.rpartition(":")
        values: dict[str, str] = {
            "image.repository": repository,
            "image.tag": tag,
            "worker.image": self._cluster.operator_image,
            "crds.enabled": "false",
            "pollSeconds": "2",
            "rbac.aggregateRoles": "false",  # cluster-wide names, which another release may have
            **{f"watchNamespaces[{index}]": name for index, name in enumerate(self.watched)},
        }
        return [f"--set={name}={value}" for name, value in values.items()]

    def uninstall(self) -> None:
        self._helm("uninstall", RELEASE, "--ignore-not-found")

    @property
    def deployment(self) -> Manifest:
        (deployment,) = self.api.list("deployment", self.home, SELECTOR)
        return deployment

    def is_running(self) -> bool:
        """Return whether all wanted replicas run and no other pod is left."""
        wanted, pods = self.deployment["spec"]["replicas"], self.pods()
        return len(pods) == wanted and all(is_ready(pod) for pod in pods)

    def pods(self) -> list[Manifest]:
        return self.api.list("pod", self.home, SELECTOR)

    def leader(self) -> Manifest:
        """Return the pod that holds the Lease. Raises LookupError if none does."""
        holders = [lease["spec"].get("holderIdentity") or "" for lease in self.api.list("lease", self.home)]
        leaders = [pod for pod in self.pods() if any(pod["metadata"]["name"] in holder for holder in holders)]
        return leaders[0]

    def gauge(self, metric: str, **labels: str) -> list[float]:
        """Return the values of a metric with these labels, over all operator pods."""
        values = []
        for pod in self.pods():
            text = httpx.get(f"http://{pod['status']['podIP']}:9090/metrics", timeout=10, trust_env=False).text
            lines = [line for line in text.splitlines() if line.startswith(metric + "{")]
            wanted = [f'{name}="{value}"' for name, value in labels.items()]
            values += [float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in wanted)]
        return values

    def logs(self) -> str:
        """Return the end of the operator's log, for the report of a failed test."""
        texts = []
        for pod in self.pods():
            name = pod["metadata"]["name"]
            try:
                log = self._cluster.kubectl("logs", name, "--tail=40", namespace=self.home)
            except KubectlError as error:
                log = f"{error}\n{json.dumps(pod['status'])}"
            texts.append(f"--- {name}\n{log}")
        return "\n".join(texts)

    def _helm(self, *words: str) -> None:
        self._cluster.helm(*words, namespace=self.home)


@contextmanager
def stopped_operator(pod: Manifest) -> Iterator[None]:
    """Stop the operator's process in a pod (SIGSTOP) while the block runs, as a frozen node would."""
    pids = processes.of_pod(pod["metadata"]["uid"], "specdecode-operator")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGCONT)
