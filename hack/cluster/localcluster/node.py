"""The node: containerd, the kubelet, kube-proxy, the images that it cannot boot without, and CoreDNS."""

from __future__ import annotations

import ipaddress
import shutil
from collections.abc import Sequence
from pathlib import Path

from localcluster import archive, daemons, templates
from localcluster.console import step, wait_for
from localcluster.control_plane import answers, kubectl
from localcluster.settings import (
    COREDNS_IMAGE,
    NODE_ADDRESS,
    NODE_NAME,
    PAUSE_IMAGE,
    Layout,
)
from localcluster.shell import run, succeeds

DAEMONS = ("containerd", "kubelet", "kube-proxy")
_READING = "server is not initialized yet"
_RESOLVER_FILES = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))
"""The second one has the servers of systemd-resolved, which is itself on loopback, as on Debian's cloud images."""
_READY = '{.status.conditions[?(@.type=="Ready")].status}'


def ensure(layout: Layout) -> None:
    """Start what does not run, until the node is Ready and DNS answers."""
    with step("Starting containerd"):
        ensure_containerd(layout)
        import_image(layout, layout.pause / "pause", PAUSE_IMAGE)
        import_image(layout, layout.coredns / "coredns", COREDNS_IMAGE)
    with step("Starting kubelet and kube-proxy"):
        command = _kubelet(layout)
        daemons.start(layout, "kubelet", command)
        kubectl(layout, "apply", "-f", "-", stdin=templates.text(layout, "kube-proxy-rbac.yaml"))
        config = templates.write(layout, "kube-proxy.yaml")
        daemons.start(layout, "kube-proxy", ["kube-proxy", f"--config={config}"])
        _wait_ready(layout, command)
    with step("Starting CoreDNS"):
        forward = "forward . /etc/resolv.conf" if _outside_nameservers() else ""
        manifest = templates.text(layout, "coredns.yaml", forward=forward)
        kubectl(layout, "apply", "-f", "-", stdin=manifest)
        rollout = ("rollout", "status", "deployment/coredns", "--namespace=kube-system")
        kubectl(layout, *rollout, "--timeout=120s")


def stop(layout: Layout) -> None:
    """kube-proxy and kubelet first: then nobody restarts the pods that containerd is told to kill."""
    daemons.stop(layout, "kube-proxy")
    daemons.stop(layout, "kubelet")
    if daemons.running(layout, "containerd"):
        kill_tasks(layout)
        for container in run(ctr(layout, "containers", "list", "--quiet")).split():
            succeeds(ctr(layout, "containers", "delete", container))
    daemons.stop(layout, "containerd")


def ready(layout: Layout, name: str = NODE_NAME) -> bool:
    if not answers(layout, "get", "node", name):
        return False
    return kubectl(layout, "get", "node", name, "-o", f"jsonpath={_READY}") == "True"


def resolves(layout: Layout) -> bool:
    """Whether the cluster's DNS has a server; the boot ends with it."""
    words = ("get", "deployment", "coredns", "--namespace=kube-system")
    if not answers(layout, *words):
        return False
    return kubectl(layout, *words, "-o", "jsonpath={.status.readyReplicas}") not in ("", "0")


def ctr(layout: Layout, *words: str | Path) -> list[str]:
    """The command line of containerd's own client, in Kubernetes' namespace."""
    client = ["ctr", "--address", str(layout.containerd_socket), "--namespace", "k8s.io"]
    return [*client, *(str(word) for word in words)]


def ensure_containerd(layout: Layout, **network: str) -> None:
    """Start containerd with its CNI network; `network` has what a further node changes in the network's template."""
    config = templates.write(layout, "containerd.toml")
    templates.write(layout, "cni/10-specdecode.conflist", **network)
    if not daemons.running(layout, "containerd"):
        # Its state of a run that ended with the machine names tasks and mounts that are gone.
        shutil.rmtree(layout.state / "containerd" / "state", ignore_errors=True)
    daemons.start(layout, "containerd", ["containerd", "--config", str(config)])
    wait_for(
        "containerd",
        lambda: succeeds(ctr(layout, "version")),
        timeout_s=30,
        check=lambda: daemons.check_alive(layout, "containerd"),
    )


def import_image(layout: Layout, program: Path, image: str) -> None:
    """An image of one program into the node's store, unless it is there."""
    if image in run(ctr(layout, "images", "list", "--quiet")).split():
        return
    file = layout.state / f"{program.name}.tar"
    archive.from_program(program, image, file)
    run(ctr(layout, "images", "import", file))
    file.unlink()


def _kubelet(layout: Layout) -> list[str]:
    config = templates.write(layout, "kubelet.yaml")
    write_resolv_conf(layout)
    return kubelet_command(layout, config, NODE_NAME, NODE_ADDRESS)


def kubelet_command(layout: Layout, config: Path, name: str, address: str) -> list[str]:
    """Return the command line of a node's kubelet."""
    return [
        "kubelet",
        f"--config={config}",
        f"--kubeconfig={layout.kubeconfig.parent}/kubelet.conf",
        f"--hostname-override={name}",
        f"--node-ip={address}",
        f"--root-dir={layout.state / 'kubelet'}",
        f"--cert-dir={layout.state / 'kubelet' / 'pki'}",
    ]


def write_resolv_conf(layout: Layout) -> None:
    """Write the resolver's file of pods that do not use the cluster's DNS."""
    lines = [f"nameserver {address}" for address in _outside_nameservers()]
    (layout.config / "resolv.conf").write_text("\n".join([*lines, "options ndots:5"]) + "\n")


def _outside_nameservers() -> list[str]:
    """Those of the machine that a pod can reach: a resolver on loopback is not among them."""
    for file in filter(Path.exists, _RESOLVER_FILES):
        named = [line.split()[1] for line in file.read_text().splitlines() if line.startswith("nameserver ")]
        if found := [address for address in named if not ipaddress.ip_address(address).is_loopback]:
            return found
    return []


def _wait_ready(layout: Layout, kubelet: Sequence[str]) -> None:
    """Wait until the node is Ready.

    The kubelet ends at once while containerd, which answers its own client already, still reads what it stores.
    """

    def check() -> None:
        if not daemons.running(layout, "kubelet") and _READING in "".join(daemons.log_lines(layout, "kubelet")[-1:]):
            daemons.start(layout, "kubelet", kubelet)
        daemons.check_alive(layout, *DAEMONS)

    wait_for(f"node {NODE_NAME}", lambda: ready(layout), timeout_s=120, check=check)


def kill_tasks(layout: Layout) -> None:
    """Containers end here, while containerd can still tell their shims to go."""
    for task in run(ctr(layout, "tasks", "list", "--quiet")).split():
        succeeds(ctr(layout, "tasks", "kill", "--signal", "SIGKILL", task))
    for task in run(ctr(layout, "tasks", "list", "--quiet")).split():
        succeeds(ctr(layout, "tasks", "delete", "--force", task))
