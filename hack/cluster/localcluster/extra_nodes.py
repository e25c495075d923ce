"""Further nodes on the same machine: each has a kubelet, a containerd, an address and a pod network of its own.

A node's folder is laid out as the cluster's own. The kube-proxy of the first node serves all of them, because they
share the machine's packet filter.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from localcluster import certificates, daemons, firewall, host, leftovers, node, templates
from localcluster.console import step, wait_for
from localcluster.control_plane import answers, kubectl
from localcluster.errors import ClusterError
from localcluster.settings import COREDNS_IMAGE, DEBIAN_IMAGE, NODE_NAME, PAUSE_IMAGE, ExtraNode, Layout
from localcluster.shell import run

DAEMONS = ("containerd", "kubelet")
MAX_NODES = 8
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,28}[a-z0-9])?")
_RECORD = "node.json"
_DEVICE_PLUGINS = Path("/var/lib/kubelet")
"""The kubelet empties this folder's device-plugins at its start, whatever its root folder is."""


def recorded(layout: Layout) -> list[ExtraNode]:
    """Return the nodes that were added, in the order of their numbers."""
    records = [json.loads(file.read_text()) for file in layout.nodes.glob(f"*/{_RECORD}")]
    return sorted((ExtraNode(**record) for record in records), key=lambda extra: extra.number)


def add(layout: Layout, name: str, *, taint: str = "") -> ExtraNode:
    """Add a node, or start what does not run of it, until it is Ready."""
    extra = _record(layout, name)
    _ensure(layout, extra, taint)
    return extra


def remove(layout: Layout, name: str) -> None:
    """Delete a node's pods and the node, end its processes, and remove what it changed on the machine."""
    extra = _find(layout, name)
    with step(f"Removing node {name}"):
        if answers(layout, "get", "node", name):
            _delete_pods(layout, name)
        end(layout, extra)
        if answers(layout, "get", "node", name):
            kubectl(layout, "delete", "node", name)


def kill(layout: Layout, name: str) -> None:
    """End a node's processes and its network without a word to the cluster. Its record stays."""
    extra = _find(layout, name)
    with step(f"Killing node {name}"):
        host.remove_node_links(extra)
        _end_processes(extra.layout(layout), grace_s=0)
        _clear(layout, extra)


def ensure_all(layout: Layout) -> None:
    """Start what does not run of the nodes that were added."""
    for extra in recorded(layout):
        _ensure(layout, extra, taint="")


def stop_all(layout: Layout) -> None:
    """End the processes of all nodes; their records stay."""
    for extra in recorded(layout):
        _end_processes(extra.layout(layout), grace_s=10)
        _clear(layout, extra)


def end_all(layout: Layout) -> None:
    """End all nodes with their records."""
    for extra in recorded(layout):
        end(layout, extra)


def end(layout: Layout, extra: ExtraNode) -> None:
    """End a node and leave the machine as it was before it. Needs no API server."""
    own = extra.layout(layout)
    _end_processes(own, grace_s=10)
    _clear(layout, extra)
    host.remove_node_network(extra)
    leftovers.wipe(own)


def copy_images(layout: Layout, extra: ExtraNode, images: Sequence[str] | None) -> None:
    """Give a node images of the first one. Their blobs are linked: only the unpacked files take space."""
    own = extra.layout(layout)
    offered, present = _digests(layout), _digests(own)
    missing = [name for name in images or () if name not in offered]
    if missing:
        raise ClusterError(f"no image {', '.join(missing)}: there are {', '.join(offered)}.")
    chosen = [name for name in offered if name not in (DEBIAN_IMAGE, COREDNS_IMAGE)] if images is None else images
    wanted = [name for name in chosen if present.get(name) != offered[name]]
    if not wanted:
        return
    with step(f"Copying {', '.join(wanted)}"):
        blobs = Path("containerd/root/io.containerd.content.v1.content/blobs/sha256")
        (own.state / blobs).mkdir(parents=True, exist_ok=True)
        run(["cp", "--archive", "--link", "--no-clobber", f"{layout.state / blobs}/.", own.state / blobs])
        export = shlex.join(node.ctr(layout, "images", "export", "-", *wanted))
        run(["sh", "-c", f"{export} | {shlex.join(node.ctr(own, 'images', 'import', '-'))}"])


def _digests(layout: Layout) -> dict[str, str]:
    """Return the digests of a node's images by name."""
    lines = [line.split() for line in run(node.ctr(layout, "images", "list")).splitlines()[1:]]
    return {words[0]: words[2] for words in lines if not words[0].startswith("sha256:")}


def _record(layout: Layout, name: str) -> ExtraNode:
    """Return the node of a name. A new one gets the lowest free number, from which its addresses follow."""
    known = recorded(layout)
    for extra in known:
        if extra.name == name:
            return extra
    if not _NAME.fullmatch(name) or name == NODE_NAME:
        raise ClusterError(f"{name!r} cannot name a further node: use up to 30 of a-z, 0-9 and '-'.")
    free = sorted(set(range(1, MAX_NODES)) - {extra.number for extra in known})
    if not free:
        raise ClusterError(f"there are {MAX_NODES} nodes already: remove one.")
    extra = ExtraNode(name, free[0])
    folder = extra.layout(layout).state
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / ".record"
    scratch.write_text(json.dumps({"name": extra.name, "number": extra.number}))
    scratch.rename(folder / _RECORD)
    return extra


def _find(layout: Layout, name: str) -> ExtraNode:
    for extra in recorded(layout):
        if extra.name == name:
            return extra
    names = ", ".join(extra.name for extra in recorded(layout)) or "none"
    raise ClusterError(f"no further node is called {name}: there is {names}.")


def _ensure(layout: Layout, extra: ExtraNode, taint: str) -> None:
    own = extra.layout(layout)
    with step(f"Starting containerd and kubelet of {extra.name}"):
        host.add_node_network(extra)
        certificates.ensure_for_node(layout, own, extra.name, extra.address)
        _share_mounts(own.state / "kubelet")
        network = {"cni_network": extra.cni_network, "pod_bridge": extra.pod_bridge, "pod_network": extra.pod_network}
        node.ensure_containerd(own, **network)
        node.import_image(own, own.pause / "pause", PAUSE_IMAGE)
        leftovers.make_cgroups(extra.cgroup)
        _start_kubelet(own, extra, taint)
        wait_for(
            f"node {extra.name}",
            lambda: node.ready(layout, extra.name),
            timeout_s=120,
            check=lambda: daemons.check_alive(own, *DAEMONS),
        )
        _set_pod_network(layout, extra)


def _start_kubelet(own: Layout, extra: ExtraNode, taint: str) -> None:
    """Start the kubelet with a cgroup root of its own, and where it sees an empty /var/lib/kubelet."""
    taints = [{"key": taint, "effect": "NoSchedule"}] if taint else []
    further = {"healthzPort": 0, "cgroupRoot": f"/{extra.cgroup}", "registerWithTaints": taints}
    suffix = "".join(f"{key}: {json.dumps(value)}\n" for key, value in further.items())
    config = templates.write(own, "kubelet.yaml", suffix=suffix, node_address=extra.address)
    node.write_resolv_conf(own)
    private = own.state / "var-lib-kubelet"
    private.mkdir(exist_ok=True)
    command = shlex.join(node.kubelet_command(own, config, extra.name, extra.address))
    script = f"mount --make-private / && mount --bind {shlex.quote(str(private))} {_DEVICE_PLUGINS} && exec {command}"
    daemons.start(own, "kubelet", ["unshare", "--mount", "--propagation", "unchanged", "sh", "-c", script])


def _set_pod_network(layout: Layout, extra: ExtraNode) -> None:
    """Write down the node's pod network, which is outside of the range that the controller manager gives away."""
    if not kubectl(layout, "get", "node", extra.name, "-o", "jsonpath={.spec.podCIDR}"):
        spec = {"podCIDR": extra.pod_network, "podCIDRs": [extra.pod_network]}
        kubectl(layout, "patch", "node", extra.name, "--patch", json.dumps({"spec": spec}))


def _share_mounts(folder: Path) -> None:
    """Make a folder a shared mount, so that containerd sees what the kubelet mounts below it."""
    folder.mkdir(exist_ok=True)
    if str(folder) not in leftovers.mount_points():
        run(["mount", "--bind", folder, folder])
        run(["mount", "--make-shared", folder])


def _delete_pods(layout: Layout, name: str) -> None:
    """Delete the pods of a node while its kubelet can still end them."""
    kubectl(layout, "cordon", name)
    words = ("delete", "pods", "--all-namespaces", f"--field-selector=spec.nodeName={name}", "--ignore-not-found")
    if not answers(layout, *words, "--grace-period=5", "--timeout=30s", "--request-timeout=40s"):
        kubectl(layout, *words, "--grace-period=0", "--force", "--wait=false")


def _end_processes(own: Layout, *, grace_s: float) -> None:
    """End the kubelet first: it would start the containers again that containerd ends."""
    daemons.stop(own, "kubelet", grace_s=grace_s)
    if grace_s and daemons.running(own, "containerd"):
        node.kill_tasks(own)
    daemons.stop(own, "containerd", grace_s=grace_s)


def _clear(layout: Layout, extra: ExtraNode) -> None:
    """Remove the remains of a node's pods, and its network."""
    own = extra.layout(layout)
    leftovers.end_processes(own)
    leftovers.unmount_below(own.state)
    leftovers.remove_namespaces(extra.cni_network)
    leftovers.remove_cgroups(leftovers.cgroups(extra.cgroup))
    firewall.remove_network(extra.cni_network)
    host.remove_node_links(extra)
    shutil.rmtree(own.state / "cni", ignore_errors=True)
