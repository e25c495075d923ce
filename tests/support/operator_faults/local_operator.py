"""The operator of the revision under test as a process of this machine, behind a counting proxy."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from support.kube import wait_for
from support.operator_faults.counting_proxy import CountingProxy
from support.operator_faults.revision import Revision


@dataclass(frozen=True, slots=True)
class LocalOperator:
    """The running process and the proxy before its API server."""

    proxy: CountingProxy
    log: Path


def write_kubeconfig(path: Path, port: int, namespace: str) -> None:
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


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def local_operator_process(
    proxy: CountingProxy, revision: Revision, namespace: str, folder: Path
) -> Iterator[LocalOperator]:
    """Run ``python -m specdecode_operator run`` for one namespace while the block runs."""
    kubeconfig, log, health = folder / "kubeconfig", folder / "operator.log", free_port()
    write_kubeconfig(kubeconfig, proxy.port, namespace)
    prefix = "SPECDECODE_OPERATOR_"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("KUBE")},
        "KUBECONFIG": str(kubeconfig),
        "PYTHONPATH": os.pathsep.join(str(revision.source / part) for part in ("operator", "router", "worker")),
        "PYTHONUNBUFFERED": "1",
        f"{prefix}NAMESPACE": namespace,
        f"{prefix}IDENTITY": "local-operator",
        # As in the chart: renewals of the Lease show that connections are dead.
        f"{prefix}LEADER_ELECTION": "true",
        f"{prefix}WATCH_NAMESPACES": namespace,
        f"{prefix}WORKER_IMAGE": revision.image,
        f"{prefix}POLL_SECONDS": "2",
        f"{prefix}LISTEN_ADDRESS": "127.0.0.1",
        f"{prefix}PORT_HEALTH": str(health),
        f"{prefix}PORT_METRICS": str(free_port()),
    }
    with log.open("w") as output:
        command = [sys.executable, "-m", "specdecode_operator", "run"]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
    try:

        def is_alive() -> bool:
            assert process.poll() is None, log.read_text()[-2000:]
            return httpx.get(f"http://127.0.0.1:{health}/healthz", trust_env=False, timeout=5).status_code == 200

        wait_for("the local operator runs", is_alive, timeout_s=60)
        yield LocalOperator(proxy, log)
    finally:
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 15
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        process.kill()
        process.wait(10)
