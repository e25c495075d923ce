"""kubectl client for tests: cluster selection, calls, and waiting. Fixtures are in tests/conftest.py.

The cluster is the one that hack/test chose: KUBECONFIG and CLUSTER from the environment, else the local cluster of
hack/cluster if it is running.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "specdecode"
HELM = Path(sys.executable).parent / "helm"
T = TypeVar("T")
Manifest = dict[str, Any]


class KubectlError(Exception):
    """kubectl exited with a non-zero status; the message is its standard error."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A reachable cluster and the names of the images built for it."""

    program: str
    kubeconfig: str | None
    local: bool
    operator_image: str
    worker_image: str

    def kubectl(
        self, *words: str, namespace: str | None = None, stdin: str | None = None, timeout_s: float = 150
    ) -> str:
        """Run kubectl and return its standard output; raises KubectlError."""
        command = [self.program, *(["--namespace", namespace] if namespace else []), *words]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=timeout_s, env=self.environment
        )
        if done.returncode != 0:
            raise KubectlError(done.stderr.strip())
        return done.stdout

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment for programs that find the cluster themselves, such as helm and kubectl plugins."""
        return {**os.environ, **({"KUBECONFIG": self.kubeconfig} if self.kubeconfig else {})}

    def helm(self, *words: str, namespace: str) -> str:
        """Run helm and return its standard output. Fail with what it said if it fails."""
        command = [HELM, "--namespace", namespace, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=self.environment)
        assert done.returncode == 0, f"helm {words[0]}: {done.stderr}{done.stdout}"
        return done.stdout

    def get(self, kind: str, name: str, namespace: str | None = None) -> Manifest:
        manifest: Manifest = json.loads(self.kubectl("get", kind, name, "-o", "json", namespace=namespace))
        return manifest

    def list(self, kind: str, selector: str = "", namespace: str | None = None) -> Sequence[Manifest]:
        """Return the objects of a kind that match a label selector."""
        words = ["get", kind, "-o", "json", *(["--selector", selector] if selector else [])]
        items: list[Manifest] = json.loads(self.kubectl(*words, namespace=namespace))["items"]
        return items

    def apply(self, *manifests: Manifest, namespace: str | None = None, server_side: bool = False) -> None:
        flags = ["--server-side", "--force-conflicts", "--field-manager=specdecode-tests"] if server_side else []
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
        self.kubectl("apply", *flags, "-f", "-", namespace=namespace, stdin=document)

    @contextmanager
    def namespace(self, purpose: str, *, wait: bool = True) -> Iterator[str]:
        """Create a namespace that is deleted with all its contents when the block ends; ``wait`` until it is gone."""
        name = f"specdecode-{purpose}-{uuid.uuid4().hex[:6]}"
        self.kubectl("create", "namespace", name)
        try:
            yield name
        finally:
            self.kubectl("delete", "namespace", name, f"--wait={str(wait).lower()}", "--timeout=110s")


def is_ready(pod: Manifest) -> bool:
    """Return whether a pod is Ready and not terminating."""
    conditions: list[dict[str, Any]] = pod["status"].get("conditions", [])
    ready = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def connect() -> Cluster | None:
    """Return the cluster to test on, or None if no cluster answers."""
    local = os.environ.get("CLUSTER", "local") == "local"
    program, kubeconfig = _local_client() if local else (shutil.which("kubectl"), os.environ.get("KUBECONFIG"))
    if program is None:
        return None
    prefix = os.environ.get("IMAGE_PREFIX") or "localhost"
    images = [
        os.environ.get(f"SPECDECODE_{part.upper()}_IMAGE") or f"{prefix}/specdecode-{part}:dev"
        for part in ("operator", "worker")
    ]
    cluster = Cluster(program, kubeconfig, local, *images)
    try:
        cluster.kubectl("get", "--raw", "/readyz", timeout_s=10)
    except (KubectlError, subprocess.TimeoutExpired):
        return None
    return cluster


def _local_client() -> tuple[str | None, str | None]:
    """Return the paths of kubectl and kubeconfig of hack/cluster, or (None, None) if they do not exist."""
    kubeconfig = subprocess.run(
        [ROOT / "hack/cluster/kubeconfig"], capture_output=True, text=True, check=True
    ).stdout.strip()
    program = str(ROOT / "hack/cluster/kubectl")
    return (program, kubeconfig) if Path(kubeconfig).exists() else (None, None)


def wait_for(what: str, condition: Callable[[], T], *, timeout_s: float = 60, every_s: float = 0.5) -> T:
    """Return the first truthy result of `condition`, which is polled every ``every_s`` seconds.

    AssertionErrors, KubectlErrors, and connection errors in the condition mean "not yet"; for example, a pod may
    disappear between being listed and being queried. So do LookupErrors and ValueErrors: a status without its field
    yet, or ``(only,) = ...`` of two. After ``timeout_s`` seconds an AssertionError reports the last result or error.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        seen: object
        try:
            answer = condition()
            if answer:
                return answer
            seen = answer
        except (AssertionError, KubectlError, LookupError, OSError, ValueError, httpx.TransportError) as error:
            seen = error
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not after {timeout_s:.0f} s; last seen: {seen!r}")
        time.sleep(every_s)
