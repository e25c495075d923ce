"""An API server of another Kubernetes release, without nodes, on loopback, for as long as a command runs."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import ssl
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from localcluster import binaries, packages
from localcluster.console import wait_for
from localcluster.errors import ClusterError
from localcluster.settings import Layout
from localcluster.shell import run

_ETCD, _ETCD_PEER, _API_PORT, _MANAGER_PORT = "http://127.0.0.1:22379", "http://127.0.0.1:22380", 16443, 16257
_SECONDS = 120


def run_beside(layout: Layout, version: str, command: list[str]) -> int:
    """Run a command with KUBECONFIG and CLUSTER=current of the release's API server, and return its exit code."""
    programs = binaries.build_other_api_server(layout, version)
    packages.install_missing({"etcd-server": "etcd", "openssl": "openssl"})
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="api-server-")))
        kubeconfig = _write_files(folder)
        for words in _daemons(programs, folder, kubeconfig):
            process = stack.enter_context(_running(folder, words))
            if Path(words[0]).name == "kube-apiserver":
                _wait_until_ready(folder, process)
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "CLUSTER": "current"}
        return subprocess.run(command, env=environment).returncode


def _write_files(folder: Path) -> Path:
    token = secrets.token_hex(16)
    (folder / "tokens").write_text(f'{token},admin,admin,"system:masters"\n')
    run(["openssl", "genrsa", "-out", f"{folder}/accounts.key", "2048"])
    cluster = {"server": f"https://127.0.0.1:{_API_PORT}", "insecure-skip-tls-verify": True}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "other", "cluster": cluster}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "other", "context": {"cluster": "other", "user": "admin"}}],
        "current-context": "other",
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    folder.chmod(0o700)
    return path


def _daemons(programs: Path, folder: Path, kubeconfig: Path) -> Iterator[list[str]]:
    etcd = shutil.which("etcd")
    if etcd is None:
        raise ClusterError("etcd is not on PATH: install Debian's etcd-server.")
    yield [
        etcd,
        "--name=other",
        f"--data-dir={folder}/etcd",
        f"--listen-client-urls={_ETCD}",
        f"--advertise-client-urls={_ETCD}",
        f"--listen-peer-urls={_ETCD_PEER}",
        f"--initial-advertise-peer-urls={_ETCD_PEER}",
        f"--initial-cluster=other={_ETCD_PEER}",
        "--unsafe-no-fsync",
    ]
    yield [
        str(programs / "kube-apiserver"),
        f"--etcd-servers={_ETCD}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--secure-port={_API_PORT}",
        f"--cert-dir={folder}",
        "--authorization-mode=RBAC",
        f"--token-auth-file={folder}/tokens",
        "--service-cluster-ip-range=10.97.0.0/16",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={folder}/accounts.key",
        f"--service-account-signing-key-file={folder}/accounts.key",
        "--endpoint-reconciler-type=none",
    ]
    yield [
        str(programs / "kube-controller-manager"),
        f"--kubeconfig={kubeconfig}",
        f"--service-account-private-key-file={folder}/accounts.key",
        "--use-service-account-credentials=true",
        "--bind-address=127.0.0.1",
        f"--secure-port={_MANAGER_PORT}",
        "--leader-elect=false",
    ]


@contextmanager
def _running(folder: Path, words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{Path(words[0]).name}.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(folder: Path, process: subprocess.Popen[bytes]) -> None:
    def check() -> None:
        if process.poll() is not None:
            raise ClusterError("the API server has ended")

    try:
        wait_for("the API server", _is_ready, timeout_s=_SECONDS, check=check)
    except ClusterError as error:
        raise ClusterError(f"{error}: {(folder / 'kube-apiserver.log').read_text()[-2000:]}") from None


def _is_ready() -> bool:
    context = ssl._create_unverified_context()
    try:
        with urllib.request.urlopen(f"https://127.0.0.1:{_API_PORT}/readyz", timeout=5, context=context):
            return True
    except OSError:
        return False
