"""The operator as a process of this machine, behind a counting proxy."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from support.kube import Cluster, wait_for
from support.operator_faults.counting_proxy import CountingProxy
from support.operators.operator_process import OperatorProcess


def write_kubeconfig(path: Path, port: int, namespace: str) -> Path:
    """Write a kubeconfig whose server is the proxy, which adds the credentials."""
    context = {"cluster": "proxy", "user": "none", "namespace": namespace}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "proxy",
        "clusters": [{"name": "proxy", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "contexts": [{"name": "proxy", "context": context}],
        "users": [{"name": "none", "user": {}}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


@contextmanager
def operator_behind(proxy: CountingProxy, cluster: Cluster, namespace: str, folder: Path) -> Iterator[OperatorProcess]:
    """Run the operator for one namespace while the block runs. It need not end in time: its connections may be dead."""
    operator = OperatorProcess(
        cluster,
        namespace,
        folder,
        kubeconfig=write_kubeconfig(folder / "kubeconfig", proxy.port, namespace),
        identity="local-operator",
        leader_election="true",  # as in the chart: renewals of the Lease show that connections are dead
        worker_image=cluster.operator_image,
        poll_seconds="2",
    )
    operator.start()
    try:
        wait_for("the local operator runs", lambda: operator.probe("/healthz")[0] == 200, timeout_s=60)
        yield operator
    finally:
        operator.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            operator.process.wait(15)
        operator.kill()
