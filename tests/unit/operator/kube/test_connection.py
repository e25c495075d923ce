"""Connection pool to the API server."""

from __future__ import annotations

import socket

import pytest

from specdecode_operator.kube.client import environment_proxy, keepalive_socket
from support.tiers import skip_reason


def test_environment_proxy_is_used_except_for_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "10.0.0.1,.svc")
    assert environment_proxy("https://10.0.0.1:6443") is None
    assert environment_proxy("https://kubernetes.default.svc") is None
    assert environment_proxy("https://api.example.org") == "http://proxy:3128"
    monkeypatch.delenv("https_proxy")
    assert environment_proxy("https://api.example.org") is None


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason=skip_reason("linux", "the system has no option for it"))
def test_sockets_notice_a_dead_peer_within_twenty_seconds() -> None:
    with keepalive_socket((socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 1))) as made:
        idle, interval, probes = (
            made.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        )
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert idle + interval * probes <= 20
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 20_000
