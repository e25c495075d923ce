"""A kubelet that starts before containerd has read what it stores. No cluster needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from localcluster import daemons, node
from localcluster.errors import DaemonDied
from localcluster.settings import Layout


@pytest.fixture(autouse=True)
def others(layout: Layout) -> Iterator[None]:
    for name in ("containerd", "kube-proxy"):
        daemons.start(layout, name, ["sleep", "60"])
    yield
    for name in node.DAEMONS:
        daemons.stop(layout, name)


def kubelet(started: Path, last_words: str) -> list[str]:
    """Return a kubelet that ends with these words until it is started the third time."""
    script = f"echo run >> {started}; [ $(wc -l < {started}) -lt 3 ] || exec sleep 60; echo '{last_words}'; exit 1"
    return ["sh", "-c", script]


def test_it_is_started_again_until_containerd_answers(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    monkeypatch.setattr(node, "ready", lambda layout: runs.exists() and runs.read_text().count("run") == 3)
    command = kubelet(runs, "rpc error: code = Unknown desc = server is not initialized yet")
    daemons.start(layout, "kubelet", command)
    node._wait_ready(layout, command)
    assert daemons.running(layout, "kubelet")


def test_another_reason_ends_the_boot(layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "ready", lambda layout: False)
    command = kubelet(tmp_path / "runs", "no such file: kubelet.yaml")
    daemons.start(layout, "kubelet", command)
    with pytest.raises(DaemonDied, match=r"no such file: kubelet\.yaml"):
        node._wait_ready(layout, command)
