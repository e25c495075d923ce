"""NetworkPolicies, enforced by kube-router's firewall on the first node. An extra of the cluster; `up` does without."""

from __future__ import annotations

from localcluster import binaries, daemons, firewall, packages
from localcluster.console import step, wait_for
from localcluster.settings import NODE_NAME, SERVICE_NETWORK, Layout
from localcluster.shell import run, succeeds, which

DAEMON = "kube-router"
CHAINS = "KUBE-ROUTER-|KUBE-POD-FW-|KUBE-NWPLCY-"
_SETS = ("KUBE-SRC-", "KUBE-DST-", "kube-router-")


def start(layout: Layout) -> None:
    """Start the daemon, until its chains are in the packet filter. Nothing to do when it runs."""
    packages.install_missing({"ipset": "ipset"})
    binaries.build_for_network_policies(layout)
    with step("Starting kube-router's firewall"):
        daemons.start(layout, DAEMON, _command(layout))
        wait_for(
            "the firewall",
            lambda: "KUBE-ROUTER-FORWARD" in run(["iptables-save", "-t", "filter"]),
            timeout_s=60,
            check=lambda: daemons.check_alive(layout, DAEMON),
        )


def stop(layout: Layout) -> None:
    """End the daemon and remove its chains and sets; all traffic passes again. Safe to repeat."""
    daemons.stop(layout, DAEMON)
    script = firewall.removal_script(run(["iptables-save"]), CHAINS) if which("iptables-save") else ""
    if script:
        run(["iptables-restore", "--noflush"], stdin=script)
    if which("ipset"):
        for name in run(["ipset", "list", "-name"]).split():
            if name.startswith(_SETS):
                succeeds(["ipset", "destroy", name])


def _command(layout: Layout) -> list[object]:
    return [
        layout.kube_router / "kube-router",
        f"--kubeconfig={layout.kubeconfig}",
        f"--hostname-override={NODE_NAME}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        "--run-firewall=true",
        "--run-router=false",
        "--run-service-proxy=false",
        "--health-port=0",
    ]
