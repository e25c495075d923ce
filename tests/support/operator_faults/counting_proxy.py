"""A proxy between a local operator and the API server that sees every request line.

It speaks plain HTTP to the operator, and TLS with the test's credentials to the API server.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from support.operator_faults.api_client import Api
from support.operators.tcp_proxy import TcpProxy

REQUEST = re.compile(rb"^(GET|POST|PUT|PATCH|DELETE) (\S+) HTTP/1\.1\r\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SentRequest:
    """One request of the operator."""

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
