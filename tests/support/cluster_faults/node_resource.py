"""An extended resource on the node, in place of GPUs that the test machine does not have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from support.kube import Cluster, wait_for


@contextmanager
def node_resource(cluster: Cluster, resource: str, units: int) -> Iterator[None]:
    """Advertise units of an extended resource on one node while the block runs, as a device plugin does."""
    node = cluster.list("nodes")[0]["metadata"]["name"]

    def advertise(quantity: str | None) -> None:
        amounts = {resource: quantity}
        patch = json.dumps({"status": {"capacity": amounts, "allocatable": amounts}})
        cluster.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "--patch", patch)

    def is_advertised() -> bool:
        return bool(cluster.get("node", node)["status"]["allocatable"].get(resource) == str(units))

    advertise(str(units))
    try:
        wait_for("the node has the resource", is_advertised, timeout_s=30)
        yield
    finally:
        advertise(None)
