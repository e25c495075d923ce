"""The operator as a process of this machine, behind a proxy to the API server that sees every request line.

The proxy speaks plain HTTP to the operator, and TLS with the test's credentials to the API server.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from support.kube import Cluster, wait_for
from support.operator_faults.api_client import Api
from support.operators.operator_process import OperatorProcess
from support.operators.tcp_proxy import TcpProxy

REQUEST = re.compile(rb"^(GET|POST|PUT|PATCH|DELETE) (\S+) HTTP/1\.1\r\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SentRequest:
    at: float
    method: str
    url: str

    @property
    def path(self) -> str:
        return urlsplit(self.url).path


class CountingProxy(TcpProxy):
    """The proxy. ``requests`` grows while the operator works."""

    def __init__(self, api: Api) -> None:
        self.requests: list[SentRequest] = []
        target = urlsplit(api.host)
        super().__init__(target.hostname or "", target.port or 443, api.tls)

    def sent(self, data: bytes) -> None:
        now = time.monotonic()
        self.requests += [SentRequest(now, method.decode(), url.decode()) for method, url in REQUEST.findall(data)]

    def writes_since(self, started: float) -> list[SentRequest]:
        """Return the writes from a time on, without renewals of Leases."""
        writes = [one for one in list(self.requests) if one.method != "GET" and "/leases" not in one.path]
        return [one for one in writes if one.at >= started]


@contextmanager
def operator_behind(proxy: CountingProxy, cluster: Cluster, namespace: str, folder: Path) -> Iterator[OperatorProcess]:
    """Run the operator for one namespace while the block runs. It need not end in time: its connections may be dead."""
    context = {"cluster": "proxy", "user": "none", "namespace": namespace}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "proxy",
        "clusters": [{"name": "proxy", "cluster": {"server": f"http://127.0.0.1:{proxy.port}"}}],
        "contexts": [{"name": "proxy", "context": context}],
        "users": [{"name": "none", "user": {}}],  # the proxy adds the credentials
    }
    (folder / "kubeconfig").write_text(json.dumps(document))
    operator = OperatorProcess(
        cluster,
        namespace,
        folder,
        kubeconfig=folder / "kubeconfig",
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
