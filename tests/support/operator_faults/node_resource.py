"""An extended resource on the node, in place of GPUs that the test machine does not have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from support.kube import wait_for
from support.operator_faults.api_client import Api

RESOURCE = "example.com/specdecode-faults"


@contextmanager
def node_resource(api: Api, units: int) -> Iterator[str]:
    """Advertise units of an extended resource on one node while the block runs; yields its name."""
    node = api.list("node", None)[0]["metadata"]["name"]

    def advertise(quantity: str | None) -> None:
        change = {"status": {"capacity": {RESOURCE: quantity}, "allocatable": {RESOURCE: quantity}}}
        api.patch("node", None, node, change, "status")

    advertise(str(units))
    try:
        wait_for(
            "the node has the resource",
            lambda: api.get("node", None, node)["status"]["allocatable"].get(RESOURCE) == str(units),
            timeout_s=30,
        )
        yield RESOURCE
    finally:
        advertise(None)
