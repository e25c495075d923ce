"""What the cluster changes on the machine around it: sysctls and the node's bridge, with the way back.

`remember` runs before anything is changed and writes one file; `restore` reads it. Processes, mounts and
network namespaces of pods are cleared by `leftovers`.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from localcluster import firewall, leftovers
from localcluster.console import say, step
from localcluster.daemons import boot_id
from localcluster.errors import ClusterError
from localcluster.settings import NODE_ADDRESS, NODE_BRIDGE, NODE_NETWORK, POD_BRIDGE, ExtraNode, Layout
from localcluster.shell import run, succeeds

_NOWHERE = NODE_NETWORK.rpartition(".")[0] + ".254"
"""Address on the nodes' network that no node has."""
_SYSCTL_ROOT = Path("/proc/sys")
# Written by us, by kubelet (vm.*, kernel.*) or by kube-proxy and the bridge plugin (net.*).
_SYSCTLS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
    "net/ipv4/ip_forward",
    "net/ipv6/conf/all/forwarding",
    "net/ipv6/conf/default/forwarding",
    "net/bridge/bridge-nf-call-iptables",
    "net/bridge/bridge-nf-call-ip6tables",
    "net/ipv4/vs/conntrack",
    "net/netfilter/nf_conntrack_max",
    "net/netfilter/nf_conntrack_tcp_be_liberal",
    "net/netfilter/nf_conntrack_tcp_timeout_established",
    "net/netfilter/nf_conntrack_tcp_timeout_close_wait",
)
_PER_LINK = ("net/ipv4/conf/{link}/forwarding", "net/ipv4/conf/{link}/route_localnet")


@dataclass(frozen=True, slots=True)
class Before:
    """The machine before us; void after a reboot, which undoes all of it by itself."""

    boot: str
    sysctls: dict[str, str]
    tables: list[str]
    cgroups: list[str] = field(default_factory=list)


def remember(layout: Layout) -> None:
    """Write down what will change, unless a boot that failed half-way has done so."""
    if _read(layout) is not None:
        return
    before = Before(boot_id(), _read_sysctls(), firewall.tables(), leftovers.pod_cgroups())
    scratch = layout.host_before.with_suffix(".new")
    scratch.write_text(json.dumps(asdict(before), indent=2))
    scratch.rename(layout.host_before)


def prepare() -> None:
    """The node's bridge and address, forwarding, and iptables for bridged packets."""
    with step(f"Preparing the host network ({NODE_BRIDGE} {NODE_ADDRESS})"):
        _ensure_modules()
        if not Path("/sys/class/net", NODE_BRIDGE).exists():
            run(["ip", "link", "add", NODE_BRIDGE, "type", "bridge"])
        add_node_address(NODE_ADDRESS)
        run(["ip", "link", "set", NODE_BRIDGE, "up"])
        _write_sysctl("net/ipv4/ip_forward", "1")
        _write_sysctl("net/bridge/bridge-nf-call-iptables", "1")


def add_node_address(address: str) -> None:
    """Give the node bridge the address of a node."""
    run(["ip", "address", "replace", f"{address}/{_prefix_length()}", "dev", NODE_BRIDGE])


def add_node_network(extra: ExtraNode) -> None:
    """Add the address of a further node, and a route by which packets to its pods vanish while its bridge is away.

    Without that route, packets to pods of a lost node would leave the machine by the default route. They go to a
    neighbour that does not exist, because a sender sees a blackhole route, and sends again to another pod of a Service.
    """
    add_node_address(extra.address)
    run(["ip", "neighbour", "replace", _NOWHERE, "lladdr", "02:00:00:00:00:fe", "dev", NODE_BRIDGE, "nud", "permanent"])
    run(["ip", "route", "replace", *_route_of_lost_pods(extra)])


def remove_node_links(extra: ExtraNode) -> None:
    """Remove the address and the pod bridge of a further node; safe to repeat."""
    succeeds(["ip", "address", "delete", f"{extra.address}/{_prefix_length()}", "dev", NODE_BRIDGE])
    succeeds(["ip", "link", "delete", extra.pod_bridge])


def remove_node_network(extra: ExtraNode) -> None:
    """Undo add_node_network; safe to repeat."""
    remove_node_links(extra)
    succeeds(["ip", "route", "delete", *_route_of_lost_pods(extra)])


def _route_of_lost_pods(extra: ExtraNode) -> list[str]:
    """Return a route that the route of the node's own bridge has precedence over."""
    return [extra.pod_network, "via", _NOWHERE, "dev", NODE_BRIDGE, "metric", "4096"]


def _prefix_length() -> str:
    return NODE_NETWORK.rpartition("/")[2]


def restore(layout: Layout) -> None:
    """Links, packet filter and sysctls as they were; safe to repeat."""
    for link in (POD_BRIDGE, NODE_BRIDGE):
        if Path("/sys/class/net", link).exists():
            run(["ip", "link", "delete", link])
    before = _read(layout)
    if before is None:
        return
    firewall.clean(before.tables)
    for name, value in before.sysctls.items():
        _write_sysctl(name, value)
    layout.host_before.unlink()


def cgroups_before(layout: Layout) -> list[str]:
    """Cgroup trees of the names that our pods use, made by others: all, where nothing of ours ran since the boot."""
    before = _read(layout)
    return before.cgroups if before else leftovers.pod_cgroups()


def _read(layout: Layout) -> Before | None:
    try:
        before = Before(**json.loads(layout.host_before.read_text()))
    except FileNotFoundError:
        return None
    return before if before.boot == boot_id() else None


def _read_sysctls() -> dict[str, str]:
    links = [entry.name for entry in Path("/sys/class/net").iterdir()] + ["all", "default"]
    names = [*_SYSCTLS, *(name.format(link=link) for link in links for name in _PER_LINK)]
    present = [name for name in names if (_SYSCTL_ROOT / name).exists()]
    return {name: (_SYSCTL_ROOT / name).read_text().strip() for name in present}


def _write_sysctl(name: str, value: str) -> None:
    file = _SYSCTL_ROOT / name
    if not file.exists():
        return  # a link or a module that went away took its settings along
    if file.read_text().strip() == value:
        return
    try:
        file.write_text(value)
    except OSError as error:
        raise ClusterError(f"cannot set {file} to {value}: {error.strerror}. Are you root?") from error


def _ensure_modules() -> None:
    """Built in on some kernels, modules on others: what counts is that the feature answers."""
    if "overlay" not in Path("/proc/filesystems").read_text():
        succeeds(["modprobe", "overlay"])
    if not (_SYSCTL_ROOT / "net/bridge/bridge-nf-call-iptables").exists():
        succeeds(["modprobe", "br_netfilter"])
    if not (_SYSCTL_ROOT / "net/bridge/bridge-nf-call-iptables").exists():
        say("    this kernel has no br_netfilter: a pod cannot reach itself through its own Service")


def check_root() -> None:
    if os.geteuid() != 0:
        raise ClusterError("the local cluster makes bridges, mounts and cgroups: run this as root.")
