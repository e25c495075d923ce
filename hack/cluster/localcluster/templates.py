"""The files of hack/cluster/config with this cluster's paths and addresses filled in."""

from __future__ import annotations

import string
from pathlib import Path

from localcluster import settings
from localcluster.settings import HERE, Layout


def text(layout: Layout, name: str, **more: str) -> str:
    """One template; an unknown $name in it is an error, not an empty string."""
    values = {
        "state": str(layout.state),
        "node_name": settings.NODE_NAME,
        "node_address": settings.NODE_ADDRESS,
        "node_network": settings.NODE_NETWORK,
        "pod_bridge": settings.POD_BRIDGE,
        "pod_network": settings.POD_NETWORK,
        "cni_network": settings.CNI_NETWORK,
        "service_of_dns": settings.SERVICE_OF_DNS,
        "pause_image": settings.PAUSE_IMAGE,
        "coredns_image": settings.COREDNS_IMAGE,
        "metrics_server_image": settings.METRICS_SERVER_IMAGE,
    }
    return string.Template((HERE / "config" / name).read_text()).substitute({**values, **more})


def write(layout: Layout, name: str, *, suffix: str = "", **more: str) -> Path:
    """Write a template and a suffix below the state folder, and return its path.

    A file with that content is left as it is: kube-proxy ends when its file is written again.
    """
    file = layout.config / name
    content = text(layout, name, **more) + suffix
    if not file.exists() or file.read_text() != content:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return file
