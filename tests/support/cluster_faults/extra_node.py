"""A second node of the local cluster, which takes only pods that tolerate its taint."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from support.kube import ROOT, Cluster

COMMAND = ROOT / "hack" / "cluster" / "node"
TAINT = "specdecode.io/test"
TOLERATIONS = [{"key": TAINT, "operator": "Exists"}]


def node_command(*words: str, timeout_s: float = 180) -> str:
    """Run hack/cluster/node and return its output."""
    done = subprocess.run([COMMAND, *words], capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def extra_node(images: Sequence[str], *, timeout_s: float = 180) -> Iterator[str]:
    """Yield the name of a second node that has images of the first one; it is removed afterwards."""
    name = f"test-{uuid.uuid4().hex[:6]}"
    try:
        node_command("add", name, "--taint", TAINT, "--images", *images, timeout_s=timeout_s)
        yield name
    finally:
        node_command("remove", name)


def bring_back(name: str) -> None:
    """Start a node that was killed."""
    node_command("add", name, "--images")


def drain(cluster: Cluster, name: str, *, timeout_s: int = 240) -> None:
    """Drain a node as an administrator does; budgets are respected."""
    flags = ["--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={timeout_s}s"]
    cluster.kubectl("drain", name, *flags, timeout_s=timeout_s + 10)


def prefer(node: str) -> dict[str, Any]:
    """Return fields of pods that run on a tainted node while it takes pods, and elsewhere otherwise."""
    expression = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    term = {"weight": 100, "preference": {"matchExpressions": [expression]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}
    return {"tolerations": TOLERATIONS, "affinity": affinity}


def spread(name: str) -> dict[str, Any]:
    """Return fields of a deployment's workers that the scheduler spreads over all nodes, the tainted one too."""
    workers = {"matchLabels": {"specdecode.io/name": name, "specdecode.io/role": "worker"}}
    constraint = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": workers,
    }
    return {"tolerations": TOLERATIONS, "topologySpreadConstraints": [constraint]}
