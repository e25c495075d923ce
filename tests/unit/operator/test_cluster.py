"""The connection to the API server, before anything is asked."""

from __future__ import annotations

import pytest

from specdecode_operator.kube.client import environment_proxy


def test_the_environments_proxy_is_used_but_where_it_says_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "10.0.0.1,.svc")
    assert environment_proxy("https://10.0.0.1:6443") is None
    assert environment_proxy("https://kubernetes.default.svc") is None
    assert environment_proxy("https://api.example.org") == "http://proxy:3128"
    monkeypatch.delenv("https_proxy")
    assert environment_proxy("https://api.example.org") is None
