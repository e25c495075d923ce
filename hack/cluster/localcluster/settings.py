"""Versions, addresses and paths of the local cluster; every other module takes a `Layout`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

KUBERNETES_VERSION = "1.36.3"
KUBERNETES_GO = "go1.26"  # the minor version that the release is built with; newer ones serve a broken openapi
BUILDKIT_VERSION = "0.30.0"
COREDNS_VERSION = "1.15.0"
METRICS_SERVER_VERSION = "0.9.0"
KUBE_ROUTER_VERSION = "2.1.0"
PAUSE_VERSION = "1"
DEBIAN_SUITE = "bookworm"

NODE_NAME = "specdecode-node"
NODE_BRIDGE = "sdnode0"  # carries the node's own address: nothing listens on the machine's outside one
NODE_ADDRESS = "10.66.0.1"
NODE_NETWORK = "10.66.0.0/24"
POD_BRIDGE = "sdpod0"
POD_NETWORK = "10.244.0.0/24"
SERVICE_NETWORK = "10.96.0.0/16"
SERVICE_OF_API = "10.96.0.1"
SERVICE_OF_DNS = "10.96.0.10"
CNI_NETWORK = "specdecode"
API_URL = f"https://{NODE_ADDRESS}:6443"
ETCD_URL = "http://127.0.0.1:12379"
ETCD_PEER_URL = "http://127.0.0.1:12380"

PAUSE_IMAGE = f"localhost/specdecode-pause:{PAUSE_VERSION}"
COREDNS_IMAGE = f"localhost/specdecode-coredns:{COREDNS_VERSION}"
METRICS_SERVER_IMAGE = f"localhost/specdecode-metrics-server:{METRICS_SERVER_VERSION}"
DEBIAN_IMAGE = f"docker.io/library/debian:{DEBIAN_SUITE}-slim"

HERE = Path(__file__).resolve().parent.parent  # hack/cluster
REPOSITORY = HERE.parent.parent
LOCK = Path("/run/lock/specdecode-cluster.lock")  # one cluster a machine, whatever its state folder


_NODE_NETWORK_PREFIX = NODE_ADDRESS.rpartition(".")[0]
_CLUSTER_NETWORK_PREFIX = POD_NETWORK.rsplit(".", 2)[0]


@dataclass(frozen=True, slots=True)
class Layout:
    """Folders of this cluster: `state` goes with `down`; `cache` and `kept_images` stay."""

    state: Path
    cache: Path

    @classmethod
    def from_environment(cls) -> Layout:
        """Return folders of our own below those that the user names: whatever is in `state` goes with `down`."""
        state = os.environ.get("SPECDECODE_CLUSTER_DIR") or "/var/lib"
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        return cls(Path(state).resolve() / "specdecode" / "cluster", Path(cache).resolve() / "specdecode")

    @property
    def kept_images(self) -> Path:
        """Images of a cluster that is down, on the same file system as its state."""
        return self.state.with_name(f"{self.state.name}-images")

    @property
    def nodes(self) -> Path:
        """Folders of the further nodes, one a node; each is laid out as `state`."""
        return self.state / "nodes"

    @property
    def kubernetes(self) -> Path:
        return self.cache / f"kubernetes-{KUBERNETES_VERSION}"

    @property
    def buildkit(self) -> Path:
        return self.cache / f"buildkit-{BUILDKIT_VERSION}"

    @property
    def coredns(self) -> Path:
        return self.cache / f"coredns-{COREDNS_VERSION}"

    @property
    def metrics_server(self) -> Path:
        return self.cache / f"metrics-server-{METRICS_SERVER_VERSION}"

    @property
    def kube_router(self) -> Path:
        return self.cache / f"kube-router-{KUBE_ROUTER_VERSION}"

    @property
    def pause(self) -> Path:
        return self.cache / f"pause-{PAUSE_VERSION}"

    @property
    def debian(self) -> Path:
        return self.cache / f"debian-{DEBIAN_SUITE}"

    @property
    def kubectl(self) -> Path:
        return self.kubernetes / "kubectl"

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's; the daemons' own stand beside it."""
        return self.state / "kubeconfig" / "admin.conf"

    @property
    def config(self) -> Path:
        return self.state / "config"

    @property
    def logs(self) -> Path:
        return self.state / "log"

    @property
    def pids(self) -> Path:
        return self.state / "pid"

    @property
    def host_before(self) -> Path:
        """What the machine looked like before us; `down` puts it back and removes the file."""
        return self.state / "host-before.json"

    @property
    def containerd_socket(self) -> Path:
        return self.state / "containerd" / "containerd.sock"

    @property
    def buildkit_socket(self) -> Path:
        return self.state / "buildkit" / "buildkitd.sock"


@dataclass(frozen=True, slots=True)
class ExtraNode:
    """A further node on the same machine: own kubelet, containerd, addresses and cgroup. `number` counts from 1."""

    name: str
    number: int

    @property
    def address(self) -> str:
        return f"{_NODE_NETWORK_PREFIX}.{1 + self.number}"

    @property
    def pod_bridge(self) -> str:
        return f"sdpod{self.number}"

    @property
    def pod_network(self) -> str:
        return f"{_CLUSTER_NETWORK_PREFIX}.{self.number}.0/24"

    @property
    def cni_network(self) -> str:
        return f"{CNI_NETWORK}{self.number}"

    @property
    def cgroup(self) -> str:
        """Root of the pods' cgroups. Two kubelets must not share one: each ends the pods that it does not know."""
        return f"specdecode-{self.number}"

    def layout(self, cluster: Layout) -> Layout:
        """Return the node's own folders."""
        return Layout(cluster.nodes / self.name, cluster.cache)
