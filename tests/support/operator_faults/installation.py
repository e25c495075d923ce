"""A helm release of the operator, and its pods and processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from support.kube import ROOT, Cluster, KubectlError, Manifest, wait_for
from support.operator_faults.api_client import Api

HELM = Path(sys.executable).parent / "helm"
RELEASE = "faults"
CHART = str(ROOT / "helm" / "specdecode")
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
        self._helm("install", RELEASE, CHART, *self._flags())
        try:
            wait_for("the operator runs", self.is_running, timeout_s=90)
        except AssertionError as error:
            error.add_note(self.logs())
            raise

    def upgrade(self) -> None:
        """Upgrade the release, with new pods; the pods before are gone then."""
        before = {pod["metadata"]["name"] for pod in self.pods()}
        self._helm("upgrade", RELEASE, CHART, *self._flags(), "--set=podAnnotations.upgraded=yes")

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

    def _helm(self, *arguments: str) -> None:
        command = [str(HELM), "--namespace", self.home, *arguments]
        environment = dict(self._cluster.environment)
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
        assert done.returncode == 0, f"helm {arguments[0]}: {done.stderr}{done.stdout}"


def is_ready(pod: Manifest) -> bool:
    """Return whether a pod is Ready and not terminating."""
    conditions: list[dict[str, Any]] = pod["status"].get("conditions", [])
    ready = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def operator_processes(pod: Manifest) -> list[int]:
    """Return the pids of the operator in a pod of this machine's node, found by the pod's cgroup."""
    uid = pod["metadata"]["uid"]
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            cgroup = (folder / "cgroup").read_text().replace("_", "-")
            command = (folder / "cmdline").read_bytes()
        except OSError:  # the process ended meanwhile
            continue
        if uid in cgroup and b"specdecode-operator" in command:
            pids.append(int(folder.name))
    return pids


@contextmanager
def stopped_operator(pod: Manifest) -> Iterator[None]:
    """Stop the operator's process in a pod (SIGSTOP) while the block runs, as a frozen node would."""
    pids = operator_processes(pod)
    assert pids, f"no process of pod {pod['metadata']['name']} is visible on this machine"
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGCONT)
