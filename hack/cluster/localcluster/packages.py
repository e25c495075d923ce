"""Debian packages that the node needs: only what is missing is installed, and none starts a service."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from localcluster.console import step
from localcluster.errors import ClusterError
from localcluster.shell import run, succeeds, which

# package -> a program of it; containernetworking-plugins puts its programs where PATH does not look
_PACKAGES = {
    "etcd-server": "etcd",
    "containerd": "containerd",
    "runc": "runc",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "iptables": "iptables-save",
    "nftables": "nft",
    "conntrack": "conntrack",
    "iproute2": "ip",
    "openssl": "openssl",
    "socat": "socat",
    "debootstrap": "debootstrap",
    "kmod": "modprobe",
    "procps": "sysctl",
}
_POLICY = Path("/usr/sbin/policy-rc.d")


def install_missing(packages: Mapping[str, str] = _PACKAGES) -> None:
    """apt-get what the node lacks; nothing to do is the usual case."""
    missing = [name for name, program in packages.items() if not _present(program)]
    if not missing:
        return
    if which("apt-get") is None:
        raise ClusterError(f"this needs {', '.join(missing)}; on Debian 12 they are installed for you")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    with step(f"Installing Debian packages: {' '.join(missing)}"), _no_services():
        run(["apt-get", "update", "-q"], env=quiet, hint="Is the Debian mirror reachable?")
        run(["apt-get", "install", "-qy", "--no-install-recommends", *missing], env=quiet)


def _present(program: str) -> bool:
    return Path(program).exists() if program.startswith("/") else which(program) is not None


@contextmanager
def _no_services() -> Iterator[None]:
    """Debian's etcd and containerd would start at once on ports of their own: refuse that while we install."""
    if _POLICY.exists() or not succeeds(["test", "-d", "/run/systemd/system"]):
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()
