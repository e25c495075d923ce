"""What `up`, `down` and `status` do, in order. Every step looks first, so each can be repeated after any failure."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from localcluster import (
    binaries,
    control_plane,
    daemons,
    extra_nodes,
    host,
    kept_images,
    leftovers,
    network_policies,
    node,
    packages,
)
from localcluster.console import say, step, wait_for
from localcluster.errors import ClusterError, DaemonDied, TimedOut
from localcluster.settings import API_URL, LOCK, Layout

_ALL = (*control_plane.DAEMONS, *node.DAEMONS)


def prepare(layout: Layout) -> None:
    """What `up` needs and `down` leaves in place: Debian packages and the cache of programs."""
    host.check_root()
    packages.install_missing()
    binaries.build_for_boot(layout)


def up(layout: Layout) -> None:
    """From whatever state the machine is in to a node that is Ready."""
    host.check_root()
    with _only_one(layout):
        if is_up(layout):
            say(f"==> The cluster is up ({API_URL})")
            return
        prepare(layout)
        layout.state.mkdir(parents=True, exist_ok=True, mode=0o755)
        _clear_after_reboot(layout)
        kept_images.restore(layout)
        LOCK.write_text(str(layout.state))
        host.remember(layout)
        host.prepare()
        control_plane.ensure(layout)
        node.ensure(layout)
        extra_nodes.ensure_all(layout)
        daemons.check_alive(layout, *_ALL)
        say(f"==> Ready. export KUBECONFIG={layout.kubeconfig}")


def down(layout: Layout, *, purge: bool = False) -> None:
    """Back to the machine before `up`: also after a crash, also when nothing runs.

    Images stay unless ``purge`` is set, or the runtime did not end in order.
    """
    host.check_root()
    with _only_one(layout), step("Taking the cluster down"):
        in_order = bool(daemons.running(layout, "containerd"))
        daemons.stop(layout, "buildkitd")
        network_policies.stop(layout)
        extra_nodes.end_all(layout)
        node.stop(layout)
        control_plane.stop(layout)
        leftovers.clear(layout, host.cgroups_before(layout))
        host.restore(layout)
        if purge:
            kept_images.purge(layout)
        elif in_order:
            kept_images.keep(layout)
        leftovers.wipe(layout)
        LOCK.write_text("")


def status(layout: Layout) -> bool:
    """Print what runs; whether that is a working cluster."""
    for name in (*_ALL, "buildkitd"):
        identity = daemons.running(layout, name)
        say(f"{name:24} {f'pid {identity.pid}' if identity else 'not running'}")
    ready = node.ready(layout)
    say(f"{'node':24} {'Ready' if ready else 'not Ready'}")
    for extra in extra_nodes.recorded(layout):
        say(f"{f'node {extra.name}':24} {'Ready' if node.ready(layout, extra.name) else 'not Ready'}")
    return ready


def add_node(layout: Layout, name: str, *, taint: str = "", images: Sequence[str] | None = None) -> None:
    """Add a further node to the cluster that is up, or start what does not run of it, and copy images to it.

    Args:
        layout: The cluster's folders.
        name: Name of the node.
        taint: Key of a NoSchedule taint of a new node; none when empty.
        images: Names of the images to copy; all but those for building and for DNS when None.
    """
    host.check_root()
    with _only_one(layout):
        if not is_up(layout):
            raise ClusterError("the cluster is not up: run hack/cluster/up first.")
        extra = extra_nodes.add(layout, name, taint=taint)
    extra_nodes.copy_images(layout, extra, images)  # for minutes: no other command need wait for it
    say(f"==> Node {name} is Ready ({extra.address}, pods in {extra.pod_network})")


def remove_node(layout: Layout, name: str) -> None:
    """Remove a further node: its pods are deleted, its processes and its traces on the machine go."""
    host.check_root()
    with _only_one(layout):
        extra_nodes.remove(layout, name)


def kill_node(layout: Layout, name: str) -> None:
    """End a further node as a loss of power would: the cluster is not informed. `add_node` brings it back."""
    host.check_root()
    with _only_one(layout):
        extra_nodes.kill(layout, name)


def enforce_network_policies(layout: Layout, *, enabled: bool) -> None:
    """Enforce NetworkPolicies on the first node of the cluster that is up, or stop that."""
    host.check_root()
    with _only_one(layout):
        if not enabled:
            network_policies.stop(layout)
            return
        if not is_up(layout):
            raise ClusterError("the cluster is not up: run hack/cluster/up first.")
        network_policies.start(layout)


def is_up(layout: Layout) -> bool:
    """Whether there is nothing for `up` to do."""
    running = all(daemons.running(layout, name) for name in _ALL)
    return running and node.ready(layout) and node.resolves(layout)


def is_anything_running(layout: Layout) -> bool:
    """Whether somebody has a cluster here, be it broken at the moment."""
    return any(daemons.running(layout, name) for name in _ALL)


def require_up(layout: Layout) -> None:
    """Raise unless the cluster works, or does within seconds: a probe that failed once is no cluster that is down."""
    try:
        wait_for("the cluster", lambda: is_up(layout), timeout_s=30, check=lambda: daemons.check_alive(layout, *_ALL))
    except (DaemonDied, TimedOut) as error:
        raise ClusterError("the cluster is not up: run hack/cluster/up first.") from error


def _clear_after_reboot(layout: Layout) -> None:
    """When no runtime of ours is alive, pods of an earlier run are remains, not pods."""
    if daemons.running(layout, "containerd") is None:
        daemons.stop(layout, "kubelet")
        extra_nodes.stop_all(layout)
        leftovers.clear(layout, host.cgroups_before(layout))


@contextmanager
def _only_one(layout: Layout) -> Iterator[None]:
    """One `up` or `down` at a time; one cluster a machine, because bridges and addresses are fixed."""
    LOCK.touch()
    with LOCK.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("==> Another hack/cluster command is at work; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        owner = LOCK.read_text().strip()
        if owner not in ("", str(layout.state)):
            raise ClusterError(
                f"a cluster in {owner} is up: use it, or take it down with "
                f"SPECDECODE_CLUSTER_DIR={Path(owner).parents[1]} hack/cluster/down"
            )
        yield
