"""The real operator as a process on loopback, for one namespace of the cluster, and accounts with its rights."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import yaml

from specdecode_operator.api import crd
from support import processes
from support.kube import Cluster, Manifest, wait_for


def install_crd(cluster: Cluster, own: Manifest | None = None) -> None:
    """Install the CRDs as the models have them, over other versions that the cluster may have.

    ``own`` is another CRD of SpecDecodeDeployments.
    """
    for definition in (own or crd.crd(), crd.draft_crd()):
        cluster.apply(definition, server_side=True)
        # The full name: copies of the kind in other groups may be served or cached by kubectl at the same time.
        words = ("get", definition["metadata"]["name"], "--all-namespaces")
        wait_for("our kind is served", lambda words=words: cluster.kubectl(*words) is not None)


class OperatorProcess:
    """`specdecode-operator run` as a context manager; SIGTERM at the end must make it exit with 0."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        folder: Path,
        *,
        kubeconfig: Path | None = None,
        **settings: str,
    ) -> None:
        self.log = folder / "operator.log"
        self.metrics_port, self.health_port = processes.free_ports(2)
        prefix = "SPECDECODE_OPERATOR_"
        self._environment = {
            **cluster.environment,
            **({"KUBECONFIG": str(kubeconfig)} if kubeconfig else {}),
            f"{prefix}WATCH_NAMESPACES": namespace,
            f"{prefix}NAMESPACE": namespace,
            f"{prefix}LISTEN_ADDRESS": "127.0.0.1",
            f"{prefix}PORT_HEALTH": str(self.health_port),
            f"{prefix}PORT_METRICS": str(self.metrics_port),
            f"{prefix}POLL_SECONDS": "1",
            **{prefix + name.upper(): value for name, value in settings.items()},
        }
        self._output: IO[bytes] | None = None
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None, "the operator is running"
        return self.process.pid

    def start(self) -> None:
        self._output = self.log.open("ab")
        command = [str(Path(sys.executable).parent / "specdecode-operator"), "run"]
        self.process = subprocess.Popen(command, env=self._environment, stderr=self._output, stdout=self._output)

    def kill(self) -> None:
        """End the process at once, as a node failure would."""
        assert self.process is not None, "the operator is running"
        self.process.kill()
        self.process.wait(timeout=10)
        self.process = None

    def resident_mib(self) -> float:
        return processes.resident_bytes(self.pid) / 2**20

    def probe(self, path: str) -> tuple[int, str]:
        """Return status and text of a probe; status 0 before the operator listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}{path}", timeout=5) as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def __enter__(self) -> OperatorProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            code = self.process.wait(timeout=30)
            assert code == 0, f"exit code {code}: {self.log.read_text()[-2000:]}"
        if self._output is not None:
            self._output.close()


RBAC = "rbac.authorization.k8s.io"
Rights = Mapping[tuple[str, str], frozenset[str]]
"""Verbs by API group and resource."""


def grant(cluster: Cluster, namespace: str, name: str, *rights: Rights) -> str:
    """Create an account with these rights in the namespace, and nothing else. Return kubectl's flag to act as it."""
    rules = [
        {"apiGroups": [group], "resources": [resource], "verbs": sorted(verbs)}
        for part in rights
        for (group, resource), verbs in part.items()
    ]
    reference = {"apiGroup": RBAC, "kind": "Role", "name": name}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}},
        {"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": {"name": name}, "rules": rules},
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": name},
            "roleRef": reference,
            "subjects": [subject],
        },
        namespace=namespace,
    )
    return f"--as=system:serviceaccount:{namespace}:{name}"


def kubeconfig_of(cluster: Cluster, namespace: str, name: str, folder: Path) -> Path:
    """Write a kubeconfig with a token of an account and return its path."""
    document = yaml.safe_load(cluster.kubectl("config", "view", "--raw", "--minify", "--flatten"))
    token = cluster.kubectl("create", "token", name, namespace=namespace).strip()
    for user in document["users"]:
        user["user"] = {"token": token}
    path = folder / f"{name}.kubeconfig"
    path.write_text(yaml.safe_dump(document))
    return path
