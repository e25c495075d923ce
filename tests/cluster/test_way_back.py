"""Checks that hack/cluster leaves foreign processes, packet filter rules and folders alone. No cluster needed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from localcluster import (
    archive,
    daemons,
    firewall,
    host,
    leftovers,
    lifecycle,
    network_policies,
    node,
    shell,
    snapshot,
    templates,
)
from localcluster.errors import ClusterError, DaemonDied
from localcluster.settings import HERE, NODE_ADDRESS, NODE_NETWORK, SERVICE_NETWORK, Layout

_SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]

_SAVED = """\
*nat
:PREROUTING ACCEPT [5:300]
:POSTROUTING ACCEPT [5:300]
:DOCKER - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
:CNI-0123 - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -s 10.244.0.7/32 -m comment --comment "name: \\"specdecode\\"" -j CNI-0123
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A DOCKER -i docker0 -j RETURN
-A KUBE-SERVICES -d 10.96.0.10/32 -j KUBE-POSTROUTING
-A CNI-0123 -d 10.244.0.0/24 -j ACCEPT
COMMIT
*filter
:INPUT ACCEPT [0:0]
-A INPUT -p tcp --dport 22 -j ACCEPT
COMMIT
"""


@pytest.fixture
def foreign_process() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that does not belong to the cluster."""
    with subprocess.Popen(_SLEEP) as process:
        yield process
        process.kill()


def test_only_our_rules_are_removed_from_a_shared_table() -> None:
    script = firewall.removal_script(_SAVED).splitlines()
    assert script == [
        "*nat",
        '-D PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
        '-D POSTROUTING -s 10.244.0.7/32 -m comment --comment "name: \\"specdecode\\"" -j CNI-0123',
        "-F KUBE-SERVICES",
        "-F KUBE-POSTROUTING",
        "-F CNI-0123",
        "-X KUBE-SERVICES",
        "-X KUBE-POSTROUTING",
        "-X CNI-0123",
        "COMMIT",
    ]


def test_programs_are_found_where_su_does_not_look(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else `down` takes a filter that it cannot see for none, and leaves its rules."""
    for name, output in (
        ("nft", '{"nftables": [{"table": {"family": "ip", "name": "nat"}}]}'),
        ("iptables-save", "*filter\n:KUBE-ROUTER-FORWARD - [0:0]\nCOMMIT"),
        ("iptables-restore", ""),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n: >{tmp_path}/{name}-ran\necho '{output}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    monkeypatch.setattr(shell, "_ADMINISTRATORS", str(tmp_path))
    assert firewall.tables() == ["ip nat"]
    network_policies.stop(layout)
    assert (tmp_path / "iptables-restore-ran").exists()


def test_chains_of_network_policies_go_alone() -> None:
    """Those of kube-proxy, whose names begin with the same word, stay."""
    saved = "*filter\n:FORWARD ACCEPT [0:0]\n:KUBE-FORWARD - [0:0]\n:KUBE-ROUTER-FORWARD - [0:0]\n"
    rules = "-A FORWARD -j KUBE-ROUTER-FORWARD\n-A FORWARD -j KUBE-FORWARD\n-A KUBE-ROUTER-FORWARD -j DROP\nCOMMIT\n"
    assert firewall.removal_script(saved + rules, network_policies.CHAINS).splitlines() == [
        "*filter",
        "-D FORWARD -j KUBE-ROUTER-FORWARD",
        "-F KUBE-ROUTER-FORWARD",
        "-X KUBE-ROUTER-FORWARD",
        "COMMIT",
    ]


def test_a_daemon_starts_once_and_ends(layout: Layout) -> None:
    daemons.start(layout, "sleeper", _SLEEP)
    first = daemons.running(layout, "sleeper")
    daemons.start(layout, "sleeper", _SLEEP)
    assert daemons.running(layout, "sleeper") == first
    daemons.stop(layout, "sleeper")
    assert daemons.identify(first.pid) != first


@pytest.mark.parametrize("change", [{"started_ticks": 1}, {"boot": "another"}], ids=["later process", "earlier boot"])
def test_a_reused_pid_is_never_signalled(
    layout: Layout, foreign_process: subprocess.Popen[bytes], change: dict[str, Any]
) -> None:
    """A process is not signalled if it merely has the pid that the pid file names."""
    record = json.dumps(asdict(daemons.identify(foreign_process.pid)) | change)
    layout.pids.mkdir(parents=True)
    (layout.pids / "etcd.json").write_text(record)
    daemons.stop(layout, "etcd")
    assert foreign_process.poll() is None
    (layout.pids / "etcd.json").write_text(record)
    assert daemons.running(layout, "etcd") is None


def test_truncated_pid_file_counts_as_no_daemon(layout: Layout) -> None:
    layout.pids.mkdir(parents=True)
    (layout.pids / "etcd.json").write_text('{"pid": 1')
    assert daemons.running(layout, "etcd") is None


def test_a_dead_daemon_is_reported_with_its_log(layout: Layout) -> None:
    words = [sys.executable, "-c", "print('no space left on device')"]
    daemons.start(layout, "etcd", words)
    while daemons.running(layout, "etcd"):
        pass
    with pytest.raises(DaemonDied, match="no space left on device"):
        daemons.check_alive(layout, "etcd")


def test_a_daemon_that_cannot_be_written_down_is_ended(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it keeps its port, and neither `up` nor `down` can end it, because they know daemons by their files."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    (layout.pids / ".full").mkdir(parents=True)
    monkeypatch.setattr(Path, "write_text", lambda path, text: (path.parent / ".full").read_text())
    with pytest.raises(IsADirectoryError):
        daemons.start(layout, "etcd", _SLEEP)
    assert started[0].wait(5) == -signal.SIGKILL


@pytest.mark.parametrize("name", ["NO_PROXY", "no_proxy"])
def test_daemons_and_shells_use_no_proxy_for_the_clusters_own_addresses(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for both in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(both, raising=False)
    monkeypatch.setenv(name, "internal.example")
    daemons.start(layout, "etcd", [sys.executable, "-c", "import os; print(os.environ['NO_PROXY'])"])
    while daemons.running(layout, "etcd"):
        pass
    networks = [NODE_NETWORK, SERVICE_NETWORK, "internal.example"]
    assert daemons.log_lines(layout, "etcd")[0].split(",") == networks
    script = f'set -u; eval "$({HERE}/env)"; echo "$NO_PROXY $no_proxy"'
    upper, lower = subprocess.check_output(["bash", "-c", script], text=True).split()
    assert upper == lower == ",".join([NODE_ADDRESS, *networks[1:]])


def test_a_folder_that_the_user_names_keeps_what_was_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`down` removes the state folder, which is one of our own below it. Images move on the same disk."""
    (tmp_path / "thesis").write_text("x")
    monkeypatch.setenv("SPECDECODE_CLUSTER_DIR", str(tmp_path))
    layout = Layout.from_environment()
    layout.state.mkdir(parents=True)
    leftovers.wipe(layout)
    assert (tmp_path / "thesis").exists()
    assert not layout.state.exists()
    assert layout.kept_images.is_relative_to(tmp_path)
    monkeypatch.setenv("SPECDECODE_CLUSTER_DIR", "")
    assert Layout.from_environment().state == Path("/var/lib/specdecode/cluster")


def test_cgroups_of_others_are_kept_when_nothing_of_ours_ran(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first `up` clears what an earlier run has left. Another kubelet's cgroups have the same name."""
    monkeypatch.setattr(leftovers, "pod_cgroups", lambda: ["/sys/fs/cgroup/kubepods"])
    assert host.cgroups_before(layout) == ["/sys/fs/cgroup/kubepods"]


def test_daemon_that_ignores_sigterm_is_killed(layout: Layout) -> None:
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    daemons.start(layout, "deaf", [sys.executable, "-c", program])
    identity = daemons.running(layout, "deaf")
    while "deaf" not in (layout.logs / "deaf.log").read_text():
        pass
    daemons.stop(layout, "deaf", grace_s=0.2)
    assert daemons.identify(identity.pid) != identity


def test_a_second_cluster_is_refused(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lock = tmp_path_factory.mktemp("lock") / "lock"
    lock.write_text("/somewhere/else/specdecode/cluster")
    monkeypatch.setattr(lifecycle, "LOCK", lock)
    monkeypatch.setattr(lifecycle.host, "check_root", lambda: None)
    with pytest.raises(ClusterError, match="SPECDECODE_CLUSTER_DIR=/somewhere/else hack/cluster/down"):
        lifecycle.up(layout)
    with pytest.raises(ClusterError, match="/somewhere/else"):
        lifecycle.down(layout)


def test_every_template_is_filled(layout: Layout) -> None:
    for file in (path for path in (HERE / "config").rglob("*") if path.is_file()):
        name = str(file.relative_to(HERE / "config"))
        assert "$" not in templates.text(layout, name, forward="")


def test_leftover_process_is_reported(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A process that names the state folder, such as a shim, is found even if it starts after the first scan."""
    monkeypatch.setattr(snapshot, "FILE", tmp_path_factory.mktemp("snapshot") / "before.json")
    snapshot.save(layout)
    with subprocess.Popen([*_SLEEP, str(layout.state)]) as forgotten:
        left = [line for line in snapshot.differences(layout) if "process" in line]
        forgotten.send_signal(signal.SIGKILL)
    assert len(left) == 1
    assert str(layout.state) in left[0]


@pytest.mark.parametrize(("machine", "architecture"), [("x86_64", "amd64"), ("aarch64", "arm64")])
def test_images_are_of_this_machines_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, architecture: str
) -> None:
    """Others are found by no pod and no build, whatever programs they hold."""
    monkeypatch.setattr(archive.platform, "machine", lambda: machine)
    (tmp_path / "pause").write_text("program")
    archive.from_program(tmp_path / "pause", "localhost/pause:1", tmp_path / "image.tar")
    with tarfile.open(tmp_path / "image.tar") as image:
        config = image.extractfile("config.json")
        assert config is not None
        assert json.load(config)["architecture"] == architecture


def test_pods_resolve_by_servers_that_they_can_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods cannot reach systemd-resolved, which listens on loopback. Its own file has the servers that it asks."""
    files = [tmp_path / "resolv.conf", tmp_path / "resolved.conf"]
    monkeypatch.setattr(node, "_RESOLVER_FILES", files)
    files[0].write_text("nameserver 127.0.0.53\noptions edns0\n")
    assert node._outside_nameservers() == []
    files[1].write_text("nameserver 192.0.2.1\nnameserver 192.0.2.2\n")
    assert node._outside_nameservers() == ["192.0.2.1", "192.0.2.2"]
    files[0].write_text("nameserver 192.0.2.3\n")
    assert node._outside_nameservers() == ["192.0.2.3"]
