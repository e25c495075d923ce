"""etcd and a kube-apiserver on loopback, and nothing else of Kubernetes: no kubelet, no controller, no scheduler."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKEN = "benchmark"
START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ApiServer:
    """A running API server; its administrator has ``kubeconfig``."""

    url: str
    kubeconfig: Path

    def get(self, path: str) -> bytes:
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=60, context=untrusting()) as answer:
            return bytes(answer.read())


def untrusting() -> ssl.SSLContext:
    """Its certificate is its own; it listens on loopback alone."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@contextmanager
def api_server(folder: Path, programs: Path) -> Iterator[ApiServer]:
    """Both processes for as long as the block runs; their data and logs stand in ``folder``."""
    etcd, peer, port = free_port(), free_port(), free_port()
    key = folder / "service-accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    (folder / "tokens.csv").write_text(f'{TOKEN},admin,1,"system:masters"\n')
    with ExitStack() as stack:
        stack.enter_context(
            _process(folder, "etcd", [shutil.which("etcd") or "etcd", *_etcd_flags(folder, etcd, peer)])
        )
        flags = _api_server_flags(folder, key, etcd, port)
        stack.enter_context(_process(folder, "kube-apiserver", [str(programs / "kube-apiserver"), *flags]))
        server = ApiServer(f"https://127.0.0.1:{port}", _kubeconfig(folder, port))
        _wait_ready(server)
        yield server


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _etcd_flags(folder: Path, client: int, peer: int) -> list[str]:
    here, there = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    return [
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={here}",
        f"--advertise-client-urls={here}",
        f"--listen-peer-urls={there}",
        f"--initial-advertise-peer-urls={there}",
        f"--initial-cluster=default={there}",
        "--unsafe-no-fsync",
    ]


def _api_server_flags(folder: Path, key: Path, etcd: int, port: int) -> list[str]:
    return [
        f"--etcd-servers=http://127.0.0.1:{etcd}",
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        f"--cert-dir={folder}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--disable-admission-plugins=ServiceAccount",
    ]


def _kubeconfig(folder: Path, port: int) -> Path:
    document: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "benchmark",
        "clusters": [
            {
                "name": "benchmark",
                "cluster": {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True},
            }
        ],
        "users": [{"name": "benchmark", "user": {"token": TOKEN}}],
        "contexts": [{"name": "benchmark", "context": {"cluster": "benchmark", "user": "benchmark"}}],
    }
    file = folder / "kubeconfig"
    file.write_text(json.dumps(document))
    return file


@contextmanager
def _process(folder: Path, name: str, command: Sequence[str]) -> Iterator[None]:
    with (folder / f"{name}.log").open("wb") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        running.terminate()
        running.wait(30)


def _wait_ready(server: ApiServer) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            server.get("/readyz")
            return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)
